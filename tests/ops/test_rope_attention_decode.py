"""Norms, rotation, store and attention in one: as qk_norm_rope_store and paged_attention_decode one after the other."""

from dataclasses import dataclass, replace

import pytest
import reference
import torch
from paged import Paged, make_paged
from torch import Tensor

from nanovllm import ops
from tests.ops.test_paged_attention_decode import arguments as attention_arguments
from tests.ops.test_paged_attention_decode import check as check_attention

E4M3 = torch.float8_e4m3fn
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...] = (1, 15, 16, 17, 0, 63, 64, 65, 600)
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    block_size: int = 16
    head_major: bool = False
    q_norm: bool = True
    k_norm: bool = True

    def __repr__(self) -> str:
        norms = "q" * self.q_norm + "k" * self.k_norm or "no"
        heads = f"h{self.num_q_heads}+{self.num_kv_heads}-d{self.head_dim}-rot{self.rotary_dim}"
        order = "-head_major" if self.head_major else ""
        return f"b{len(self.lens)}-max{max(self.lens)}-{heads}-block{self.block_size}-{norms}norm{order}"


CORNERS = [
    *(Case(num_q_heads=g, num_kv_heads=1) for g in (1, 2, 3, 8, 9, 16)),
    *(Case(head_dim=128, rotary_dim=128, num_q_heads=g * 2) for g in (2, 16)),
    Case(block_size=256),
    Case(head_major=True, head_dim=128, rotary_dim=128),
    Case(q_norm=False),
    Case(k_norm=False),
    Case(q_norm=False, k_norm=False, head_dim=128, rotary_dim=128),
    Case(lens=(0,)),
    Case(lens=(1,)),
    Case(lens=(3000,)),
    Case(lens=tuple(range(1, 200, 3))),
    Case(lens=(700, 0, 5, 1300) * 20, head_dim=128, rotary_dim=128, num_kv_heads=3),
]
CPU_ONLY = [Case(rotary_dim=32), Case(head_dim=80, rotary_dim=80), Case(head_dim=24, rotary_dim=10, block_size=4)]


