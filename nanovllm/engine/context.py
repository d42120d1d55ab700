"""What the attention layers need to know of one forward: which rows decode or prefill, and their cache."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Context:
    """Batch metadata of one forward over T rows (tokens): D one-token decodes, then P packed prefill chunks.

    Row r < num_decode is the newest token of decode sequence r; rows num_decode.. are the chunks of the P
    prefill sequences, one after the other. (A CUDA graph has room for num_decode decodes; where fewer run, chunks
    begin earlier, and their rows have a decode context of 0.) A block table lists a sequence's cache blocks in
    logical order: position p is in block table[p // block_size], at offset p % block_size. Unused entries are -1,
    never read.
    """

    slot_mapping: Tensor
    """[T] int64: where row r's key and value go, block * block_size + offset; -1 stores nothing. Unset in a pure decode
    whose layers find the slots themselves."""
    num_decode: int
    """D; 0 for a pure prefill, T for a pure decode."""
    decode_block_tables: Tensor | None
    """[D, M] int32: row r is the block table of decode sequence r. None is allowed when D is 0."""
    decode_context_lens: Tensor | None
    """[D] int32: keys that row r attends to, its own included; 0 for a padding row, whose output is 0. None is
    allowed when D is 0."""
    plan: Tensor
    """int32: the split of the decode work, filled by ops.decode_plan once a step."""
    workspace: Tensor
    """float32: scratch of ops.paged_attention_decode."""
    cu_seqlens_q: Tensor
    """[P + 1] int32: chunk i is the rows first_prefill_row + [cu_seqlens_q[i], cu_seqlens_q[i + 1])."""
    cu_seqlens_k: Tensor
    """[P + 1] int32: running sum of context_lens from 0."""
    context_lens: Tensor
    """[P] int32: tokens of sequence i in the cache after this forward; its last row attends to them all."""
    block_tables: Tensor | None
    """[P, M] int32: row i is the block table of prefill sequence i; None, never in a graph,
    when no chunk has cached tokens before it, so that attention reads the packed keys and values of this forward."""
    max_seqlen_q: int
    """At least the tokens of the longest chunk; 0 without prefill."""
    first_prefill_row: int | None = None
    """Where cu_seqlens_q counts from; None: num_decode."""


_local = threading.local()  # engines in different threads do not see each other's context


@contextmanager
def set_context(context: Context) -> Iterator[Context]:
    """Make `context` the one that get_context() returns, for the length of a with block.

    Raises:
        RuntimeError: another context is set: two forwards may not interleave.
    """
    if getattr(_local, "context", None) is not None:
        raise RuntimeError("set_context: expected no context to be set, got a nested call")
    _local.context = context
    try:
        yield context
    finally:
        _local.context = None


def get_context() -> Context:
    """The context of the running forward.

    Raises:
        RuntimeError: none is set.
    """
    context = getattr(_local, "context", None)
    if context is None:
        raise RuntimeError("get_context: expected a running forward, got none: call the model within set_context(...)")
    return context
