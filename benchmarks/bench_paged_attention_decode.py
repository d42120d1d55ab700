"""paged_attention_decode and decode_plan on CUDA.

    python benchmarks/bench_paged_attention_decode.py [--only goal skew groups float8 plan] [--block-sizes 16 256]
        [--layouts seed head-major] [--no-promise] [--after-store] [--no-baselines] [--json results.json]

A line a case: shape | microseconds | TB/s of keys and values | % of the read bandwidth measured in this run | goal, or
our speed over the baseline's.
A graph of calls over rotated caches, decode_plan made before and timed by itself. The calls promise past_complete, as
the engine's do: tables, keys and values are older than the plan here. With --no-promise they don't. With --after-store,
qk_norm_rope_store of the newest tokens runs before each call, as in a layer, and is timed with it. Layouts, inside one
layer's cache: `seed` [2, num_blocks, block_size, num_kv_heads, head_dim], `head-major` [num_blocks, num_kv_heads, 2,
block_size, head_dim]. Baselines of bf16 caches: torch's FlashAttention-2 on contiguous keys and values, and those of
attention_baselines.py that can be imported, on the first block size and layout.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attention_baselines import Decode, decode_baselines
from timing import machine, num_input_sets, read_bandwidth, time_calls, write_json
from torch import Tensor

from nanovllm import ops

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    name: str
    lens: tuple[int, ...]
    num_q_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    cache_dtype: torch.dtype = torch.bfloat16
    goal: float | None = None  # microseconds

    def kv_bytes(self) -> int:
        """Every key and value of the contexts once."""
        return 2 * sum(self.lens) * self.num_kv_heads * self.head_dim * self.cache_dtype.itemsize


def equal(batch: int, context: int, goal: float | None = None, **shape: object) -> Case:
    heads = f" {shape['num_q_heads']}/8" if "num_q_heads" in shape else ""
    kind = " e4m3" if "cache_dtype" in shape else ""
    return Case(f"{batch} x {context}{heads}{kind}", (context,) * batch, goal=goal, **shape)


GOALS = [(1, 1024, 5), (1, 8192, 11), (1, 32768, 35), (8, 4096, 34), (64, 1024, 64), (256, 1024, 248)]
GOALS += [(256, 4096, 960), (512, 1024, 495)]
GROUPS = {
    "goal": [equal(*row) for row in GOALS],
    "skew": [
        *(equal(batch, 4096) for batch in (16, 17, 24, 32, 34)),
        Case("1 x 131072 + 31 x 4096", (131072, *[4096] * 31)),
        equal(32, 8064),
    ],
    "groups": [equal(b, n, g, num_q_heads=h) for h in (32, 64) for b, n, g in GOALS[4:]],
    "float8": [equal(b, n, cache_dtype=E4M3) for b, n in ((1, 1024), (1, 32768), (256, 1024), (256, 4096))],
}


class Pool:
    """Random keys and values, cut into caches; filled once, as wide as the widest case."""

    def __init__(self) -> None:
        self.data: dict[torch.dtype, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        data = self.data.get(dtype)
        if data is None or data.numel() < numel:
            self.data.pop(dtype, None)
            piece = torch.randn(1 << 26, device="cuda").to(dtype)
            data = torch.empty(-(-numel // len(piece)) * len(piece), dtype=dtype, device="cuda")
            for part in data.view(torch.uint8 if dtype == E4M3 else dtype).split(len(piece)):
                part.copy_(piece.view(part.dtype))
            self.data[dtype] = data
        return self.data[dtype][:numel]

    def cache(self, case: Case, num_blocks: int, block_size: int, layout: str) -> tuple[Tensor, Tensor]:
        heads, dim = case.num_kv_heads, case.head_dim
        data = self.take(2 * num_blocks * block_size * heads * dim, case.cache_dtype)
        if layout == "seed":
            return tuple(data.view(2, num_blocks, block_size, heads, dim))
        k, v = data.view(num_blocks, heads, 2, block_size, dim).unbind(2)
        return k.transpose(1, 2), v.transpose(1, 2)


class Inputs:
    """Of a case: sets of queries, outputs and block tables over one large cache."""

    def __init__(self, case: Case, block_size: int, layout: str, pool: Pool) -> None:
        batch, sets = len(case.lens), num_input_sets(case.kv_bytes())
        used = [-(-n // block_size) for n in case.lens]
        heads = case.num_q_heads + 2 * case.num_kv_heads
        self.case, self.block_size, self.sets = case, block_size, sets
        self.k, self.v = pool.cache(case, sets * sum(used), block_size, layout)
        self.lens = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
        self.qkv = torch.randn(sets, batch, heads, case.head_dim, device="cuda").bfloat16()
        self.q = self.qkv[:, :, : case.num_q_heads]
        self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.tables = torch.full((sets, batch, max(used)), 2**31 - 1, dtype=torch.int32, device="cuda")
        for i, ids in enumerate(torch.randperm(sets * sum(used), device="cuda").int().split(used * sets)):
            self.tables[i // batch, i % batch, : len(ids)] = ids


def time_case(x: Inputs, past_complete: bool, after_store: bool) -> float:
    case, batch = x.case, len(x.case.lens)
    plan = torch.empty(ops.decode_plan_numel(batch, "cuda"), dtype=torch.int32, device="cuda")
    ops.decode_plan(plan, x.lens, case.num_kv_heads, x.block_size)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
    workspace = torch.zeros(ops.decode_workspace_numel(batch, max(case.lens), *heads, "cuda"), device="cuda")
    scale = case.head_dim**-0.5
    last = x.lens.long() - 1
    blocks = x.tables.gather(2, (last // x.block_size).expand(x.sets, batch).unsqueeze(2)).squeeze(2).long()
    slots = blocks * x.block_size + last % x.block_size
    cos_sin = torch.ones(max(case.lens), case.head_dim, device="cuda") * 0.5**0.5  # a turn by 45 degrees

    def call(i: int) -> None:
        if after_store:
            rows = x.qkv[i].flatten(1)
            ops.qk_norm_rope_store(rows, None, None, cos_sin, last, x.k, x.v, slots[i], None, None, *heads[:2], 1e-6)
        args = (x.out[i], x.q[i], x.k, x.v, x.tables[i], x.lens, plan, workspace, None, None, scale)
        ops.paged_attention_decode(*args, past_complete)

    us = time_calls([lambda i=i: call(i) for i in range(x.sets)])
    assert x.out.isfinite().all(), case.name
    return us


def time_baselines(x: Inputs) -> Iterator[tuple[str, float | str]]:
    """Name and microseconds, or why there are none."""
    for name, make in decode_baselines():
        try:
            inputs = [Decode(x.q[i], x.k, x.v, x.tables[i], x.lens) for i in range(x.sets)]
            yield name, time_calls([make(one) for one in inputs])
        except Exception as error:  # whatever a library raises at what it does not do
            yield name, f"{type(error).__name__}: {str(error).splitlines()[:1]}"


def time_fa2(case: Case, pool: Pool) -> float | None:
    """torch's FlashAttention-2, keys and values contiguous; None where it does not apply."""
    if len(set(case.lens)) > 1 or case.cache_dtype == E4M3:
        return None
    batch, length, sets = len(case.lens), case.lens[0], num_input_sets(case.kv_bytes())
    shape = (2, sets, batch, length, case.num_kv_heads, case.head_dim)
    k, v = pool.take(math.prod(shape), case.cache_dtype).view(shape)
    q = torch.randn(sets, batch, 1, case.num_q_heads, case.head_dim, device="cuda").to(k.dtype)

    def call(i: int) -> None:
        torch.ops.aten._flash_attention_forward(q[i], k[i], v[i], None, None, 1, length, 0.0, False, False)

    return time_calls([lambda i=i: call(i) for i in range(sets)])


