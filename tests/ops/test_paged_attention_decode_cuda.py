"""What decode attention promises on CUDA alone: the pairwise grid, e4m3 caches, graphs, huge caches, limits."""

import random
from dataclasses import astuple, dataclass
from itertools import pairwise as neighbours

import pytest
import reference
import torch
from paged import make_shared
from pairwise import pairwise_cases
from torch import Tensor

from nanovllm import ops

pytestmark = pytest.mark.gpu

NAN = float("nan")
E4M3 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.7, 1.3


@dataclass(frozen=True)
class Case:
    head_dim: int
    group: int
    block_size: int
    context: str
    batch: int
    dtype: torch.dtype
    float8: bool
    head_major: bool
    num_kv_heads: int

    def __repr__(self) -> str:
        cache = "e4m3" if self.float8 else str(self.dtype).removeprefix("torch.")
        order = "-head_major" if self.head_major else ""
        return (
            f"d{self.head_dim}-g{self.group}x{self.num_kv_heads}-block{self.block_size}-{self.context}-b{self.batch}"
            f"-{str(self.dtype).removeprefix('torch.')}-{cache}{order}"
        )


CONTEXTS = {
    "0": lambda block: 0,
    "1": lambda block: 1,
    "block-1": lambda block: block - 1,
    "block": lambda block: block,
    "block+1": lambda block: block + 1,
    "prime": lambda block: 2749,
    "131072": lambda block: 131072,
}
FACTORS = (
    (64, 80, 96, 128, 256),
    tuple(range(1, 17)),
    (16, 32, 64, 128, 256),
    tuple(CONTEXTS),
    (0, 1, 3, 17, 256, 512),
    (torch.bfloat16, torch.float16),
    (False, True),
    (False, True),
    (1, 2, 8),
)
CASES = [Case(*values) for values in pairwise_cases(FACTORS, 400)]


@dataclass
class Batch:
    q: Tensor
    k: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], NaN where nothing is stored
    v: Tensor
    block_tables: Tensor  # absurd ids past a context
    lens: list[int]
    scales: tuple[Tensor | None, Tensor | None] = (None, None)

    def arguments(self) -> list:
        """Arguments in order; out full of NaN."""
        (batch, num_q_heads, head_dim), (block_size, num_kv_heads) = self.q.shape, self.k.shape[1:3]
        lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        plan = torch.full((ops.decode_plan_numel(batch, "cuda"),), -7, dtype=torch.int32, device="cuda")
        ops.decode_plan(plan, lens, num_kv_heads, block_size)
        numel = ops.decode_workspace_numel(
            batch, max(self.lens, default=0), num_q_heads, num_kv_heads, head_dim, "cuda"
        )
        workspace, out = torch.zeros(numel, device="cuda"), torch.full_like(self.q, NAN)
        scale = head_dim**-0.5
        return [out, self.q, self.k, self.v, self.block_tables, lens, plan, workspace, *self.scales, scale]

    def check(self, out: Tensor, rows: list[int]) -> None:
        """Rows of `out` against the reference; of long contexts the first and the last KV head only."""
        num_kv_heads = self.k.size(2)
        group, scale = self.q.size(1) // num_kv_heads, self.q.size(2) ** -0.5
        for b in rows:
            if self.lens[b] == 0:
                assert (out[b] == 0).all(), f"row {b}: expected zeros for a context of 0"
                continue
            for h in range(num_kv_heads) if self.lens[b] < 10000 else {0, num_kv_heads - 1}:
                caches = (self.k[:, :, h : h + 1], self.v[:, :, h : h + 1])
                k, v = (reference.paged_rows(c, self.block_tables[b], self.lens[b]) for c in caches)
                if self.k.dtype == E4M3:
                    k, v = ((x.float() * s).to(self.q.dtype) for x, s in zip((k, v), self.scales))
                of_head = slice(h * group, (h + 1) * group)
                reference.assert_accurate(
                    out[b : b + 1, of_head], reference.attention, self.q[b : b + 1, of_head], k, v, scale
                )


def make(
    lens: list[int],
    group: int = 2,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    float8: bool = False,
    head_major: bool = False,
) -> Batch:
    torch.manual_seed(0)
    kv = make_shared(lens, num_kv_heads, head_dim, block_size, E4M3 if float8 else dtype, head_major)
    scales = tuple(torch.tensor([s], device="cuda") for s in (K_SCALE, V_SCALE)) if float8 else (None, None)
    q = torch.randn(len(lens), num_kv_heads * group, head_dim, device="cuda").to(dtype)
    return Batch(q, kv.k, kv.v, kv.block_tables, lens, scales)


