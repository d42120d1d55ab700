"""sample, logits ~ N(0, 3) over 151,936 tokens: python benchmarks/bench_sample.py [--json results.json]

The baselines: argmax, and softmax with nano-vLLM's exponential race, which has no filters.
"""

from functools import partial

import torch
from table import Call, Table, num_sets, random
from torch import Tensor

from nanovllm import ops

VOCAB = 151936
KINDS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, -1, 1.0, 0.0),
    "temperature": (1.0, -1, 1.0, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, -1, 0.9, 0.0),
    "top-k 50 top-p 0.9": (1.0, 50, 0.9, 0.0),
    "min-p 0.05": (1.0, -1, 1.0, 0.05),
    "top-k 10000": (1.0, 10000, 1.0, 0.0),
}
DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32)


def sample(ids: Tensor, logits: Tensor, params: list[Tensor], seeds: Tensor, i: int) -> None:
    ops.sample(ids, logits[i], *params, seeds, seeds)


def bench(table: Table, rows: int, dtype: torch.dtype) -> None:
    moved = rows * VOCAB * dtype.itemsize
    logits = 3 * random(num_sets(moved), rows, VOCAB, dtype=dtype)
    noise = torch.empty(rows, VOCAB, device="cuda").exponential_()
    ids, seeds = torch.zeros(2, rows, dtype=torch.int64, device="cuda")
    baselines: dict[str, dict[str, Call]] = {
        "greedy": {"argmax": lambda i: logits[i].argmax(-1)},
        "temperature": {"eager": lambda i: (logits[i].float().softmax(-1) / noise).argmax(-1)},
    }
    seeds += torch.arange(rows, device="cuda")
    for name, values in KINDS.items():
        params = [torch.full((rows,), v, dtype=t, device="cuda") for v, t in zip(values, DTYPES)]
        call = partial(sample, ids, logits, params, seeds)
        table.row(f"{rows} {str(dtype)[6:]} {name}", moved, call, **baselines.get(name, {}))


def main() -> None:
    table = Table(__doc__)
    for case in [(256, torch.float32), (256, torch.bfloat16), *((rows, torch.float32) for rows in (32, 8, 1))]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
