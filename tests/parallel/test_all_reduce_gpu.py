"""The all-reduce over peer memory on several GPUs: right sums, the same bits everywhere, under skew, ended at will."""

import random
import threading
import time

import pytest
import torch

from nanovllm import ops
from nanovllm.parallel.nccl import NcclGroup
from tests.parallel.gpu_ranks import run_gpu_ranks

SIZES = [n for n in (2, 3, 4, 8) if n <= torch.cuda.device_count()]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(SIZES) == 0, reason="needs two GPUs")]
ROWS, HIDDEN = (1, 3, 8, 32, 133, 400), (64, 576, 2560, 5120, 8192)
EPS = 1e-6


def inputs(rank: int, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * rank + rows)
    x = torch.randn(rows, hidden, device="cuda", generator=generator)
    x[:, ::7] = -0.0  # the sentinel, on all ranks
    x[0, rank % hidden] = -0.0
    return x.to(dtype)


def check_sums(group: NcclGroup) -> list[int]:
    assert group.peers is not None, "no peer access"
    hashes = []
    for dtype in (torch.bfloat16, torch.float16):
        for hidden in HIDDEN:
            for rows in ROWS:
                parts = [inputs(r, rows, hidden, dtype) for r in range(group.size)]
                expected = torch.stack([p.float() for p in parts]).sum(0)
                x = parts[group.rank].clone()
                assert group.peers.fits(x)
                out = group.all_reduce(x)
                torch.testing.assert_close(
                    out.float(), expected, rtol=1e-2, atol=2e-2, msg=f"{rows} x {hidden} {dtype}"
                )
                of_nccl = parts[group.rank].clone()
                group.nccl_all_reduce(of_nccl)
                torch.testing.assert_close(out, of_nccl, rtol=1e-2, atol=2e-2)
                residual = inputs(99, rows, hidden, dtype)
                weight = inputs(98, 1, hidden, dtype)[0]
                normed, sums, want = torch.full_like(x, torch.nan), residual.clone(), torch.empty_like(x)
                group.add_rms_norm(normed, sums, parts[group.rank], weight, EPS)
                torch.testing.assert_close(sums.float(), residual.float() + expected, rtol=1e-2, atol=2e-2)
                ops.rms_norm(want, sums, weight, EPS)
                torch.testing.assert_close(normed.float(), want.float(), rtol=1e-2, atol=1e-2)
                hashes += [int(t.view(torch.int16).long().sum()) for t in (out, sums, normed)]
    big = torch.full((2000, 8192), 1.0 + group.rank, device="cuda", dtype=torch.bfloat16)  # NCCL's
    assert not group.peers.fits(big)
    assert (group.all_reduce(big) == group.size * (group.size + 1) / 2).all()
    return hashes


def skewed(group: NcclGroup, iterations: int) -> int:
    """Graphs of calls of many sizes with exact sums, one rank or another late; the number of wrong elements."""
    rng = random.Random(5)  # the same on all ranks
    cases = [(rng.choice((1, 2, 5, 32, 120)), rng.choice((64, 1024, 5120, 8192))) for _ in range(50)]
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    columns = torch.arange(8192, device="cuda")

    def calls() -> None:
        for rows, hidden in cases:
            values = (columns[:hidden] + step) % 13
            x = (values * (group.rank + 1)).to(torch.bfloat16).expand(rows, hidden).contiguous()
            total = values * (group.size * (group.size + 1) // 2)
            group.all_reduce(x)
            wrong.add_((x != total.to(torch.bfloat16)).sum())
            step.add_(1)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    mine = random.Random(group.rank)  # who is late differs
    for _ in range(iterations // len(cases)):
        if mine.random() < 0.3:
            torch.cuda._sleep(mine.randrange(200_000))  # cycles: up to 0.1 ms
        if mine.random() < 0.05:
            time.sleep(mine.random() * 0.003)
        if rng.random() < 0.05:
            calls()  # eager calls between graphs
        else:
            graph.replay()
    return int(wrong)


def wait_for_nobody(group: NcclGroup) -> tuple[float, int | None]:
    """Rank 0 alone calls, as often as in a step of many layers; the seconds until all were ended, and for whom they
    waited."""
    x = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
    group.all_reduce(x)
    torch.cuda.synchronize()
    if group.rank != 0:
        time.sleep(3)
        return 0.0, 0
    for _ in range(300):
        group.all_reduce(x)
    threading.Timer(1.0, group.peers.abort).start()
    start = time.monotonic()
    torch.cuda.synchronize()
    return time.monotonic() - start, group.missing_rank()


def check_all(group: NcclGroup, iterations: int) -> tuple[list[int], int, tuple[float, int | None]]:
    return check_sums(group), skewed(group, iterations), wait_for_nobody(group)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(size, tmp_path):
    """One test, because processes with a GPU are slow to start; the last part leaves the group unusable."""
    results = run_gpu_ranks(str(tmp_path / "store"), size, check_all, 100_000)
    sums, wrong, waits = zip(*results)
    assert all(s == sums[0] for s in sums), "ranks have other bits"
    assert set(wrong) == {0}, "wrong elements under skew"
    seconds, missing = waits[0]
    assert 0.5 < seconds < 2.5 and missing in range(1, size)