def run(batch: Batch) -> Tensor:
    args = batch.arguments()
    ops.paged_attention_decode(*args)
    return args[0]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_grid(case: Case) -> None:
    """Every third sequence has the case's context, the others one of the short ones."""
    rng = random.Random(str(astuple(case)))
    short = [CONTEXTS[c](case.block_size) for c in CONTEXTS if c != "131072"]
    context = CONTEXTS[case.context](case.block_size)
    lens = [context if b % 3 == 0 else rng.choice(short) for b in range(case.batch)]
    batch = make(
        lens,
        case.group,
        case.num_kv_heads,
        case.head_dim,
        case.block_size,
        case.dtype,
        case.float8,
        case.head_major,
    )
    out = run(batch)
    assert out.isfinite().all()
    batch.check(out, sorted({b for b in (0, 1, 2, case.batch // 2, case.batch - 1) if 0 <= b < case.batch}))


def test_every_row_of_a_mixed_batch() -> None:
    lens = [0, 1, 63, 64, 65, 0, 0, 9001, 128, 16, 17, 333, 0, 2049] * 5
    batch = make(lens)
    batch.check(run(batch), list(range(len(lens))))


def test_more_sequences_than_the_plan_scans_at_once() -> None:
    lens = [b % 37 for b in range(2500)]
    batch = make(lens, num_kv_heads=2)
    batch.check(run(batch), [0, 1, 36, 37, 1023, 1024, 1025, 2047, 2048, 2499])


def test_keys_beside_values() -> None:
    batch = make([100, 4000, 7], float8=True)
    want = run(batch)
    pool = torch.stack((batch.k, batch.v), dim=3).transpose(1, 2).contiguous()  # [block, head, slot, k or v, D]
    batch.k, batch.v = pool.permute(3, 0, 2, 1, 4)
    reference.assert_same_bits(run(batch), want)


def test_same_bits_in_every_run() -> None:
    batch = make([1, 70000, 300, 5000, 0, 64])
    args = batch.arguments()
    ops.paged_attention_decode(*args)
    want = args[0].clone()
    for _ in range(50):
        ops.paged_attention_decode(*args)
    reference.assert_same_bits(args[0], want)
    batch.check(want, list(range(6)))


def test_graph_replay_after_changed_lengths() -> None:
    batch = make([2000] * 9)
    args = batch.arguments()
    context_lens, plan = args[5], args[6]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.decode_plan(plan, context_lens, 8, 16)
        ops.paged_attention_decode(*args)
    for lens in ([2000] * 9, [0, 1, 1999, 64, 65, 0, 700, 16, 2000], [0] * 9, [0, 0, 0, 0, 0, 0, 0, 0, 1]):
        batch.lens = lens
        context_lens.copy_(torch.tensor(lens))
        args[0].fill_(NAN)
        graph.replay()
        batch.check(args[0], list(range(9)))


@pytest.mark.parametrize("lens", [[1024], [4096] * 8, [0, 1, 1999, 64, 65, 0, 700, 16, 17] * 30], ids=len)
def test_past_complete(lens: list[int]) -> None:
    """In one graph: the plan, the store of the newest tokens, attention that starts while they run."""
    batch = make(lens)
    args = batch.arguments()
    out, context_lens, plan = args[0], args[5], args[6]
    rows = context_lens.nonzero().squeeze(1)
    last = context_lens[rows].long() - 1
    blocks = batch.block_tables[rows, last // 16].long()
    slots = blocks * 16 + last % 16
    newest = [c[blocks, last % 16] for c in (batch.k, batch.v)]
    want = run(batch)
    batch.check(want, list(range(min(9, len(lens)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.decode_plan(plan, context_lens, 8, 16)
        ops.store_kv_cache(*newest, batch.k, batch.v, slots, None, None)
        ops.paged_attention_decode(*args, past_complete=True)
    for _ in range(20):
        for cache in (batch.k, batch.v):
            cache[blocks, last % 16] = NAN
        plan.zero_()  # of an empty batch
        out.fill_(NAN)
        graph.replay()
        reference.assert_same_bits(out, want)


def test_layer_cache_of_more_than_two_to_the_31_elements() -> None:
    block_size, heads, dim = 256, 8, 128
    num_blocks = 2**31 // (block_size * heads * dim) + 3
    cache = torch.empty(num_blocks, block_size, heads, dim, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([[num_blocks - 1, 0, num_blocks - 2]], dtype=torch.int32, device="cuda")
    cache[ids[0].long()] = torch.randn(3, block_size, heads, dim, device="cuda").bfloat16()
    q = torch.randn(1, 16, dim, device="cuda").bfloat16()
    batch = Batch(q, cache, cache, ids, [3 * block_size - 5])
    batch.check(run(batch), [0])


def brute_force_plan(lens: list[int], num_kv_heads: int, num_blocks: int) -> list[list[int]]:
    tiles = [
        [b, head, tile, n] for b, n in enumerate(lens) for head in range(num_kv_heads) for tile in range(-(-n // 64))
    ]
    quota, extra = divmod(len(tiles), num_blocks)
    begins = [c * quota + min(c, extra) for c in range(num_blocks + 1)]
    return [[len(tiles), quota, extra, 0]] + [tiles[b] if b < e else [-7] * 4 for b, e in neighbours(begins)]


@pytest.mark.parametrize(
    "lens",
    [[], [0], [1], [64], [65], [131072], [0, 5, 0, 0, 700, 0], [300] * 17, [b % 200 for b in range(2100)]],
    ids=len,
)
def test_plan(lens: list[int]) -> None:
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    plan = torch.full((ops.decode_plan_numel(len(lens), "cuda"),), -7, dtype=torch.int32, device="cuda")
    ops.decode_plan(plan, context_lens, 3, 16)
    assert plan.view(-1, 4).tolist() == brute_force_plan(lens, 3, plan.numel() // 4 - 1)


def test_errors() -> None:
    cases = [
        (make([20], group=17, num_kv_heads=1), {}, "q: expected at most 16 query heads for a KV head on CUDA, got 17"),
        (
            make([20], block_size=8),
            {},
            "k_cache: expected block_size to be a power of two from 16 on CUDA, got 8",
        ),
        (
            make([20], head_dim=72),
            {},
            "q: expected head_dim 64, 80, 96, 128 or 256 on CUDA, got 72",
        ),
        (make([20]), {6: slice(0, 8)}, "plan: expected at least"),
        (make([20]), {7: slice(0, 8)}, "workspace: expected at least"),
        (make([20]), {7: slice(1, None)}, "workspace: expected a pointer aligned to 16 bytes"),
    ]
    for batch, parts, message in cases:
        args = batch.arguments()
        for i, part in parts.items():
            args[i] = args[i][part]
        with pytest.raises(RuntimeError) as error:
            ops.paged_attention_decode(*args)
        assert str(error.value).startswith("paged_attention_decode: " + message)
