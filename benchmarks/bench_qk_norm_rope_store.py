"""qk_norm_rope_store, qkv bf16: python benchmarks/bench_qk_norm_rope_store.py [--json results.json]"""

import torch
from table import Table, copy, num_sets, random

from nanovllm import ops

Q, KV, DIM, MAX_POS = 16, 8, 128, 4096
COS_SIN = random(MAX_POS, DIM, dtype=torch.float32)
Q_WEIGHT, K_WEIGHT = random(2, DIM)


def bench(table: Table, tokens: int, dtype: torch.dtype) -> None:
    # qkv read, q and k written back, k and v stored, the table's row, position and slot
    row = (Q + 2 * KV) * DIM * 2 + (Q + KV) * DIM * 2 + 2 * KV * DIM * dtype.itemsize + DIM * 4 + 16
    sets = num_sets(tokens * row)
    qkv = random(sets, tokens, (Q + 2 * KV) * DIM)
    k_cache, v_cache = torch.zeros(2, -(-sets * tokens // 16), 16, KV, DIM, dtype=dtype, device="cuda")
    slots = torch.randperm(sets * tokens, device="cuda").view(sets, tokens)
    positions = torch.randint(MAX_POS, (sets, tokens), device="cuda")
    scale = torch.ones(1, device="cuda") if dtype.itemsize == 1 else None
    tables, caches, heads = (Q_WEIGHT, K_WEIGHT, COS_SIN), (k_cache, v_cache), (Q, KV)
    table.row(
        f"{tokens} tokens, {str(dtype)[6:]}",
        tokens * row,
        lambda i: ops.qk_norm_rope_store(qkv[i], *tables, positions[i], *caches, slots[i], scale, scale, *heads, 1e-6),
        copy=copy(tokens * row),
    )


def main() -> None:
    table = Table(__doc__)
    for case in [(t, d) for d in (torch.bfloat16, torch.float8_e4m3fn) for t in (1, 64, 256, 4096, 16384)]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
