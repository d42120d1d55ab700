from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import reference
import torch
from paged import ABSURD, Paged, make_paged
from torch import Tensor

from nanovllm import ops

E4M3 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.5, 2.0  # exact in every dtype


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...] = (1, 15, 16, 17, 0, 255, 256, 257, 600)
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    head_major: bool = False


CORNERS = [
    *(Case(num_q_heads=g, num_kv_heads=1) for g in (1, 2, 3, 4, 5, 7, 8, 16)),
    *(Case(head_dim=d) for d in (80, 96, 128, 256)),
    *(Case(block_size=b) for b in (32, 256)),
    Case(head_major=True),
    Case(lens=(0,)),
    Case(lens=(1,)),
    Case(lens=(3000,)),
]
CPU_ONLY = [*(Case(head_dim=d) for d in (8, 24, 56)), Case(block_size=1), Case(num_q_heads=17, num_kv_heads=1)]


def make(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Paged]:
    torch.manual_seed(0)
    q = torch.randn(len(case.lens), case.num_q_heads, case.head_dim, device=device).to(dtype)
    heads = (case.num_kv_heads, case.head_dim)
    return q, make_paged(list(case.lens), *heads, case.block_size, dtype, device, case.head_major)


def arguments(q: Tensor, kv: Paged, out: Tensor | None = None) -> list:
    """Arguments in order, out and (on CPU) workspace full of NaN; an e4m3 cache has scales."""
    batch, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.k.shape[1:3]
    plan = torch.full((ops.decode_plan_numel(batch, q.device),), -7, dtype=torch.int32, device=q.device)
    ops.decode_plan(plan, kv.context_lens, num_kv_heads, block_size)
    longest = kv.block_tables.size(1) * block_size
    numel = ops.decode_workspace_numel(batch, longest, num_q_heads, num_kv_heads, head_dim, q.device)
    workspace = torch.full((numel,), float("nan") if q.is_cpu else 0.0, device=q.device)
    out = torch.full_like(q, float("nan")) if out is None else out
    scales = [torch.tensor([s], device=q.device) if kv.k.dtype == E4M3 else None for s in (K_SCALE, V_SCALE)]
    return [out, q, kv.k, kv.v, kv.block_tables, kv.context_lens, plan, workspace, *scales, head_dim**-0.5]


def decode(q: Tensor, kv: Paged, out: Tensor | None = None) -> Tensor:
    args = arguments(q, kv, out)
    ops.paged_attention_decode(*args)
    return args[0]


def rows(kv: Paged, keep: slice) -> Paged:
    return replace(kv, block_tables=kv.block_tables[keep], context_lens=kv.context_lens[keep])


def check(out: Tensor, q: Tensor, kv: Paged) -> None:
    for b, n in enumerate(kv.context_lens.tolist()):
        if n == 0:
            reference.assert_same_bits(out[b], torch.zeros_like(out[b]), f"row {b}")
            continue
        k, v = (reference.paged_rows(c, kv.block_tables[b], n) for c in (kv.k, kv.v))
        if k.dtype == E4M3:
            k, v = k.to(q.dtype) * K_SCALE, v.to(q.dtype) * V_SCALE
        reference.assert_accurate(out[b : b + 1], reference.attention, q[b : b + 1], k, v, q.size(2) ** -0.5, times=4)


@pytest.mark.parametrize("case", CORNERS, ids=repr)
def test_accuracy(case: Case, device: str, dtype: torch.dtype) -> None:
    q, kv = make(case, device, dtype)
    check(decode(q, kv), q, kv)


