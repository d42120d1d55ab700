"""CPU operators against the torch eager code that they replace, at the sizes of SmolLM2-135M.

    python benchmarks/bench_ops_cpu.py [--ops silu_and_mul ...] [--tokens 1 16 512] [--dtype float32]

A line a case: operator | tokens | microseconds (median) | times faster than eager; the geometric mean last.
A new operator is one function in CASES, which returns ours and the eager code as calls without arguments.
"""

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor
from torch.utils.benchmark import Timer

from nanovllm import ops

HIDDEN, INTERMEDIATE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
BLOCK_SIZE, MAX_POS, EPS = 16, 4096, 1e-6

Call = Callable[[], object]


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As in transformers."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in transformers: x [T, H, D], cos and sin [T, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_table() -> Tensor:
    """Real angles: repeated in place, anything but a rotation drifts to zero or infinity."""
    angles = torch.randn(MAX_POS, HEAD_DIM // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rms_norm(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    x, weight = torch.randn(num_tokens, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    out = torch.empty_like(x)
    return lambda: ops.rms_norm(out, x, weight, EPS), lambda: eager_rms_norm(x, weight)


def add_rms_norm(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    x, residual = torch.zeros(2, num_tokens, HIDDEN, dtype=dtype)  # zeros: the residual never grows
    weight, out = torch.randn(HIDDEN, dtype=dtype), torch.empty_like(x)
    return (
        lambda: ops.add_rms_norm(out, residual, x, weight, EPS),
        lambda: eager_rms_norm(residual.add_(x), weight),
    )


def silu_and_mul(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    gate_up = torch.randn(num_tokens, 2 * INTERMEDIATE, dtype=dtype)
    out = torch.empty_like(gate_up[:, :INTERMEDIATE])
    gate, up = gate_up.chunk(2, dim=1)
    return lambda: ops.silu_and_mul(out, gate_up), lambda: F.silu(gate) * up


def qk_norm_rope_store(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    qkv = torch.randn(num_tokens, (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=dtype)
    q_weight, k_weight = torch.ones(2, HEAD_DIM, dtype=dtype)
    cos_sin, positions = rotary_table(), torch.randint(0, MAX_POS, (num_tokens,))
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    k_cache, v_cache = torch.zeros(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_tokens]
    heads = qkv.view(num_tokens, -1, HEAD_DIM)

    def eager() -> None:
        q, k, v = heads.split([NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        cos, sin = (h.repeat(1, 2)[:, None].to(dtype) for h in cos_sin[positions].chunk(2, dim=1))
        k = eager_rotary(eager_rms_norm(k, k_weight), cos, sin)
        q = eager_rotary(eager_rms_norm(q, q_weight), cos, sin)
        k_cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[slots] = k
        v_cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[slots] = v

    def ours() -> None:
        ops.qk_norm_rope_store(
            qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots, None, None,
            NUM_Q_HEADS, NUM_KV_HEADS, EPS,
        )  # fmt: skip

    return ours, eager


def rotary_embedding(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    q = torch.randn(num_tokens, NUM_Q_HEADS, HEAD_DIM, dtype=dtype)
    k = torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    cos_sin, positions = rotary_table(), torch.randint(0, MAX_POS, (num_tokens,))

    def eager() -> tuple[Tensor, Tensor]:
        cos, sin = (h.repeat(1, 2)[:, None].to(dtype) for h in cos_sin[positions].chunk(2, dim=1))
        return eager_rotary(q, cos, sin), eager_rotary(k, cos, sin)

    return lambda: ops.rotary_embedding(q, k, cos_sin, positions), eager


def store_kv_cache(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    k, v = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    k_cache, v_cache = torch.zeros(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_tokens]

    def eager() -> None:
        k_cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[slots] = k
        v_cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[slots] = v

    return lambda: ops.store_kv_cache(k, v, k_cache, v_cache, slots), eager


def skinny_linear(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    """The gate and up projection; above 16 rows the engine calls F.linear itself."""
    x = torch.randn(min(num_tokens, 16), HIDDEN).to(dtype)
    weight = torch.randn(2 * INTERMEDIATE, HIDDEN).to(dtype)
    out = x.new_empty(len(x), len(weight))
    return lambda: ops.skinny_linear(out, x, weight), lambda: F.linear(x, weight)


def skinny_linear_gguf(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    """The gate and up projection in Q4_1 against F.linear on the dense weight."""
    quant = GGMLQuantizationType.Q4_1
    x = torch.randn(min(num_tokens, 16), HIDDEN).to(dtype)
    blocks = quantize(torch.randn(2 * INTERMEDIATE, HIDDEN).numpy(), quant)
    dense, packed = torch.from_numpy(dequantize(blocks, quant)).to(dtype), torch.from_numpy(blocks)
    out = x.new_empty(len(x), len(dense))
    return lambda: ops.skinny_linear_gguf(out, x, packed, quant), lambda: F.linear(x, dense)


def paged_attention_decode(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    """As many sequences as tokens, at most 64, contexts of 512; eager has its keys and values dense."""
    batch, length, scale = min(num_tokens, 64), 512, HEAD_DIM**-0.5
    num_blocks = batch * length // BLOCK_SIZE
    q = torch.randn(batch, NUM_Q_HEADS, HEAD_DIM).to(dtype)
    k_cache, v_cache = torch.randn(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    block_tables = torch.randperm(num_blocks).view(batch, -1).int()
    context_lens = torch.full((batch,), length, dtype=torch.int32)
    plan = torch.empty(ops.decode_plan_numel(batch, "cpu"), dtype=torch.int32)
    numel = ops.decode_workspace_numel(batch, length, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, "cpu")
    out, workspace = torch.empty_like(q), torch.empty(numel)
    ops.decode_plan(plan, context_lens, NUM_KV_HEADS, BLOCK_SIZE)
    args = out, q, k_cache, v_cache, block_tables, context_lens, plan, workspace, None, None, scale
    k, v = torch.randn(2, batch, NUM_KV_HEADS, length, HEAD_DIM).to(dtype)
    return (
        lambda: ops.paged_attention_decode(*args),
        lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
    )


def paged_attention_prefill(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    """One prompt, keys and values packed."""
    q = torch.randn(num_tokens, NUM_Q_HEADS, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    out, scale = torch.empty_like(q), HEAD_DIM**-0.5
    cu_seqlens_q = torch.tensor([0, num_tokens], dtype=torch.int32)
    args = out, q, k, v, cu_seqlens_q, cu_seqlens_q[1:], None, num_tokens, None, None, scale
    heads = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    return (
        lambda: ops.paged_attention_prefill(*args),
        lambda: F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True),
    )


def sample(num_tokens: int, dtype: torch.dtype) -> tuple[Call, Call]:
    """Temperature, top-k 50 and top-p 0.9 over a large vocabulary, at most 16 rows; eager sorts."""
    rows, vocab = min(num_tokens, 16), 151936
    logits = 3 * torch.randn(rows, vocab).to(dtype)
    token_ids, seeds = torch.empty(rows, dtype=torch.int64), torch.arange(rows)
    temperature, top_k = torch.full((rows,), 0.8), torch.full((rows,), 50, dtype=torch.int32)
    top_p, min_p = torch.full((rows,), 0.9), torch.zeros(rows)

    def eager() -> Tensor:
        x, ids = (logits.float() / 0.8).sort(dim=-1, descending=True)
        x[:, 50:] = float("-inf")
        probs = x.softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= 0.9, 0.0)
        return ids.gather(1, (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True))

    return lambda: ops.sample(token_ids, logits, temperature, top_k, top_p, min_p, seeds, seeds), eager


CASES = {f.__name__: f for f in (
    rms_norm, add_rms_norm, silu_and_mul, rotary_embedding, store_kv_cache, qk_norm_rope_store,
    skinny_linear, skinny_linear_gguf, paged_attention_decode, paged_attention_prefill, sample,
)}  # fmt: skip


def microseconds(call: Call) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.2).median * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 512])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}")
    print(f"{'op':23} | {'tokens':>6} | {'us':>9} | {'x-eager':>7}")
    ratios = []
    for name in args.ops:
        for num_tokens in args.tokens:
            ours, eager = CASES[name](num_tokens, getattr(torch, args.dtype))
            us = microseconds(ours)
            ratios.append(microseconds(eager) / us)
            print(f"{name:23} | {num_tokens:6} | {us:9.2f} | {ratios[-1]:7.2f}", flush=True)
    print(f"geometric mean {math.prod(ratios) ** (1 / len(ratios)):.2f}")


if __name__ == "__main__":
    main()
