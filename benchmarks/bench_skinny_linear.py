"""skinny_linear, bf16, Qwen3-0.6B's projections: python benchmarks/bench_skinny_linear.py [--json results.json]

The engine calls it on CUDA for weights of up to 4,096 outputs, and torch's product for wider ones, which fill the GPU
(nanovllm/layers/linear.py): the last two shapes show why.
"""

import torch.nn.functional as F
from table import Table, num_sets, random

from nanovllm import ops

SHAPES = [(1024, 4096), (2048, 1024), (3072, 1024), (1024, 6144), (1024, 151936)]  # in, out


def bench(table: Table, rows: int, k: int, n: int) -> None:
    moved = k * n * 2  # the weight
    weight = random(num_sets(moved), n, k)
    x, out = random(rows, k), random(rows, n)
    table.row(
        f"{rows} rows, {k} -> {n}",
        moved,
        lambda i: ops.skinny_linear(out, x, weight[i]),
        linear=lambda i: F.linear(x, weight[i]),
    )


def main() -> None:
    table = Table(__doc__)
    for case in [(rows, *shape) for shape in SHAPES for rows in (1, 2, 4, 8, 16)]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