def time_plans() -> Iterator[tuple[str, float]]:
    for batch in (1, 17, 256, 512, 1024, 4096):
        lens = torch.randint(1, 8192, (batch,), dtype=torch.int32, device="cuda")
        plan = torch.empty(ops.decode_plan_numel(batch, "cuda"), dtype=torch.int32, device="cuda")
        yield f"decode_plan {batch}", time_calls([lambda lens=lens, plan=plan: ops.decode_plan(plan, lens, 8, 16)] * 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, "plan"], default=[*GROUPS, "plan"])
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 256])
    parser.add_argument("--layouts", nargs="+", choices=["seed", "head-major"], default=["seed", "head-major"])
    parser.add_argument("--no-promise", action="store_true")
    parser.add_argument("--after-store", action="store_true")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    peak, pool, rows = read_bandwidth(), Pool(), []
    print(*machine().values(), f"read {peak / 1e12:.2f} TB/s", sep=" | ")
    cases = [case for group in args.only if group != "plan" for case in GROUPS[group]]
    for case in sorted(cases, key=Case.kv_bytes, reverse=True):  # the widest pool first
        first: Inputs | None = None
        for block_size in args.block_sizes:
            for layout in args.layouts:
                x = Inputs(case, block_size, layout, pool)
                first = first or x
                us = time_case(x, not args.no_promise, args.after_store)
                rate = case.kv_bytes() / us / 1e6
                row = {"case": case.name, "block_size": block_size, "layout": layout, "us": us, "tb_s": rate}
                goal = "" if case.goal is None else f" | goal {case.goal:5.0f} {'ok' if us <= case.goal else 'NO'}"
                print(
                    f"{case.name:24} b{block_size:<3} {layout:10} | {us:8.2f} us | {rate:5.2f} TB/s"
                    f" | {rate * 1e14 / peak:5.1f} %{goal}",
                    flush=True,
                )
                rows.append(row)
        if args.no_baselines or case.goal is None:
            continue
        ours = rows[-len(args.block_sizes) * len(args.layouts)]["us"]
        for name, us in [*time_baselines(first), ("torch FA2, contiguous", time_fa2(case, pool))]:
            if us is None:
                continue
            note = us if isinstance(us, str) else f"{us:8.2f} us | ours x {us / ours:.2f}"
            print(f"{case.name:24} {name:24} | {note}", flush=True)
            if not isinstance(us, str):
                rows.append({"case": case.name, "baseline": name, "us": us})
    if "plan" in args.only:
        for name, us in time_plans():
            print(f"{name:40} | {us:8.2f} us")
            rows.append({"case": name, "us": us})
    write_json(args.json, rows, read_tb_s=peak / 1e12)


if __name__ == "__main__":
    main()
