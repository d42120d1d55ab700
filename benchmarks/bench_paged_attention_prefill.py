"""paged_attention_prefill on CUDA, causal, against what is importable.

    python benchmarks/bench_paged_attention_prefill.py [--only goal shapes chunks] [--no-baselines] [--json out.json]

A line a case: shape | how keys are stored | microseconds | TFLOP/s | % of a cuBLAS product in this run | goal, or our
speed over the baseline's. Operations: 4 * head_dim * num_q_heads for each (query, key) pair that is not masked.
Packed keys and values are views of one projection with q; paged ones lie in shuffled blocks.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from attention_baselines import Prefill, prefill_baselines
from timing import Call, machine, num_input_sets, time_calls, write_json
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanovllm import ops

PACKED = "packed"


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...]
    q_lens: tuple[int, ...]  # the last ones of each context
    num_q_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    name: str = ""
    storage: tuple[str, ...] = (PACKED, "block 16", "block 256")
    goal: float | None = None  # TFLOP/s

    def flops(self) -> int:
        pairs = sum(q * (n - q) + q * (q + 1) // 2 for n, q in zip(self.lens, self.q_lens))
        return 4 * self.head_dim * self.num_q_heads * pairs

    def num_bytes(self) -> int:
        rows = 2 * sum(self.q_lens) * self.num_q_heads + 2 * sum(self.lens) * self.num_kv_heads
        return 2 * rows * self.head_dim

    def is_dense(self) -> bool:
        return self.lens == self.q_lens and len(set(self.lens)) == 1


def prompts(batch: int, length: int, goal: float | None = None, q: int = 16, kv: int = 8, dim: int = 128) -> Case:
    name = f"{batch} x {length}" + ("" if (q, kv, dim) == (16, 8, 128) else f" {q}/{kv} d{dim}")
    return Case((length,) * batch, (length,) * batch, q, kv, dim, name, goal=goal)


PAGED = ("block 16", "block 256", "e4m3 16")
GROUPS = {
    "goal": [prompts(1, 8192, 620), prompts(1, 32768, 640), prompts(16, 1024, 400)],
    "shapes": [
        prompts(4, 4096),
        prompts(64, 256),
        prompts(1, 8192, q=32),
        prompts(1, 8192, q=64),
        *(prompts(1, 8192, dim=d) for d in (64, 80, 96, 256)),
        Case(tuple(range(64, 2112, 64)), tuple(range(64, 2112, 64)), name="32 x 64..2048"),
    ],
    "chunks": [
        Case((8192,) * 2, (512,) * 2, name="2 x last 512 of 8192", storage=PAGED),
        Case((8192,) * 2 + (100,) * 14, (512,) * 2 + (100,) * 14, name="2 x 512 of 8192 + 14 x 100", storage=PAGED),
        Case((32768,), (2048,), name="1 x last 2048 of 32768", storage=PAGED),
        Case((4096,) * 64, (16,) * 64, name="64 x last 16 of 4096", storage=PAGED),
    ],
}


@dataclass
class Inputs:
    q: Tensor  # [num_tokens, num_q_heads, head_dim]
    k: Tensor
    v: Tensor
    cu: Tensor
    lens: Tensor
    tables: Tensor | None

    @staticmethod
    def make(case: Case, storage: str) -> "Inputs":
        heads, kv_heads, dim = case.num_q_heads, case.num_kv_heads, case.head_dim
        cu = torch.tensor((0, *case.q_lens), device="cuda").cumsum(0).int()
        lens = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
        fused = torch.randn(sum(case.q_lens), heads + 2 * kv_heads, dim, device="cuda").to(torch.bfloat16)
        q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
        if storage == PACKED:
            return Inputs(q, k, v, cu, lens, None)
        block = int(storage.split()[-1])
        used = [-(-n // block) for n in case.lens]
        cache = torch.randn(2, sum(used), block, kv_heads, dim, device="cuda").to(torch.bfloat16)
        if storage.startswith("e4m3"):
            cache = cache.to(torch.float8_e4m3fn)
        tables = torch.full((len(used), max(used)), -1, dtype=torch.int32, device="cuda")
        for row, ids in zip(tables, torch.randperm(sum(used), device="cuda").int().split(used)):
            row[: len(ids)] = ids
        return Inputs(q, cache[0], cache[1], cu, lens, tables)


def ours(case: Case, x: Inputs) -> Call:
    out, most, scale = torch.empty_like(x.q).contiguous(), max(case.q_lens), case.head_dim**-0.5

    def call() -> None:
        ops.paged_attention_prefill(out, x.q, x.k, x.v, x.cu, x.lens, x.tables, most, None, None, scale)

    return call


def cudnn(case: Case, x: Inputs) -> Call:
    """Batched: for equal lengths only."""
    q, k, v = (t.unflatten(0, (len(case.lens), -1)).transpose(1, 2) for t in (x.q, x.k, x.v))

    def call() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def baselines(case: Case) -> Iterator[tuple[str, Callable[[Case, Inputs], Call]]]:
    """Those of packed prompts that can be had here."""
    if PACKED not in case.storage:
        return
    for name, make in prefill_baselines():
        yield name, lambda case, x, make=make: make(Prefill(x.q, x.k, x.v, x.cu, max(case.q_lens)))
    if case.is_dense():
        yield "torch cuDNN", cudnn


def time_case(case: Case, storage: str, make: Callable[[Case, Inputs], Call]) -> float:
    inputs = [Inputs.make(case, storage) for _ in range(min(8, num_input_sets(case.num_bytes())))]
    return time_calls([make(case, x) for x in inputs])


def matmul_tflops() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / time_calls([lambda: a @ b], min_us=20000) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    peak, rows, ratios = matmul_tflops(), [], {}
    print(*machine().values(), f"cuBLAS {peak:.0f} TFLOP/s", sep=" | ")

    def report(case: Case, storage: str, us: float, note: str) -> float:
        rate = case.flops() / us / 1e6
        numbers = f"{us:9.1f} us | {rate:5.0f} TFLOP/s | {rate * 100 / peak:3.0f} %"
        print(f"{case.name:27} {storage:11} | {numbers}{note}", flush=True)
        rows.append({"case": case.name, "storage": storage, "us": us, "tflop_s": rate})
        return rate

    for case in (case for group in args.only for case in GROUPS[group]):
        rates = {}
        for storage in case.storage:
            us = time_case(case, storage, ours)
            met = case.goal is None or case.flops() / us / 1e6 >= case.goal * (1 if storage == PACKED else 0.95)
            goal = "" if case.goal is None else f" | goal {case.goal:.0f} {'ok' if met else 'NO'}"
            rates[storage] = report(case, storage, us, goal)
        for name, make in () if args.no_baselines else baselines(case):
            try:
                us = time_case(case, PACKED, make)
            except Exception as error:  # whatever a library raises at what it does not do
                print(f"{case.name:27} {name:11} | {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
            ratio = rates[PACKED] * us * 1e6 / case.flops()
            ratios.setdefault(name, []).append(ratio)
            report(case, name, us, f" | ours x {ratio:.2f}")
    for name, values in ratios.items():
        print(f"geometric mean over {name}: {math.prod(values) ** (1 / len(values)):.2f}")
    write_json(args.json, rows, cublas_tflop_s=peak)


if __name__ == "__main__":
    main()
