"""Results of a benchmark as tables, JSON and charts."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm import __version__
from nanovllm.bench.engine import Result
from nanovllm.bench.roofline import Cost, Machine
from nanovllm.bench.step_times import breakdown, idle_share

if TYPE_CHECKING:
    from nanovllm.llm import LLM

_HEADS = {
    "time_to_first_token": "TTFT ms",
    "time_per_output_token": "ms/token",
    "prompt_tokens_per_second": "tok/s in",
    "output_tokens_per_second": "tok/s out",
    "input_len": "in",
    "output_len": "out",
    "roofline_seconds": "roofline s",
    "roofline_share": "of it",
}
_MIN_WIDTH = 7  # of a column whose values are not known yet
_MILLISECONDS = ("time_to_first_token", "time_per_output_token")
Row = dict[str, Any]


def result_row(result: Result, cost: Cost, machine: Machine) -> Row:
    """The fields of a result, and the roofline of its steps."""
    row = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "steps"}
    row["roofline_seconds"] = cost.floor(result.steps, machine)
    row["roofline_share"] = row["roofline_seconds"] / result.seconds
    return row


def head_line(row: Row) -> str:
    """The heads of row_line()'s columns."""
    return _line(row, map(_head, row))


def row_line(row: Row) -> str:
    """The values of a row, in columns that are wide enough for most."""
    return _line(row, (_shown(name, value) for name, value in row.items()))


def _line(row: Row, cells: Iterable[str]) -> str:
    return "  ".join(cell.rjust(max(len(_head(name)), _MIN_WIDTH)) for cell, name in zip(cells, row))


def table(rows: Sequence[Row]) -> str:
    """Aligned lines: heads, then the values of each row."""
    lines = [[_head(name) for name in rows[0]]]
    lines += [[_shown(name, value) for name, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths)) for line in lines)


def _head(name: str) -> str:
    return _HEADS.get(name, name.replace("_", " "))


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        if name in _MILLISECONDS:
            return f"{1e3 * value:,.2f}"
        if name.startswith("roofline"):
            return f"{value:.0%}" if name == "roofline_share" else f"{value:.4g}"
        return f"{value:,.0f}" if value >= 1000 else f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def profile_table(result: Result) -> str:
    """Microseconds of a mean step of each kind, by phase, and the share of its time that the GPU idled."""
    rows = breakdown(result.steps)
    names = list(rows[-1])
    rows = [{name: row.get(name, 0.0) for name in names} for row in rows]
    text = "microseconds of a mean step (on CPU, launch computes):\n"
    text += table([{n: round(v) if isinstance(v, float) else v for n, v in row.items()} for row in rows])
    share = idle_share(result.steps)
    return text + ("" if share is None else f"\nGPU idle: {share:.1%}")


def roofline_line(results: Sequence[Result], cost: Cost, machine: Machine) -> str:
    """What the roofline of these results is made of."""
    steps = [s for r in results for s in r.steps]
    read, flops = sum(map(cost.bytes_of, steps)), sum(map(cost.flops_of, steps))
    return (
        f"roofline: {len(steps):,} steps read {read / 1e9:.4g} GB of weights and KV cache at "
        f"{machine.bandwidth / 1e12:.3g} TB/s, and compute {flops / 1e12:.4g} TFLOP at "
        f"{machine.compute / 1e12:.3g} TFLOP/s; the greater of both, step by step"
    )


def facts(llm: LLM) -> Row:
    """Where and when, with what, and the engine's options that differ from the defaults."""
    config, device = llm.config, llm.engine.runner.device
    options = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in ("model", "token") and getattr(config, f.name) != f.default
    }
    return {
        "command": shlex.join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "driver": _driver() if device.type == "cuda" else None,
        "nanovllm": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "python": platform.python_version(),
        "model": llm.engine.runner.model_config.architecture,
        "dtype": str(llm.engine.runner.dtype).removeprefix("torch."),
        "options": options,
        "num_kvcache_blocks": llm.engine.runner.num_kvcache_blocks,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def report(facts: Row, rows: Sequence[Row], results: Sequence[Result], machine: Machine, profile: bool) -> Row:
    """Everything, for JSON; facts: from facts()."""
    content = facts | {"bandwidth": machine.bandwidth, "compute": machine.compute, "rows": list(rows)}
    if profile:
        content["profile_us"] = [breakdown(r.steps) for r in results]
        content["gpu_idle"] = [idle_share(r.steps) for r in results]
    return content


def plot(path: Path, rows: Sequence[Row], results: Sequence[Result], title: str) -> None:
    """A bar for each row, measured seconds and roofline; of one row, below it, what its steps did over time.

    Raises:
        ValueError: matplotlib is not installed, or cannot write a file of that kind.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ValueError(f"plot: needs matplotlib (pip install matplotlib): {e}") from e
    one = len(rows) == 1
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(rows) + (5 if one else 0)), layout="constrained")
    grid = figure.add_gridspec(3 if one else 1, 1, height_ratios=(1, 2, 2) if one else (1,))
    axes = figure.add_subplot(grid[0])
    names = [", ".join(f"{_head(n)} {v:,}" for n, v in row.items() if type(v) is int) for row in rows]
    places = range(len(rows))
    seconds = [r.seconds for r in results]
    axes.barh(places, seconds, height=0.7, color="#4477aa", label="measured")
    axes.barh(places, [r["roofline_seconds"] for r in rows], height=0.35, color="#ccbb44", label="roofline")
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=9)
    if one:
        steps = results[0].steps
        ends = [s.end for s in steps]
        running = figure.add_subplot(grid[1])
        running.plot(ends, [len(s.decode_ends) + len(s.chunks) for s in steps], color="#4477aa")
        running.set_ylabel("sequences in a step")
        lasting = figure.add_subplot(grid[2], sharex=running)
        lasting.plot(ends, [1e3 * (b - a) for a, b in zip([0.0, *ends], ends)], ".", markersize=2, color="#4477aa")
        lasting.set_ylabel("ms a step")
        lasting.set_yscale("log")
        lasting.set_xlabel("seconds")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as e:
        raise ValueError(f"plot: {path} cannot be written: {e}") from e
