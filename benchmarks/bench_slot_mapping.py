"""slot_mapping, blocks of 16: python benchmarks/bench_slot_mapping.py [--json results.json]"""

import torch
from table import Table, num_sets

from nanovllm import ops


def bench(table: Table, num_seqs: int, length: int) -> None:
    tokens, i32 = num_seqs * length, {"dtype": torch.int32, "device": "cuda"}
    moved = tokens * (16 + 4)
    positions, slots = torch.empty(2, num_sets(moved), tokens, dtype=torch.int64, device="cuda")
    tables = torch.randint(1 << 20, (num_seqs, 256), **i32)
    cu_seqlens_q = torch.arange(num_seqs + 1, **i32) * length
    start_pos = torch.zeros(num_seqs, **i32)

    def eager(i: int) -> None:
        token = torch.arange(tokens, device="cuda")
        seq = torch.bucketize(token, cu_seqlens_q[1:], right=True)
        positions[i] = token - cu_seqlens_q[seq] + start_pos[seq]
        slots[i] = tables[seq, positions[i] // 16] * 16 + positions[i] % 16

    table.row(
        f"{num_seqs} x {length}",
        moved,
        lambda i: ops.slot_mapping(positions[i], slots[i], tables, cu_seqlens_q, start_pos, 16),
        eager=eager,
    )


def main() -> None:
    table = Table(__doc__)
    for case in [(1, 1), (256, 1), (1, 4096), (16, 1024), (512, 32)]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
