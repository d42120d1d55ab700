"""add_rms_norm, bf16: python benchmarks/bench_add_rms_norm.py [--json results.json]"""

import torch.nn.functional as F
from table import Table, copy, num_sets, random

from nanovllm import ops


def bench(table: Table, tokens: int, hidden: int) -> None:
    moved = 4 * tokens * hidden * 2  # x and residual read, residual and out written
    x, residual, out = random(3, num_sets(moved), tokens, hidden)
    weight = random(hidden)
    table.row(
        f"{tokens} x {hidden}",
        moved,
        lambda i: ops.add_rms_norm(out[i], residual[i], x[i], weight, 1e-6),
        copy=copy(moved),
        eager=lambda i: F.rms_norm(residual[i].add_(x[i]), (hidden,), weight, 1e-6),
    )


def main() -> None:
    table = Table(__doc__)
    for case in [(1, 1024), (64, 1024), (4096, 1024), (1, 4096), (4096, 4096)]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
