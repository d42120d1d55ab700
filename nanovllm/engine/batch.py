"""What one step computes: the scheduler's decision, handed to the model runner and back to postprocess."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.engine.sequence import Sequence


@dataclass(slots=True, frozen=True)
class Chunk:
    """Tokens start..end-1 of a prefilling sequence; is_last: the chunk ends at its last known token, so it samples."""

    seq: Sequence
    start: int
    end: int
    is_last: bool


@dataclass(slots=True)
class Batch:
    """One step: first the decoding sequences (one token each), then chunks of prompts.

    Attributes:
        decodes: sequences whose next token is computed.
        decode_ends: context length of each in this step (its position + 1).
        chunks: the prefill work.
        moves: (from, to) of running sequences that change rows before this step; the rows are distinct.
        preempted: sequences that lost their blocks to this step's decodes.
        finished: sequences that ended while scheduling (the pool cannot hold their next token).
    """

    decodes: list[Sequence] = field(default_factory=list)
    decode_ends: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(c.end - c.start for c in self.chunks)

    @property
    def num_sampled(self) -> int:
        return len(self.decodes) + sum(c.is_last for c in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of the sampler's rows."""
        return self.decodes + [c.seq for c in self.chunks if c.is_last]
