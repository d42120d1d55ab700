"""all_reduce over peer memory against NCCL, bf16, in CUDA graphs, one process a GPU.

    python benchmarks/bench_all_reduce.py [--ranks 2] [--json results.json]

A line a size: microseconds of our sum, of NCCL's sum, and of the sum fused with residual and norm against NCCL's sum
followed by add_rms_norm. A graph has 40 calls, so that launches cost what they do in a model's step. The slowest rank
counts.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from timing import write_json

from nanovllm import ops
from nanovllm.parallel.nccl import NcclGroup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.parallel.gpu_ranks import run_gpu_ranks

EPS = 1e-6
HIDDEN, CALLS, REPLAYS = 4096, 40, 15
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024)  # of 8 KB


def graph_us(call) -> float:
    """Microseconds of a call in a graph of CALLS; every rank captures and replays the same number."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def measure(group: NcclGroup) -> list[dict[str, float]]:
    return [measure_size(group, rows) for rows in ROWS]


def measure_size(group: NcclGroup, num_rows: int) -> dict[str, float]:
    peers = group.peers
    assert peers is not None, "no peer access"
    x = torch.zeros(num_rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out, residual, weight = torch.empty_like(x), torch.zeros_like(x), torch.ones_like(x[0])
    us: dict[str, float] = {"bytes": x.numel() * 2}
    for name, shots in (("one shot", False), ("two shots", True)):
        if us["bytes"] <= (peers.shared_bytes if shots else peers.slot_bytes):
            us[name] = graph_us(lambda shots=shots: peers.all_reduce(x, None, x, None, 0.0, shots))
            us[f"{name}, fused"] = graph_us(lambda shots=shots: peers.all_reduce(out, residual, x, weight, EPS, shots))
    us["nccl"] = graph_us(lambda: group.nccl_all_reduce(x))

    def unfused() -> None:
        group.nccl_all_reduce(x)
        ops.add_rms_norm(out, residual, x, weight, EPS)

    us["nccl and norm"] = graph_us(unfused)
    if group.rank == 0:
        print("  ".join(f"{k} {v:9,.1f}" if k != "bytes" else f"{v:10,}" for k, v in us.items()), flush=True)
    return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.ranks < 2:
        print(f"bench_all_reduce: needs two GPUs, has {torch.cuda.device_count()}")
        return
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_gpu_ranks(os.path.join(folder, "store"), args.ranks, measure)
    slowest = [{k: max(r[i][k] for r in by_rank) for k in row} for i, row in enumerate(by_rank[0])]
    write_json(args.json, slowest, ranks=args.ranks)


if __name__ == "__main__":
    main()
