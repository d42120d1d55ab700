from dataclasses import dataclass

import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops


@dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...]  # scheduled tokens of each sequence
    starts: tuple[int, ...]
    block_size: int
    padding: int = 0

    def __repr__(self) -> str:
        return f"q{self.q_lens}-start{self.starts}-block{self.block_size}-pad{self.padding}".replace(" ", "")


CORNERS = [
    Case((), (), 16),
    Case((), (), 16, padding=3),
    Case((0,), (5,), 16),
    Case((1,), (0,), 1),
    Case((1, 1, 1), (15, 16, 4095), 16),  # decode: last of a block, first of a block, far
    Case((17, 0, 31, 1), (0, 9, 7, 100), 16, padding=5),
    Case((7, 67), (3, 0), 1),
    Case((300, 1), (200, 513), 256, padding=1),
]


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """positions, slots (poisoned), block_tables (absurd where unused), cu_seqlens_q, start_pos."""
    torch.manual_seed(0)
    needed = [-(-(s + n) // case.block_size) for s, n in zip(case.starts, case.q_lens)]
    tables = torch.full((len(needed), max(needed, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    pool = torch.randperm(sum(needed) + 10, dtype=torch.int32)
    for b, n in enumerate(needed):
        tables[b, :n] = pool[sum(needed[:b]) :][:n]
    cu_seqlens_q = torch.tensor([0, *case.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_tokens = sum(case.q_lens) + case.padding
    positions, slots = torch.full((2, num_tokens), -7)
    start_pos = torch.tensor(case.starts, dtype=torch.int32)
    made = (positions, slots, tables, cu_seqlens_q, start_pos)
    return tuple(x.to(device) for x in made)


@pytest.mark.parametrize("case", CORNERS, ids=repr)
def test_corners(device: str, case: Case) -> None:
    positions, slots, *rest = inputs(case, device)
    want = reference.slot_mapping(*rest, case.block_size, positions.numel())
    ops.slot_mapping(positions, slots, *rest, case.block_size)
    reference.assert_same_bits(positions, want[0], "positions")
    reference.assert_same_bits(slots, want[1], "slots")


def test_padding_rows(device: str) -> None:
    """A negative start: no position, no slot, whatever the table holds; the rows around it are as they would be."""
    tables = torch.tensor([[7], [3], [2**31 - 1]], dtype=torch.int32, device=device)
    cu_seqlens_q = torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=device)
    start_pos = torch.tensor([-1, 5, -1], dtype=torch.int32, device=device)
    positions, slots = (torch.full((4,), -77, dtype=torch.int64, device=device) for _ in range(2))
    ops.slot_mapping(positions, slots, tables, cu_seqlens_q, start_pos, 16)
    assert positions.tolist() == [0, 0, 5, 0] and slots.tolist() == [-1, -1, 3 * 16 + 5, -1]


def test_missing_block_and_strided_table(device: str) -> None:
    case = Case((40,), (8,), 16)
    positions, slots, tables, cu_seqlens_q, start_pos = inputs(case, device)
    tables[0, 1] = -1
    wide = torch.full((1, 20), 2**31 - 1, dtype=torch.int32, device=device)
    wide[:, 3 : 3 + tables.size(1)] = tables
    ops.slot_mapping(positions, slots, wide[:, 3:], cu_seqlens_q, start_pos, 16)
    assert positions.tolist() == list(range(8, 48))
    assert slots[8:24].tolist() == [-1] * 16
    assert (slots[:8] >= 0).all() and (slots[24:] >= 0).all()


def test_slots_pass_two_to_the_31(device: str) -> None:
    tables = torch.tensor([[2**31 - 2]], dtype=torch.int32, device=device)
    positions, slots = torch.zeros(2, 1, dtype=torch.int64, device=device)
    cu_seqlens_q = torch.tensor([0, 1], dtype=torch.int32, device=device)
    start_pos = torch.tensor([5], dtype=torch.int32, device=device)
    ops.slot_mapping(positions, slots, tables, cu_seqlens_q, start_pos, 256)
    assert slots.item() == (2**31 - 2) * 256 + 5


def test_errors() -> None:
    positions, slots = torch.zeros(2, 4, dtype=torch.int64)
    tables = torch.zeros(2, 3, dtype=torch.int32)
    cu_seqlens_q, start_pos = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 4], [0, 0]))

    def i32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    good = (positions, slots, tables, cu_seqlens_q, start_pos, 16)
    cases = [
        ({1: slots[:3]}, "slots: expected num_tokens = 4 (from positions) in dimension 0, got 3"),
        ({4: i32(0)}, "start_pos: expected num_seqs = 2 (from block_tables) in dimension 0, got 1"),
        ({3: i32(0, 4)}, "cu_seqlens_q: expected size 3 in dimension 0, got 2"),
        ({0: positions.int()}, "positions: expected dtype int64, got int32"),
        ({2: tables.long()}, "block_tables: expected dtype int32, got int64"),
        ({5: 12}, "block_size: expected a block size that is a power of two, got 12"),
        ({5: 0}, "block_size: expected a block size that is a power of two, got 0"),
        ({3: i32(1, 3, 4)}, "cu_seqlens_q: expected 0 first, got 1"),
        (
            {3: i32(0, 3, 5)},
            "cu_seqlens_q: expected non-decreasing offsets of at most num_tokens = 4, got 3 then 5",
        ),
        (
            {3: i32(0, 3, 2)},
            "cu_seqlens_q: expected non-decreasing offsets of at most num_tokens = 4, got 3 then 2",
        ),
        ({4: i32(0, -2)}, "start_pos: expected at least -1, got -2 for sequence 1"),
        (
            {4: i32(0, 48)},
            "block_tables: expected at least 4 entries for position 48 of sequence 1 in blocks of 16",
        ),
    ]
    for changes, message in cases:
        args = [changes.get(i, arg) for i, arg in enumerate(good)]
        with pytest.raises(RuntimeError) as error:
            ops.slot_mapping(*args)
        assert str(error.value).startswith("slot_mapping: " + message)
    assert not positions.any() and not slots.any()
