"""rope_attention_decode in a layer, bf16: python benchmarks/bench_rope_attention_decode.py [--json results.json]

Qwen3-0.6B's heads. A call is the projection of q, k and v, then the operator, then the output projection with its
residual, as in a decode step; the baseline has qk_norm_rope_store and paged_attention_decode in the operator's place.
GB/s: of the keys and values and the two weights.
"""

import torch
from table import Table, num_sets, random

from nanovllm import ops

Q, KV, DIM, HIDDEN, BLOCK = 16, 8, 128, 1024, 16
HEADS = (Q, KV, DIM)
CASES = [(1, 640), (4, 640), (8, 640), (8, 4096), (16, 640), (32, 640), (64, 640), (128, 570), (256, 570)]


def bench(table: Table, batch: int, length: int) -> None:
    width, blocks = (Q + 2 * KV) * DIM, -(-length // BLOCK)
    moved = batch * length * 2 * KV * DIM * 2 + (width + Q * DIM) * HIDDEN * 2
    sets = num_sets(moved)
    k_cache, v_cache = (random(sets * batch * blocks, BLOCK, KV, DIM) for _ in range(2))
    tables = torch.randperm(sets * batch * blocks, device="cuda").int().view(sets, batch, blocks)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    positions = lens.long() - 1
    slots = tables[:, :, -1].long() * BLOCK + positions % BLOCK
    weights, outputs = random(sets, width, HIDDEN), random(sets, HIDDEN, Q * DIM)
    q_weight, k_weight, norm_weight = random(DIM), random(DIM), random(HIDDEN)
    cos_sin = torch.full((length, DIM), 0.5**0.5, device="cuda")  # a turn by 45 degrees
    x, residual, scaled = random(batch, HIDDEN), random(batch, HIDDEN), random(batch, HIDDEN)
    squares = torch.empty(ops.decode_squares_shape(HIDDEN, batch), device="cuda")
    qkv, out = random(batch, width), random(batch, Q, DIM)
    q = qkv.view(batch, -1, DIM)[:, :Q]
    plan = torch.empty(ops.decode_plan_numel(batch, "cuda"), dtype=torch.int32, device="cuda")
    ops.decode_plan(plan, lens, KV, BLOCK)
    workspace = torch.zeros(ops.decode_workspace_numel(batch, length, *HEADS, "cuda"), device="cuda")
    norms, caches, eps, scale = (q_weight, k_weight, cos_sin), (k_cache, v_cache), 1e-6, DIM**-0.5

    def project(i: int) -> None:
        ops.decode_linear(qkv, x, weights[i], weight_complete=True)

    def output(i: int) -> None:
        args = out.flatten(1), outputs[i], None, norm_weight
        ops.decode_linear_add(residual, scaled, squares, *args, weight_complete=True)

    def ours(i: int) -> None:
        project(i)
        rest = tables[i], lens, plan, workspace, None, None, eps, scale, True
        ops.rope_attention_decode(out, qkv, *norms, *caches, *rest)
        output(i)

    def apart(i: int) -> None:
        project(i)
        ops.qk_norm_rope_store(qkv, *norms, positions, *caches, slots[i], None, None, Q, KV, eps)
        ops.paged_attention_decode(out, q, *caches, tables[i], lens, plan, workspace, None, None, scale, True)
        output(i)

    table.row(f"{batch} x {length:,}", moved, ours, apart=apart)


def main() -> None:
    table = Table(__doc__)
    for case in CASES:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
