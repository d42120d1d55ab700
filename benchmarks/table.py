"""The table that a benchmark of one operator prints: a line a case, shape | us | GB/s | % of peak | x baseline.

Peak is the read bandwidth measured in the same run; a baseline's column is its time over ours. A call takes the index
of its input set: inputs are rotated, so that they are out of the L2 cache where they are large enough to be.
"""

import argparse
import functools
import math
from collections.abc import Callable

import timing
import torch
import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[int], object]
MAX_SETS = 256  # calls in a graph: what small cases rotate over stays in L2, as in a model's step


@functools.cache
def peak() -> float:
    return timing.read_bandwidth()


def num_sets(num_bytes: int) -> int:
    return min(MAX_SETS, timing.num_input_sets(num_bytes))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)


@triton.jit
def _copy(x, y, n, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def copy(num_bytes: int) -> Call:
    """A kernel that reads half of num_bytes and writes as many."""
    x, y = torch.zeros(2, num_sets(num_bytes), max(1, num_bytes // 8), dtype=torch.int32, device="cuda")
    x.random_()
    return lambda i: _copy[(triton.cdiv(x.size(1), 1024),)](x[i], y[i], x.size(1), 1024, num_warps=4)


class Table:
    def __init__(self, doc: str) -> None:
        parser = argparse.ArgumentParser(description=doc)
        parser.add_argument("--json", help="also write the rows there")
        self.path = parser.parse_args().json
        self.rows: list[dict[str, object]] = []
        self.ratios: dict[str, list[float]] = {}
        print(doc.splitlines()[0], *timing.machine().values(), f"peak {peak() / 1e9:.0f} GB/s", sep=" | ")

    def row(
        self, shape: str, num_bytes: int, ours: Callable[[int], object], **baselines: Callable[[int], object]
    ) -> None:
        sets = num_sets(num_bytes)

        def time(call: Call) -> float:
            return timing.time_calls([functools.partial(call, i) for i in range(sets)])

        us = time(ours)
        times = {name: time(call) for name, call in baselines.items()}
        rate = num_bytes / us * 1e6
        ratios = "".join(f" | x{t / us:5.2f} {name} {t:.2f}" for name, t in times.items())
        print(f"{shape:28} | {us:8.2f} us | {rate / 1e9:6.0f} GB/s | {100 * rate / peak():5.1f} %{ratios}", flush=True)
        self.rows.append({"shape": shape, "us": us, "gb_s": rate / 1e9, "baselines_us": times})
        for name, t in times.items():
            self.ratios.setdefault(name, []).append(t / us)

    def end(self) -> None:
        for name, ratios in self.ratios.items():
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"geometric mean of {len(ratios)}: x{mean:.2f} {name}")
        timing.write_json(self.path, self.rows, peak_gb_s=peak() / 1e9)
