"""A sequence: one completion of one request, as the scheduler and the block manager see it."""

from __future__ import annotations

from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.grammar import Grammar

_GREEDY = SamplingParams(temperature=0.0)


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens, block table and progress of one completion.

    With L = len(seq), the last of the L tokens is the one sampled last, whose K/V is not computed yet. With a step in
    flight that token may still be on the device: it then counts in len(seq) (num_pending), not in token_ids.

    Attributes:
        token_ids: prompt and known output tokens.
        block_table: physical block ids, logical block i holds positions i*block_size ..
        block_hashes: chained hashes of the full blocks of token_ids, computed once, on demand.
        num_cached_tokens: tokens whose K/V was computed by finished steps or came from the prefix cache.
        num_launched_tokens: those, and the ones that steps in flight compute.
        num_scheduled_tokens: tokens that the last schedule() gave this sequence.
        num_prefill_tokens: tokens known when it was admitted; until they are launched it prefills, then it decodes.
        num_pending: tokens sampled by steps in flight.
        num_in_flight: launched steps that contain it and are not collected.
        row: its row in the runner's tables while it runs, else -1.
        grammar: what the output may be, None for anything.
        is_stale: preempted while a step in flight contains it: that step's token counts, its K/V is gone.
    """

    __slots__ = (
        "block_hashes",
        "block_size",
        "block_table",
        "data",
        "eos_token_ids",
        "finish_reason",
        "grammar",
        "is_stale",
        "max_length",
        "num_cached_tokens",
        "num_in_flight",
        "num_launched_tokens",
        "num_pending",
        "num_prefill_tokens",
        "num_prefix_tokens",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_synced_blocks",
        "params",
        "row",
        "seed",
        "seq_id",
        "status",
        "stop_reason",
        "token_ids",
        "waits_for_tokens",
    )
    _ids = count()

    def __init__(
        self,
        token_ids: list[int],
        block_size: int,
        params: SamplingParams = _GREEDY,
        eos_token_ids: frozenset[int] = frozenset(),
        max_model_len: int | None = None,
        seed: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.seq_id = next(Sequence._ids)
        self.token_ids = list(token_ids)
        self.block_size = block_size
        self.params = params
        stops = frozenset(params.stop_token_ids or ())
        self.eos_token_ids = stops if params.ignore_eos else eos_token_ids | stops
        self.seed = seed
        self.num_prompt_tokens = len(token_ids)
        limit = self.num_prompt_tokens + params.max_tokens
        self.max_length = limit if max_model_len is None else min(limit, max_model_len)
        self.grammar = grammar
        self.waits_for_tokens = (
            params.has_penalties or grammar is not None
        )  # its next step needs the last token on the host
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []
        self.num_prefix_tokens = -1  # prefix-cache hit of the first admission
        self.num_pending = 0
        self.num_in_flight = 0
        self.is_stale = False
        self.data: object = None  # the engine's own record of this sequence
        self.reset_progress()

    def reset_progress(self) -> None:
        """No K/V, no blocks, no row: as before admission."""
        self.num_cached_tokens = self.num_launched_tokens = self.num_scheduled_tokens = 0
        self.num_prefill_tokens = self.num_synced_blocks = 0
        self.row = -1

    def __len__(self) -> int:
        return len(self.token_ids) + self.num_pending

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, len={len(self)}, cached={self.num_cached_tokens}, "
            f"table={self.block_table})"
        )

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_blocks(self) -> int:
        """Blocks that its known tokens need."""
        return -(-len(self.token_ids) // self.block_size)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def block(self, i: int) -> list[int]:
        """Token ids of logical block i."""
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]
