"""Draws the results of the kernel and engine benchmarks: one SVG a file in benchmarks/results/.

    python -m pip install matplotlib
    python benchmarks/plot.py docs/images

Attention and the other operators are drawn as a share of what the GPU reached in the same run, the engine's workloads
as a share of the roofline of their own steps. Results without such rows are left out.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

plt.rcParams["svg.fonttype"] = "none"

RESULTS = Path(__file__).parent / "results"


def bars(result: dict) -> tuple[str, list[tuple[str, float]]]:
    """Axis label, and (case, value) of every row that can be drawn."""
    if "throughput" in result:
        parts = [(name, row) for name, part in result.items() if isinstance(part, dict) for row in part.get("rows", [])]
        named = [(_workload(name, row), row["roofline_share"]) for name, row in parts if "roofline_share" in row]
        return "% of the roofline of its own steps", [(name, 100 * value) for name, value in named]
    rows = result.get("rows", [])
    if "read_tb_s" in result:
        label, peak = "% of the read bandwidth of the same run", result["read_tb_s"]
        seed = [r for r in rows if r.get("layout") == "seed"]
        named = [(f"{r['case']}, block {r['block_size']}", r.get("tb_s")) for r in seed]
        return label, [(name, 100 * value / peak) for name, value in named if value]
    if "cublas_tflop_s" in result:
        peak = result["cublas_tflop_s"]
        named = [(f"{r['case']}, {r['storage']}", r.get("tflop_s")) for r in rows]
        return "% of cuBLAS in the same run", [(name, 100 * value / peak) for name, value in named if value]
    if "peak_gb_s" in result:
        peak = result["peak_gb_s"]
        if rows and "context" in rows[0]:  # decoder_step
            named = [(f"{r['rows']} x {r['context']:,}", 1000 * r["tb_s"]) for r in rows]
        else:
            named = [(r["shape"], r.get("gb_s")) for r in rows]
        return "% of the read bandwidth of the same run", [(name, 100 * value / peak) for name, value in named if value]
    return "", []


def _workload(part: str, row: dict) -> str:
    counts = [f"{value:,} {name.replace('_', ' ')}" for name, value in row.items() if type(value) is int]
    return f"{part}: {', '.join(counts)}"


def draw(path: Path, folder: Path) -> None:
    result = json.loads(path.read_text())
    label, values = bars(result)
    if not values:
        return
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.24 * len(values)))
    names = [name for name, _ in values]
    axes.barh(range(len(values)), [value for _, value in values], color="#4477aa")
    axes.set_yticks(range(len(values)), names, fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(
        f"{path.stem}: {result.get('gpu', result.get('device', '')).split(',')[0]}, {result.get('date', '')}",
        fontsize=9,
    )
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / f"{path.stem}.svg", metadata={"Date": None})
    plt.close(figure)
    print(folder / f"{path.stem}.svg")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(RESULTS.glob("*.json")):
        draw(path, folder)


if __name__ == "__main__":
    main()