@pytest.mark.parametrize("case", CPU_ONLY, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy_of_what_only_the_cpu_takes(case: Case, dtype: torch.dtype) -> None:
    q, kv = make(case, "cpu", dtype)
    check(decode(q, kv), q, kv)


@pytest.mark.parametrize("case", [*CORNERS, CPU_ONLY[1]], ids=repr)
def test_float8_cache(case: Case, device: str, dtype: torch.dtype) -> None:
    if case in CPU_ONLY and device != "cpu":
        pytest.skip("only the CPU takes this head_dim")
    q, kv = make(case, device, dtype)
    kv = replace(kv, k=kv.k.to(E4M3), v=kv.v.to(E4M3))
    check(decode(q, kv), q, kv)


def test_every_float8_code(device: str, dtype: torch.dtype) -> None:
    """A context of one token is its value; 0x7f and 0xff are NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(1, 1, 4, 64).repeat(1, 16, 1, 1)
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
    kv = Paged(torch.zeros_like(codes).view(E4M3), codes.view(E4M3), table, lens)
    q = torch.ones(1, 4, 64, device=device, dtype=dtype)
    args = arguments(q, kv)
    args[8:10] = [None, None]
    ops.paged_attention_decode(*args)
    want = torch.arange(256, dtype=torch.uint8).view(E4M3).float().view(1, 4, 64)
    torch.testing.assert_close(args[0].float().cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_strided_q_and_out(device: str, dtype: torch.dtype) -> None:
    case = Case()
    contiguous, kv = make(case, device, dtype)
    fused = torch.randn(len(case.lens), 20, 64, device=device).to(dtype)
    fused[:, 3:9] = contiguous
    wide = torch.full((len(case.lens), 2, 6, 72), 5.0, device=device, dtype=dtype)
    decode(fused[:, 3:9], kv, wide[:, 1, :, :64])
    reference.assert_same_bits(wide[:, 1, :, :64].contiguous(), decode(contiguous, kv))
    assert (wide[:, 0] == 5).all() and (wide[..., 64:] == 5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    q, kv = make(Case(lens=(700, 1, 0, 2500, 257)), "cpu", dtype)
    out = decode(q, kv)
    for b in range(len(q)):
        alone = slice(b, b + 1)
        reference.assert_same_bits(decode(q[alone], rows(kv, alone)), out[alone], f"row {b}")


@pytest.fixture
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("num_q_heads", [1, 2, 3, 4, 5])
def test_result_does_not_depend_on_the_split(
    num_q_heads: int, head_dim: int, dtype: torch.dtype, keep_threads: None
) -> None:
    case = Case(lens=(600, 1300), num_q_heads=num_q_heads, num_kv_heads=1, head_dim=head_dim)
    q, kv = make(case, "cpu", dtype)
    args = arguments(q, kv)
    outs = []
    for plan in ([0, 1, 2], [0, 3, 4], [0, 1, 7], [0, 3, 9]):
        for threads in (1, 3):
            torch.set_num_threads(threads)
            args[0] = torch.full_like(q, float("nan"))
            args[6] = torch.tensor(plan, dtype=torch.int32)
            ops.paged_attention_decode(*args)
            outs.append(args[0])
    for out in outs[1:]:
        reference.assert_same_bits(out, outs[0])


def test_empty_batch(device: str, dtype: torch.dtype) -> None:
    q, kv = make(Case(), device, dtype)
    assert decode(q[:0], rows(kv, slice(0, 0))).shape == (0, 6, 64)


def test_errors() -> None:
    q, kv = make(Case(lens=(20, 40)), "cpu", torch.float32)
    bad_id, negative = kv.block_tables.clone(), kv.block_tables.clone()
    bad_id[1, 2], negative[0, 1] = ABSURD, -1
    scale, float8 = torch.ones(1), kv.k.to(E4M3)
    lens = kv.context_lens
    # argument index -> value
    cases = [
        (
            {4: bad_id},
            f"block_tables: expected block ids 0 to 7 within the context of 40 tokens, got {ABSURD} at [1, 2]",
        ),
        ({4: negative}, "block_tables: expected block ids 0 to 7 within the context of 20 tokens, got -1 at [0, 1]"),
        (
            {5: torch.tensor([20, 100], dtype=torch.int32)},
            "context_lens: expected 0 to 80 (5 blocks of 16), got 100 at [1]",
        ),
        ({5: lens - 30}, "context_lens: expected 0 to 80 (5 blocks of 16), got -10 at [0]"),
        ({6: torch.zeros(2, dtype=torch.int32)}, "plan: expected at least 3 elements for a batch of 2, got 2"),
        ({6: torch.zeros(3, dtype=torch.int32)}, "plan: expected the plan that decode_plan made of these context_lens"),
        ({8: scale}, "k_scale: expected None for a float32 cache, got a tensor"),
        ({9: scale}, "v_scale: expected None for a float32 cache, got a tensor"),
        ({2: float8}, "v_cache: expected dtype float8_e4m3fn, got float32"),
        ({2: float8, 3: float8, 8: torch.ones(2)}, "k_scale: expected size 1 in dimension 0, got 2"),
        ({2: float8, 3: float8, 9: scale.double()}, "v_scale: expected dtype float32, got float64"),
        ({2: kv.k[:, :, :1]}, "v_cache: expected num_kv_heads = 1 (from k_cache) in dimension 2, got 2"),
        ({2: kv.k.bfloat16()}, "k_cache: expected dtype float32, got bfloat16"),
        ({0: q[:, :5], 1: q[:, :5]}, "q: expected num_q_heads to be a multiple of num_kv_heads = 2, got 5"),
        ({0: q[:1]}, "out: expected batch = 2 (from q) in dimension 0, got 1"),
    ]
    for changes, message in cases:
        args = arguments(q, kv)
        for i, value in changes.items():
            args[i] = value
        with pytest.raises(RuntimeError) as error:
            ops.paged_attention_decode(*args)
        assert str(error.value).startswith("paged_attention_decode: " + message)


def test_head_dim_and_workspace_errors() -> None:
    q, kv = make(Case(head_dim=12), "cpu", torch.float32)
    with pytest.raises(RuntimeError, match="q: expected head_dim to be a multiple of 8 on CPU, got 12"):
        decode(q, kv)
    q, kv = make(Case(lens=(3000,)), "cpu", torch.float32)
    args = arguments(q, kv)
    args[6], args[7] = torch.tensor([0, 12], dtype=torch.int32), args[7][:100]
    with pytest.raises(RuntimeError, match=r"workspace: expected at least 4752 elements, got 100"):
        ops.paged_attention_decode(*args)
