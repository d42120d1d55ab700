"""What rank 0 tells the workers: one byte of kind, then for a step the scheduled rows in a compact binary form.

A worker needs no sequences: it keeps, of each row, the block table. A step brings what is new: the rows that decode and
their context lengths, the chunks and their tokens, and the blocks that rows got since their last step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nanovllm.engine.batch import Batch, Chunk
from nanovllm.layers.logits import needs_processing
from nanovllm.sampling_params import SamplingParams

STEP, GO, EXIT = b"S", b"G", b"X"
# All numbers are int32. After the kind and three bytes of padding come the lengths of the parts, then the parts.
_PARTS = (
    "moves",  # pairs of rows: from, to
    "decode_rows",
    "decode_ends",
    "chunk_rows",
    "chunk_starts",
    "chunk_ends",
    "chunk_is_last",
    "table_rows",
    "table_firsts",  # logical index of the row's first new block; 0: the row has a new sequence
    "table_counts",
    "table_is_special",
    "blocks",
    "tokens",
)
_INT = np.dtype("<i4")
_PLAIN = SamplingParams(temperature=0.0)
_SPECIAL = SamplingParams(temperature=0.0, logprobs=0)  # its rows take the path of those that rank 0 handles apart


def encode_step(batch: Batch) -> bytes:
    """The message of a step. To be made before rank 0 launches it: the launch marks the new blocks as known."""
    seqs = batch.decodes + [c.seq for c in batch.chunks]
    changed = [s for s in seqs if s.num_synced_blocks != len(s.block_table)]
    parts: dict[str, list[int]] = {
        "moves": [row for move in batch.moves for row in move],
        "decode_rows": [s.row for s in batch.decodes],
        "decode_ends": batch.decode_ends,
        "chunk_rows": [c.seq.row for c in batch.chunks],
        "chunk_starts": [c.start for c in batch.chunks],
        "chunk_ends": [c.end for c in batch.chunks],
        "chunk_is_last": [c.is_last for c in batch.chunks],
        "table_rows": [s.row for s in changed],
        "table_firsts": [s.num_synced_blocks for s in changed],
        "table_counts": [len(s.block_table) - s.num_synced_blocks for s in changed],
        "table_is_special": [needs_processing(s) or s.params.logprobs is not None for s in changed],
        "blocks": [b for s in changed for b in s.block_table[s.num_synced_blocks :]],
        "tokens": [t for c in batch.chunks for t in c.seq.token_ids[c.start : c.end]],
    }
    arrays = [np.array(parts[name], _INT) for name in _PARTS]
    lengths = np.array([a.size for a in arrays], _INT)
    return b"".join((STEP, b"\0\0\0", lengths.tobytes(), *(a.tobytes() for a in arrays)))


class _Tokens:
    """The token ids of a chunk, found at their places in the sequence."""

    def __init__(self, first: int, token_ids: list[int]) -> None:
        self._first, self._token_ids = first, token_ids

    def __getitem__(self, places: slice) -> list[int]:
        return self._token_ids[places.start - self._first : places.stop - self._first]


@dataclass(slots=True)
class RowSequence:
    """What a worker knows of the sequence in a row: enough for ModelRunner.launch."""

    row: int
    params: SamplingParams
    block_table: list[int] = field(default_factory=list)
    num_synced_blocks: int = 0
    token_ids: _Tokens = field(default_factory=lambda: _Tokens(0, []))
    seed: int = 0
    grammar: None = None  # rank 0 applies it


class StepDecoder:
    """A worker's view of the rows, kept up to date by the messages."""

    def __init__(self) -> None:
        self._rows: dict[int, RowSequence] = {}

    def decode(self, message: bytes) -> Batch:
        """The batch of a step, with RowSequence objects in place of sequences."""
        lengths = np.frombuffer(message, _INT, len(_PARTS), offset=4)
        numbers = np.frombuffer(message, _INT, offset=4 + lengths.nbytes)
        ends = np.cumsum(lengths)
        p = {name: numbers[end - length : end].tolist() for name, end, length in zip(_PARTS, ends, lengths)}
        first = 0
        for row, known, count, is_special in zip(
            p["table_rows"], p["table_firsts"], p["table_counts"], p["table_is_special"]
        ):
            if known == 0:
                self._rows[row] = RowSequence(row, _SPECIAL if is_special else _PLAIN)
            self._rows[row].block_table[known:] = p["blocks"][first : first + count]
            first += count
        batch = Batch([self._rows[row] for row in p["decode_rows"]], p["decode_ends"])  # type: ignore[misc]
        batch.moves = list(zip(p["moves"][::2], p["moves"][1::2]))
        first = 0
        for row, start, end, is_last in zip(p["chunk_rows"], p["chunk_starts"], p["chunk_ends"], p["chunk_is_last"]):
            seq = self._rows[row]
            seq.token_ids = _Tokens(start, p["tokens"][first : first + end - start])
            first += end - start
            batch.chunks.append(Chunk(seq, start, end, bool(is_last)))  # type: ignore[arg-type]
        return batch
