"""store_kv_cache, 8 x 128: python benchmarks/bench_store_kv_cache.py [--json results.json]

The baseline is a Triton kernel of nano-vLLM's form: a program a token, its row in one block.
"""

import torch
import triton
import triton.language as tl
from table import Call, Table, copy, num_sets, random

from nanovllm import ops

HEADS, DIM = 8, 128
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@triton.jit
def store_row(k, k_stride, v, v_stride, k_cache, v_cache, slots, width: tl.constexpr):
    t = tl.program_id(0)
    slot = tl.load(slots + t)
    if slot == -1:
        return
    i = tl.arange(0, width)
    tl.store(k_cache + slot * width + i, tl.load(k + t * k_stride + i))
    tl.store(v_cache + slot * width + i, tl.load(v + t * v_stride + i))


def bench(table: Table, tokens: int, dtype: torch.dtype) -> None:
    moved = tokens * (2 * HEADS * DIM * (2 + dtype.itemsize) + 8)
    sets = num_sets(moved)
    k, v = random(2, sets, tokens, HEADS, DIM)
    k_cache, v_cache = torch.zeros(2, -(-sets * tokens // 16), 16, HEADS, DIM, dtype=dtype, device="cuda")
    slots = torch.randperm(sets * tokens, device="cuda").view(sets, tokens)
    scale = torch.ones(1, device="cuda") if dtype == E4M3 else None

    def ours(i: int) -> None:
        ops.store_kv_cache(k[i], v[i], k_cache, v_cache, slots[i], scale, scale)

    def in_triton(i: int) -> None:
        strides = k.stride(1), v.stride(1)
        store_row[(tokens,)](k[i], strides[0], v[i], strides[1], k_cache, v_cache, slots[i], HEADS * DIM)

    baselines: dict[str, Call] = {"copy": copy(moved)}
    if dtype == BF16:
        baselines["triton"] = in_triton
    table.row(f"{tokens} tokens, {str(dtype)[6:]}", moved, ours, **baselines)
    if dtype == BF16:
        assert torch.equal(k_cache.view(-1, HEADS, DIM)[slots], k)


def main() -> None:
    table = Table(__doc__)
    for case in [(t, d) for d in (BF16, E4M3) for t in (1, 16, 64, 256, 1024, 4096, 16384)]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
