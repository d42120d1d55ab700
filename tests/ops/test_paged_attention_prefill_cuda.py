"""What prefill attention promises on CUDA alone: the pairwise grid, e4m3 caches, graphs, huge caches, limits."""

import random
from dataclasses import astuple, dataclass
from itertools import accumulate

import pytest
import reference
import torch
from paged import Paged, make_shared
from pairwise import pairwise_cases
from torch import Tensor

from nanovllm import ops

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.7, 1.3
MOST_QUERIES = 300  # of a sequence with a long context

CONTEXTS = {
    "0": lambda block: 0,
    "1": lambda block: 1,
    "block-1": lambda block: block - 1,
    "block": lambda block: block,
    "block+1": lambda block: block + 1,
    "prime": lambda block: 1361,
    "131072": lambda block: 131072,
}
QUERIES = {  # of a sequence with n tokens
    "all": lambda n: n,
    "one": lambda n: min(n, 1),
    "127": lambda n: min(n, 127),
    "129": lambda n: min(n, 129),
    "half": lambda n: n // 2,
}


@dataclass(frozen=True)
class Case:
    head_dim: int
    group: int
    num_kv_heads: int
    block_size: int | None  # None: keys and values packed like the queries
    context: str
    queries: str
    batch: int
    dtype: torch.dtype
    float8: bool
    head_major: bool

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + ("-e4m3" if self.float8 else "")
        order = "-head_major" if self.head_major else ""
        pages = "packed" if self.block_size is None else f"block{self.block_size}"
        shape = f"d{self.head_dim}-g{self.group}x{self.num_kv_heads}-{pages}{order}"
        return f"{shape}-{self.context}-{self.queries}-b{self.batch}-{kind}"


FACTORS = (
    (64, 80, 96, 128, 256),
    tuple(range(1, 17)),
    (1, 2, 3),
    (None, 16, 32, 64, 128, 256),
    tuple(CONTEXTS),
    tuple(QUERIES),
    (0, 1, 3, 17, 256, 512),
    (torch.bfloat16, torch.float16),
    (False, True),
    (False, True),
)
CASES = [Case(*values) for values in pairwise_cases(FACTORS, 150)]


@dataclass
class Batch:
    q: Tensor
    q_lens: list[int]
    kv: Paged
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    packed: bool = False

    def arguments(self) -> list:
        """Arguments in order; out full of NaN."""
        cu = torch.tensor([0, *accumulate(self.q_lens)], dtype=torch.int32, device="cuda")
        out = torch.full_like(self.q, float("nan"), memory_format=torch.contiguous_format)
        tables = None if self.packed else self.kv.block_tables
        sizes = (max(self.q_lens, default=0), *self.scales, self.q.size(2) ** -0.5)
        return [out, self.q, self.kv.k, self.kv.v, cu, self.kv.context_lens, tables, *sizes]

    def check(self, out: Tensor, rows: list[int]) -> None:
        """The sequences `rows` of `out` against the reference; of long contexts one KV head only."""
        num_kv_heads = self.kv.k.size(-2)
        group, ends = self.q.size(1) // num_kv_heads, list(accumulate(self.q_lens))
        for b in rows:
            n, span = int(self.kv.context_lens[b]), slice(ends[b] - self.q_lens[b], ends[b])
            for h in range(num_kv_heads) if n < 10000 else [b % num_kv_heads]:
                k, v = (x[..., h : h + 1, :] for x in (self.kv.k, self.kv.v))
                if self.packed:
                    k, v = k[span], v[span]
                else:
                    k, v = (reference.paged_rows(x, self.kv.block_tables[b], n) for x in (k, v))
                if k.dtype == E4M3:
                    k, v = ((x.float() * s).to(self.q.dtype) for x, s in zip((k, v), self.scales))
                heads = slice(h * group, (h + 1) * group)
                args = self.q[span, heads], k, v, self.q.size(2) ** -0.5
                reference.assert_accurate(out[span, heads], reference.attention, *args)


