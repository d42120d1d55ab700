"""What the runner keeps of every running sequence: one row each, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logits import needs_processing

Arrays = dict[str, np.ndarray]
_WORDS = {"seeds": 2, "temperature": 1, "top_p": 1, "min_p": 1, "top_k": 1}  # int32 words of a row's parameter
_NUMPY_DTYPES = {"seeds": np.int64, "top_k": np.int32}  # the others are float32
_ALIGNMENT = 16  # words


class RowTable:
    """Block tables, sampling parameters and last tokens by row.

    The host side is written here; `changes` gives what a step must send and `apply` writes it on the device. On CPU
    the two sides are the same memory and there is nothing to send. Tables and parameters share one array of 32-bit
    words, so that all changes of a step are one list of places and one of values.

    Attributes (device tensors; R rows, and a spare one for padding that no sequence owns, greedy and without blocks):
        block_tables: [R + 1, M] int32, entry i is the block of positions i*block_size ..; -1 or stale past the end.
        last_token_ids: [R + 1] int64, the token sampled last; written by the steps themselves, never by the host.
        params: temperature, top_p, min_p [R + 1] float32, top_k [R + 1] int32, seeds [R + 1] int64.
        is_special: [R] bool, on the host only: the row's logits need the host (penalties, a bias, min_tokens, a form,
            logprobs).
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.spare_row = rows
        count = rows + 1
        self._starts: dict[str, int] = {}  # where each parameter begins, in words
        end = 0
        for name, words in _WORDS.items():
            self._starts[name] = end
            end = -(-(end + words * count) // _ALIGNMENT) * _ALIGNMENT
        self._tables_start, self._width = end, width
        self._words = np.zeros(end + count * width, np.int32)
        self._tables, self._params = self._views(count)
        self._tables.fill(-1)
        self._is_shared = device.type == "cpu"
        self.is_special = np.zeros(rows, bool)
        self._device_words = torch.from_numpy(self._words).to(device)
        self.block_tables = self._device_words[end:].view(count, width)
        self.params = {
            name: self._device_words[start : start + _WORDS[name] * count].view(
                torch.from_numpy(self._params[name]).dtype
            )
            for name, start in self._starts.items()
        }
        self.last_token_ids = torch.zeros(count, dtype=torch.int64, device=device)

    def _views(self, count: int) -> tuple[np.ndarray, Arrays]:
        """The host's block tables [count, M] and parameters [count]."""
        params = {
            name: self._words[start : start + _WORDS[name] * count].view(_NUMPY_DTYPES.get(name, np.float32))
            for name, start in self._starts.items()
        }
        return self._words[self._tables_start :].reshape(count, self._width), params

    def changes(self, seqs: Iterable[Sequence], moves: Seq[tuple[int, int]] = ()) -> Arrays:
        """Takes in what changed of `seqs` since their last step; the arrays that the device must get.

        moves: (from, to) rows of sequences that changed rows; the row they have now is sent as that of a new one.
        """
        places: list[int] = []
        for seq in seqs:
            known, table = seq.num_synced_blocks, seq.block_table
            if known == len(table):
                continue
            if known == 0:
                self._enter(seq)
                if not self._is_shared:
                    places += self._param_places(seq.row)
            self._tables[seq.row, known : len(table)] = table[known:]
            seq.num_synced_blocks = len(table)
            if not self._is_shared:
                start = self._tables_start + seq.row * self._width
                places += range(start + known, start + len(table))
        arrays: Arrays = {}
        if places:
            arrays["changed_places"] = index = np.array(places, np.int64)
            arrays["changed_words"] = self._words[index]
        if moves:
            arrays["moved_from"], arrays["moved_to"] = np.array(moves, np.int64).T
        return arrays

    def _param_places(self, row: int) -> list[int]:
        return [start + _WORDS[name] * row + i for name, start in self._starts.items() for i in range(_WORDS[name])]

    def _enter(self, seq: Sequence) -> None:
        row, p, params = seq.row, seq.params, self._params
        params["temperature"][row], params["top_p"][row], params["min_p"][row] = p.temperature, p.top_p, p.min_p
        params["top_k"][row], params["seeds"][row] = min(p.top_k, 2**31 - 1), seq.seed
        self.is_special[row] = needs_processing(seq) or p.logprobs is not None

    def apply(self, sent: dict[str, Tensor]) -> None:
        """Writes the arrays of `changes`, now on the device, to their places."""
        if "changed_places" in sent:
            self._device_words.index_copy_(0, sent["changed_places"], sent["changed_words"])
        if "moved_from" in sent:
            last = self.last_token_ids
            last.index_copy_(0, sent["moved_to"], last.index_select(0, sent["moved_from"]))
