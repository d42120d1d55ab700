"""The timer of the kernel benchmarks, and what a run of them prints first.

A case is a list of calls that do the same work on different inputs, together several times as large as the L2
cache. They are captured into one CUDA graph, in turn; the time of a call is the median replay over their number.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]
WORKING_SET_BYTES = 512 << 20  # of a case's calls together; the H200's L2 holds 50 MiB


def num_input_sets(bytes_per_call: int) -> int:
    """Input sets to rotate, so that each is out of the L2 cache when its turn comes."""
    return max(2, -(-WORKING_SET_BYTES // max(1, bytes_per_call)))


def time_calls(calls: Sequence[Call], min_us: float = 3000.0, replays: int = 7) -> float:
    """Microseconds a call: a graph of all calls, repeated to last about min_us, median of the replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
        rounds = 1
        while True:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(rounds):
                    for call in calls:
                        call()
            graph.replay()
            us = _time_replay(graph)
            if us >= min_us or rounds >= 64:
                break
            rounds = min(64, max(rounds + 1, round(rounds * min_us / us + 0.5)))
        times = [_time_replay(graph) for _ in range(replays)]
    return statistics.median(times) / (rounds * len(calls))


def _time_replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def read_bandwidth() -> float:
    """Bytes a second of a kernel that only reads 4 GiB: the roof of operators bound by reading."""
    import triton
    import triton.language as tl

    @triton.jit
    def read(x, out, per_program, block: tl.constexpr):
        pid = tl.program_id(0)
        lanes = tl.arange(0, block)
        total = tl.zeros([block], tl.int32)
        for i in range(0, per_program, block):
            total ^= tl.load(x + pid.to(tl.int64) * per_program + i + lanes)
        tl.store(out + pid * block + lanes, total, mask=total == 123456789)

    x = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    programs, block = 1 << 14, 4096
    out = torch.empty(programs * block, dtype=torch.int32, device="cuda")
    us = time_calls([lambda: read[(programs,)](x, out, x.numel() // programs, block, num_warps=8)])
    return x.numel() * x.element_size() / us * 1e6


def machine() -> dict[str, str]:
    """GPU, driver, torch, commit and date of this run."""

    def line(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    gpu = line("nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader")
    commit = line("git", "rev-parse", "--short", "HEAD")
    return {"gpu": gpu, "torch": torch.__version__, "commit": commit, "date": time.strftime("%Y-%m-%d")}


def write_json(path: str | None, rows: list[dict[str, Any]], **facts: Any) -> None:
    if path is not None:
        content = {"command": " ".join(sys.argv), **machine(), **facts, "rows": rows}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