@dataclass
class Inputs:
    qkv: Tensor
    weights: tuple[Tensor | None, Tensor | None]
    cos_sin: Tensor
    kv: Paged  # its newest slots hold NaN
    num_q_heads: int

    def arguments(self) -> list:
        q = self.qkv.new_empty(len(self.qkv), self.num_q_heads, self.kv.k.shape[3])
        out, _, *rest, scale = attention_arguments(q, self.kv)
        return [out, self.qkv, *self.weights, self.cos_sin, *rest, EPS, scale]

    def slots(self) -> Tensor:
        """Of each row's newest token; -1 for padding rows."""
        lens, size = self.kv.context_lens.long(), self.kv.k.size(1)
        last = (lens - 1).clamp(min=0)
        block = self.kv.block_tables.gather(1, (last // size)[:, None])[:, 0].long()
        return torch.where(lens > 0, block * size + last % size, -1)

    def parts(self) -> tuple[Tensor, Paged]:
        """Queries and caches by qk_norm_rope_store."""
        qkv = self.qkv.clone()
        kv = replace(self.kv, k=self.kv.k.clone(), v=self.kv.v.clone())
        num_kv_heads, dim = kv.k.shape[2:]
        scales = self.arguments()[11:13]
        positions = (kv.context_lens.long() - 1).clamp(min=0)
        heads = self.num_q_heads, num_kv_heads
        ops.qk_norm_rope_store(
            qkv, *self.weights, self.cos_sin, positions, kv.k, kv.v, self.slots(), *scales, *heads, EPS
        )
        return qkv.unflatten(1, (-1, dim))[:, : self.num_q_heads], kv


def make(case: Case, device: str, dtype: torch.dtype, float8: bool = False) -> Inputs:
    torch.manual_seed(0)
    d, batch, num_heads = case.head_dim, len(case.lens), case.num_q_heads + 2 * case.num_kv_heads
    kv = make_paged(list(case.lens), case.num_kv_heads, d, case.block_size, dtype, device, case.head_major)
    if float8:
        kv = replace(kv, k=kv.k.to(E4M3), v=kv.v.to(E4M3))
    wide = torch.randn(batch, num_heads * d + 16, device=device).to(dtype)
    q_weight, k_weight = torch.rand(2, d, device=device).to(dtype) + 0.5
    inputs = Inputs(
        wide[:, 8:-8],
        (q_weight if case.q_norm else None, k_weight if case.k_norm else None),
        reference.cos_sin_table(max(case.lens) + 1, case.rotary_dim, device=device),
        kv,
        case.num_q_heads,
    )
    poison(inputs)
    return inputs


def poison(inputs: Inputs) -> None:
    """NaN in the newest slots."""
    slots, size = inputs.slots(), inputs.kv.k.size(1)
    slots = slots[slots >= 0]
    for cache in (inputs.kv.k, inputs.kv.v):
        bits = cache.view(torch.uint8) if cache.dtype == E4M3 else cache
        bits[slots // size, slots % size] = 0x7F if cache.dtype == E4M3 else float("nan")


def check(inputs: Inputs) -> None:
    """Stored like the parts, and attention over what was stored."""
    q, want = inputs.parts()
    args = inputs.arguments()
    before = inputs.qkv.clone()
    ops.rope_attention_decode(*args)
    reference.assert_same_bits(inputs.qkv, before, "qkv")
    reference.assert_same_bits(inputs.kv.v, want.v, "v_cache")
    out, kv = args[0], inputs.kv
    if out.is_cpu:
        reference.assert_same_bits(kv.k, want.k, "k_cache")
    else:  # squares are added up in another order
        assert torch.equal(kv.k.isnan(), want.k.isnan()), "stored elsewhere"
        rtol = 0.14 if kv.k.dtype == E4M3 else 2 * torch.finfo(kv.k.dtype).eps
        reference.assert_close(kv.k.float(), want.k.float(), atol=2e-2 * rtol, rtol=rtol, what="k_cache")
        same = (kv.k.view(torch.uint8) == want.k.view(torch.uint8)).float().mean()
        assert same > 0.98, f"{same:.2%} of the key bytes"
    check_attention(out, q, kv)


@pytest.mark.parametrize("case", CORNERS, ids=repr)
def test_as_its_parts(case: Case, device: str, dtype: torch.dtype) -> None:
    check(make(case, device, dtype))


@pytest.mark.parametrize("case", CPU_ONLY, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_only_the_cpu_takes(case: Case, dtype: torch.dtype) -> None:
    check(make(case, "cpu", dtype))


@pytest.mark.parametrize("case", CORNERS[:8], ids=repr)
def test_float8_cache(case: Case, device: str, dtype: torch.dtype) -> None:
    check(make(case, device, dtype, float8=True))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [(1,), (700, 1, 64, 0), (129, 64, 1, 700, 5, 16, 17, 1999) * 8], ids=len)
def test_past_complete_in_a_graph(lens: tuple[int, ...]) -> None:
    """Projections written by the kernel before it; the newest slots hold NaN until the call stores them."""
    inputs = make(Case(lens, 16, 8, 128, 128), "cuda", torch.bfloat16)
    weight = torch.randn(inputs.qkv.shape[1], 64, device="cuda").bfloat16()
    x = torch.randn(len(lens), 64, device="cuda").bfloat16()
    inputs.qkv = torch.empty(len(lens), len(weight), device="cuda", dtype=torch.bfloat16)
    args = inputs.arguments()
    context_lens, plan = args[8:10]

    def step() -> None:
        ops.decode_plan(plan, context_lens, 8, 16)
        ops.decode_linear(inputs.qkv, x, weight, weight_complete=True)
        ops.rope_attention_decode(*args, past_complete=True)

    step()
    check(inputs)
    want = [t.clone() for t in (args[0], inputs.kv.k, inputs.kv.v)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        poison(inputs)
        for t in (plan, inputs.qkv, args[0]):
            t.zero_()
        graph.replay()
        for got, expected in zip((args[0], inputs.kv.k, inputs.kv.v), want):
            reference.assert_same_bits(got, expected)


def test_errors() -> None:
    good = make(Case(), "cpu", torch.float32).arguments()
    qkv, k_weight, cos_sin, (k_cache, v_cache) = good[1], good[3], good[4], good[5:7]
    longer = good[8].clone()
    longer[-1] = 601
    cases = [
        ({1: qkv[:, 1:]}, "qkv: expected a width of 640 (6 + 2 * 2 heads of 64), got 639"),
        ({1: qkv[1:]}, "out: expected batch = 8 (from qkv) in dimension 0, got 9"),
        ({1: qkv.double()}, "qkv: expected dtype float32 or bfloat16 on CPU, got float64"),
        ({3: k_weight[:8]}, "k_weight: expected head_dim = 64 (from out) in dimension 0, got 8"),
        ({4: cos_sin[:, :63].contiguous()}, "cos_sin: expected an even rotary_dim of at most head_dim = 64, got 63"),
        ({4: cos_sin[:600], 8: longer}, "context_lens: expected at most 600 (rows of cos_sin), got 601"),
        ({5: k_cache[:, :, :1]}, "v_cache: expected num_kv_heads = 1 (from k_cache) in dimension 2, got 2"),
        ({5: k_cache[:, :12], 6: v_cache[:, :12]}, "k_cache: expected a block size that is a power of two, got 12"),
        ({7: good[7] + 1000}, "block_tables: expected block ids 0 to"),
        ({8: good[8] - 2}, "context_lens: expected 0 to 640 (40 blocks of 16), got -1 at [0]"),
        ({0: good[0][:, :5]}, "qkv: expected num_q_heads to be a multiple of num_kv_heads = 2, got 5"),
    ]
    for changes, message in cases:
        args = [changes.get(i, arg) for i, arg in enumerate(good)]
        with pytest.raises(RuntimeError) as error:
            ops.rope_attention_decode(*args)
        assert str(error.value).startswith("rope_attention_decode: " + message)
