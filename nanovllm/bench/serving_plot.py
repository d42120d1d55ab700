"""Draws a run of `nanovllm bench serve`; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from nanovllm.bench.serving import Record


def plot(records: list[Record], path: Path, title: str) -> None:
    """Writes distributions of TTFT, inter-token and end-to-end latency, and TTFT over the time of arrival.

    Raises:
        ImportError: matplotlib is not installed. ValueError: a file type that matplotlib does not write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("bench serve: --plot needs matplotlib: pip install matplotlib") from None
    good = [r for r in records if r.error is None]
    figure = Figure(figsize=(10, 7), layout="constrained")
    (ttft, itl), (e2e, arrivals) = figure.subplots(2, 2)
    series = (
        (ttft, "time to first token", [r.ttft for r in good]),
        (itl, "between pieces of an answer", [gap for r in good for gap in r.itl]),
        (e2e, "end to end", [r.e2e for r in good]),
    )
    for axes, label, values in series:
        ordered = sorted(1e3 * v for v in values)
        axes.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))])
        axes.set(xlabel=f"{label}, ms", ylabel="% of them within", xlim=(0, None), ylim=(0, 100))
        axes.grid(alpha=0.3)
    arrivals.scatter([r.start for r in good], [1e3 * r.ttft for r in good], s=8)
    arrivals.set(xlabel="start, s", ylabel="time to first token, ms", ylim=(0, None))
    arrivals.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path)
