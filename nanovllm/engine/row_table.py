"""What the runner keeps of every running sequence: one row each, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logits import needs_processing

Arrays = dict[str, np.ndarray]


class RowTable:
    """Block tables, sampling parameters and last tokens by row.

    The host side is written here; `changes` gives what a step must send and `apply` writes it on the device. On CPU
    the two sides are the same memory and there is nothing to send.

    Attributes (device tensors, R rows):
        block_tables: [R, M] int32, entry i is the block of positions i*block_size ..; -1 or stale past the end.
        last_token_ids: [R] int64, the token sampled last; written by the steps themselves, never by the host.
        params: temperature, top_p, min_p [R] float32, top_k [R] int32, seeds [R] int64.
        is_special: [R] bool, on the host only: the row's logits need the host (penalties, bias, logprobs).
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._tables = np.full((rows, width), -1, np.int32)
        self._params: Arrays = {name: np.zeros(rows, np.float32) for name in ("temperature", "top_p", "min_p")}
        self._params |= {"top_k": np.zeros(rows, np.int32), "seeds": np.zeros(rows, np.int64)}
        self._is_shared = device.type == "cpu"
        self.is_special = np.zeros(rows, bool)
        self.block_tables = torch.from_numpy(self._tables).to(device)
        self.params = {name: torch.from_numpy(array).to(device) for name, array in self._params.items()}
        self.last_token_ids = torch.zeros(rows, dtype=torch.int64, device=device)

    def changes(self, seqs: Iterable[Sequence]) -> Arrays:
        """Takes in what changed of `seqs` since their last step; the arrays that the device must get."""
        places: list[int] = []  # flat, in block_tables
        values: list[int] = []
        new_rows: list[int] = []
        width = self._tables.shape[1]
        for seq in seqs:
            known, table = seq.num_synced_blocks, seq.block_table
            if known == len(table):
                continue
            if known == 0:
                self._enter(seq)
                new_rows.append(seq.row)
            new = table[known:]
            self._tables[seq.row, known : len(table)] = new
            seq.num_synced_blocks = len(table)
            if not self._is_shared:
                start = seq.row * width + known
                places += range(start, start + len(new))
                values += new
        if self._is_shared or not places:
            return {}
        arrays = {"table_places": np.array(places, np.int64), "table_values": np.array(values, np.int32)}
        if new_rows:
            rows = np.array(new_rows, np.int64)
            arrays |= {"new_rows": rows} | {f"new_{name}": array[rows] for name, array in self._params.items()}
        return arrays

    def _enter(self, seq: Sequence) -> None:
        row, p = seq.row, seq.params
        given = (p.temperature, p.top_p, p.min_p, min(p.top_k, 2**31 - 1), seq.seed)
        for array, value in zip(self._params.values(), given):
            array[row] = value
        self.is_special[row] = needs_processing(seq) or p.logprobs is not None

    def apply(self, sent: dict[str, Tensor]) -> None:
        """Writes the arrays of `changes`, now on the device, to their places."""
        if "table_places" in sent:
            self.block_tables.view(-1).index_copy_(0, sent["table_places"], sent["table_values"])
        if "new_rows" in sent:
            for name, tensor in self.params.items():
                tensor.index_copy_(0, sent["new_rows"], sent[f"new_{name}"])