def make(
    context_lens: list[int],
    q_lens: list[int],
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int | None = 16,
    dtype: torch.dtype = torch.bfloat16,
    float8: bool = False,
    head_major: bool = False,
) -> Batch:
    """With a block_size of None, views of a fused projection; e4m3 and head_major do not exist there."""
    torch.manual_seed(0)
    if block_size is None:
        fused = torch.randn(sum(q_lens), num_kv_heads * (group + 2), head_dim, device="cuda").to(dtype)
        q, k, v = fused.split([num_kv_heads * group, num_kv_heads, num_kv_heads], dim=1)
        lens = torch.tensor(q_lens, dtype=torch.int32, device="cuda")
        return Batch(q, q_lens, Paged(k, v, torch.empty(0), lens), packed=True)
    kv = make_shared(context_lens, num_kv_heads, head_dim, block_size, E4M3 if float8 else dtype, head_major)
    q = torch.randn(sum(q_lens), num_kv_heads * group, head_dim, device="cuda").to(dtype)
    scales = tuple(torch.tensor([s], device="cuda") for s in (K_SCALE, V_SCALE)) if float8 else (None, None)
    return Batch(q, q_lens, kv, scales)


def run(batch: Batch) -> Tensor:
    args = batch.arguments()
    ops.paged_attention_prefill(*args)
    return args[0]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_grid(case: Case) -> None:
    """Every third sequence has the case's context, the others one of the short ones."""
    rng = random.Random(str(astuple(case)))
    block = case.block_size or 64
    short = [CONTEXTS[c](block) for c in CONTEXTS if c not in ("prime", "131072")]
    context = CONTEXTS[case.context](block)
    if case.block_size is None:
        context = min(context, 1361)  # all of them are queries
    lens = [context if b % 3 == 0 else rng.choice(short) for b in range(case.batch)]
    q_lens = [min(QUERIES[case.queries](n), n if n < 2000 else MOST_QUERIES) for n in lens]
    sizes = (case.group, case.num_kv_heads, case.head_dim, case.block_size)
    batch = make(lens, q_lens, *sizes, case.dtype, case.float8, case.head_major)
    out = run(batch)
    assert out.isfinite().all()
    batch.check(out, sorted({b for b in (0, 1, 2, case.batch // 2, case.batch - 1) if 0 <= b < case.batch}))


@pytest.mark.parametrize("head_dim", [64, 80, 128], ids=str)
@pytest.mark.parametrize("block_size", [None, 16, 128, 256], ids=str)
def test_every_row_of_a_mixed_batch(block_size: int | None, head_dim: int) -> None:
    lens = [5, 0, 1, 127, 128, 129, 1000, 64, 3000, 255, 17, 400] * 4
    q_lens = [5, 0, 1, 127, 128, 129, 1000, 1, 150, 128, 16, 257] * 4
    batch = make(lens, q_lens, block_size=block_size, head_dim=head_dim)
    batch.check(run(batch), list(range(len(lens))))


@pytest.mark.parametrize("head_dim", [64, 80, 128], ids=str)
@pytest.mark.parametrize("block_size", [16, 256], ids=str)
def test_e4m3_in_a_mixed_batch(block_size: int, head_dim: int) -> None:
    lens = [5, 0, 1, 127, 128, 129, 1000, 64, 3000, 255, 17, 400] * 4
    q_lens = [5, 0, 1, 127, 128, 129, 1000, 1, 150, 128, 16, 257] * 4
    batch = make(lens, q_lens, block_size=block_size, head_dim=head_dim, float8=True)
    batch.check(run(batch), list(range(len(lens))))


@pytest.mark.parametrize("block_size", [None, 16], ids=str)
def test_one_long_prompt(block_size: int | None) -> None:
    batch = make([5003], [5003], num_kv_heads=1, block_size=block_size)
    batch.check(run(batch), [0])


def test_keys_beside_values() -> None:
    batch = make([100, 2000, 7], [100, 300, 7], head_dim=64)
    want = run(batch)
    pool = torch.stack((batch.kv.k, batch.kv.v), dim=3).transpose(1, 2).contiguous()  # [block, head, slot, k or v, D]
    batch.kv.k, batch.kv.v = pool.permute(3, 0, 2, 1, 4)
    reference.assert_same_bits(run(batch), want)


def test_same_bits_in_every_run() -> None:
    batch = make([3000, 70, 1, 1025], [3000, 70, 1, 500])
    args = batch.arguments()
    ops.paged_attention_prefill(*args)
    want = args[0].clone()
    for _ in range(30):
        args[0].fill_(float("nan"))
        ops.paged_attention_prefill(*args)
        reference.assert_same_bits(args[0], want)
    batch.check(want, list(range(4)))


@pytest.mark.parametrize("head_dim", [96, 128], ids=str)
def test_graph_replay_after_changed_lengths(head_dim: int) -> None:
    batch = make([2000] * 4, [500] * 4, head_dim=head_dim)
    args = batch.arguments()
    ops.paged_attention_prefill(*args)  # the first launch loads the kernel, which a capture need not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.paged_attention_prefill(*args)
    changes = [([2000, 1999, 130, 600], [1, 1400, 130, 300]), ([1, 0, 64, 2000], [1, 0, 63, 1900]), ([0] * 4, [0] * 4)]
    for lens, batch.q_lens in changes:
        args[4].copy_(torch.tensor([0, *accumulate(batch.q_lens)]))
        args[5].copy_(torch.tensor(lens))
        args[0].fill_(float("nan"))
        graph.replay()
        batch.check(args[0], list(range(4)))
        assert args[0][sum(batch.q_lens) :].isnan().all()


@pytest.mark.parametrize("head_dim", [128, 256], ids=str)
def test_layer_cache_of_more_than_two_to_the_31_elements(head_dim: int) -> None:
    block_size, heads = 256, 8
    num_blocks = 2**31 // (block_size * heads * head_dim) + 3
    if torch.cuda.mem_get_info()[0] < 5 << 30:
        pytest.skip("needs 5 GiB of free GPU memory")
    cache = torch.empty(num_blocks, block_size, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([[num_blocks - 1, 0, num_blocks - 2]], dtype=torch.int32, device="cuda")
    cache[ids[0].long()] = torch.randn(3, block_size, heads, head_dim, device="cuda").bfloat16()
    q = torch.randn(200, 16, head_dim, device="cuda").bfloat16()
    lens = torch.tensor([3 * block_size - 5], dtype=torch.int32, device="cuda")
    batch = Batch(q, [200], Paged(cache, cache, ids, lens))
    batch.check(run(batch), [0])


def test_errors() -> None:
    batch = make([40], [20])
    narrow = make([40], [20], float8=True)
    good = batch.arguments()
    odd = torch.zeros(21, 4, 128, device="cuda", dtype=torch.bfloat16)
    cases = [
        (make([40], [20], head_dim=72).arguments(), "q: expected head_dim 64, 80, 96, 128 or 256 on CUDA, got 72"),
        (
            make([40], [20], block_size=8).arguments(),
            "k: expected block_size to be a power of two from 16 on CUDA, got 8",
        ),
        ([*good[:10], -1.0], "scale: expected more than 0 on CUDA, got -1"),
        ([*good[:8], torch.ones(1, device="cuda"), *good[9:]], "k_scale: expected None for a bfloat16 cache"),
        ([good[0], odd.flatten()[1 : 1 + 20 * 512].view(20, 4, 128), *good[2:]], "q: expected a pointer aligned to 16"),
        ([*good[:3], narrow.kv.v, *good[4:]], "v: expected dtype bfloat16, got float8_e4m3fn"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.paged_attention_prefill(*args)
        assert str(error.value).startswith("paged_attention_prefill: " + message)
