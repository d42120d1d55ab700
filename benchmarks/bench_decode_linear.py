"""decode_linear, bf16, products of Qwen3 0.6B, 8B and half of 32B: benchmarks/bench_decode_linear.py [--json FILE]

Calls follow each other as in a model's step: each waits for the one before, while its weight is on its way.
"""

import torch
import torch.nn.functional as F
from table import Table, num_sets, random

from nanovllm import ops

ROWS = (1, 8, 16, 32, 64, 128, 192, 256)
LARGE_ROWS = (1, 16, 32)  # of weights of more than 2^24 elements
EPS = 1e-6


def make_workspace() -> torch.Tensor:
    return torch.full((ops.decode_linear_workspace_numel("cuda"),), -1, dtype=torch.int32, device="cuda")


def bench_linear(table: Table, rows: int, k: int, n: int) -> None:
    moved = k * n * 2  # the weight
    weight = random(num_sets(moved), n, k)
    x, out, workspace = random(rows, k), random(rows, n), make_workspace()
    table.row(
        f"{rows} rows, {k} -> {n}",
        moved,
        lambda i: ops.decode_linear(out, x, weight[i], weight_complete=True, workspace=workspace),
        linear=lambda i: F.linear(x, weight[i]),
    )


def bench_silu_and_mul(table: Table, rows: int, k: int, n: int) -> None:
    """With the second half of a norm."""
    moved = k * n * 2
    weight = random(num_sets(moved), n, k)
    x, out = random(rows, k), random(rows, n // 2)
    squares = torch.rand(ops.decode_squares_shape(k, rows), device="cuda")
    options = {"silu_and_mul": True, "weight_complete": True, "workspace": make_workspace()}
    table.row(
        f"{rows} rows, {k} -> {n}, silu",
        moved,
        lambda i: ops.decode_linear(out, x, weight[i], None, squares, EPS, **options),
        linear_then_silu=lambda i: ops.silu_and_mul(out, F.linear(x, weight[i])),
    )


def bench_add(table: Table, rows: int, k: int, n: int) -> None:
    """With the residual and the first half of a norm."""
    moved = k * n * 2
    weight = random(num_sets(moved), n, k)
    x, residual, scaled, norm_weight = random(rows, k), random(rows, n), random(rows, n), random(n)
    squares = torch.empty(ops.decode_squares_shape(n, rows), device="cuda")
    options = {"weight_complete": True, "workspace": make_workspace()}
    table.row(
        f"{rows} rows, {k} -> {n}, add",
        moved,
        lambda i: ops.decode_linear_add(residual, scaled, squares, x, weight[i], None, norm_weight, **options),
        linear_then_norm=lambda i: ops.add_rms_norm(scaled, residual, F.linear(x, weight[i]), norm_weight, EPS),
    )


def main() -> None:
    table = Table(__doc__)
    for rows in ROWS:
        bench_linear(table, rows, 1024, 4096)
    for rows in (1, 8, 16, 32, 64):
        bench_linear(table, rows, 1024, 151936)
    for rows in ROWS:
        bench_silu_and_mul(table, rows, 1024, 6144)
    for k in (2048, 3072):
        for rows in ROWS:
            bench_add(table, rows, k, 1024)
    for rows in LARGE_ROWS:
        bench_linear(table, rows, 4096, 6144)
        bench_silu_and_mul(table, rows, 4096, 24576)
        bench_add(table, rows, 12288, 4096)
    for k, n in ((5120, 5120), (5120, 25600), (12800, 5120)):
        for rows in LARGE_ROWS:
            bench_linear(table, rows, k, n)
    table.end()


if __name__ == "__main__":
    main()
