"""silu_and_mul, bf16: python benchmarks/bench_silu_and_mul.py [--json results.json]"""

import torch.nn.functional as F
from table import Table, copy, num_sets, random

from nanovllm import ops


def bench(table: Table, tokens: int, width: int) -> None:
    moved = 3 * tokens * width * 2
    gate_up, out = (random(num_sets(moved), tokens, n) for n in (2 * width, width))
    gate, up = gate_up.chunk(2, dim=-1)
    table.row(
        f"{tokens} x {width}",
        moved,
        lambda i: ops.silu_and_mul(out[i], gate_up[i]),
        copy=copy(moved),
        eager=lambda i: F.silu(gate[i]) * up[i],
    )


def main() -> None:
    table = Table(__doc__)
    for case in [(1, 3072), (64, 3072), (4096, 3072), (4096, 12288)]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
