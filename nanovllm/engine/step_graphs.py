"""CUDA graphs of whole steps, from the rows' last tokens to their next ones in one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.batch import Batch
from nanovllm.engine.context import Context
from nanovllm.engine.staging import InputLayout, device_view
from nanovllm.models.decoder_step import MAX_FUSED_TOKENS, max_fused_rows

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

# Steps with prompt chunks that have a graph: those that the GPU ends sooner than the host could launch them, in about
# 10 ms. That many tokens times weights are as much work, on the GPU where it was measured (H200, about 500 TFLOP/s).
_WORK = 2.5e12
_MIN_GRAPH_TOKENS, MAX_GRAPH_TOKENS = 512, 4096
_MAX_DECODES = 256
_MAX_CHUNKS = 32  # one warp finds its work among them
_TOKEN_STEPS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584)


def batch_buckets(max_rows: int) -> list[int]:
    """Batch sizes with a graph: fine where a step is short, and max_rows itself; each 1..max_rows fits into one."""
    steps = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, 512, 64), *range(512, max_rows, 128)]
    return [b for b in steps if b < max_rows] + [max_rows]


class MixedBucket(NamedTuple):
    """Room of a graph for steps with prompt chunks. tokens: of decodes and chunks together."""

    tokens: int
    decodes: int
    chunks: int


def longest_graph(num_weights: int) -> int:
    """Tokens of the longest step with prompt chunks that runs from a graph, for a model of num_weights."""
    return int(min(max(_WORK / num_weights, _MIN_GRAPH_TOKENS), MAX_GRAPH_TOKENS))


def mixed_buckets(max_tokens: int, max_rows: int) -> list[MixedBucket]:
    """Graphs for steps with prompt chunks, in rising order: for each number of tokens one without and one with decodes.

    Args:
        max_tokens: of a step with a graph. max_rows: sequences that may run at once.
    """
    return [
        MixedBucket(tokens, decodes, min(tokens, max_rows, _MAX_CHUNKS))
        for tokens in [s for s in _TOKEN_STEPS if s < max_tokens] + [max_tokens]
        for decodes in (0, min(tokens, max_rows, _MAX_DECODES))
    ]


def smallest_mixed_bucket(
    buckets: list[MixedBucket], num_tokens: int, num_decodes: int, num_chunks: int
) -> MixedBucket | None:
    """The first of mixed_buckets with room for a step; None: too large for every graph."""
    for bucket in buckets:
        if bucket.tokens >= num_tokens and bucket.decodes >= num_decodes and bucket.chunks >= num_chunks:
            return bucket
    return None


def capture(step: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of what `step` enqueues, and its logits, which every replay writes. `step` ran before.

    The logits are not owned: the graphs of a pool go on sharing their memory, and what one left lasts until another
    runs.
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads do meanwhile (the tokenizer is being loaded) does not concern the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = step()
    return graph, device_view(logits.contiguous(), logits.device)


@dataclass(slots=True)
class StepGraph:
    """A captured step: fill inputs.arrays(), launch, and the sampled tokens are in the runner's results, of logits
    [.., vocab]."""

    graph: torch.cuda.CUDAGraph
    inputs: InputLayout
    logits: Tensor

    def launch(self) -> None:
        self.inputs.send()
        self.graph.replay()


Bucket = TypeVar("Bucket", int, MixedBucket)


class StepGraphs(ABC, Generic[Bucket]):
    """The graphs of one kind of step, one a bucket. They read and write fixed buffers and share one memory pool."""

    def __init__(self, runner: ModelRunner, pool: Any, buckets: list[Bucket]) -> None:
        self._runner, self._pool, self.buckets = runner, pool, buckets
        self._graphs: dict[Bucket, StepGraph] = {}

    @abstractmethod
    def _fields(self, bucket: Bucket) -> dict[str, tuple[int, type[np.generic]]]:
        """What a step sends: name -> (elements, dtype)."""

    @abstractmethod
    def _step(self, bucket: Bucket, t: dict[str, Tensor]) -> Tensor:
        """Enqueues a step with the inputs `t`; the logits of its sampled token ids."""

    @abstractmethod
    def find(self, batch: Batch, rows: np.ndarray) -> Bucket | None:
        """The bucket of the graph that can run this batch; rows: of its sequences, decodes first."""

    @abstractmethod
    def places(self, rows: np.ndarray) -> np.ndarray | None:
        """Where in the results and logits those of batch.sampled are; None: in the first places."""

    @abstractmethod
    def launch(self, bucket: Bucket, batch: Batch, rows: np.ndarray, turn: int) -> StepGraph:
        """Replays the step; `turn`: which of the runner's results gets its token ids."""

    def capture(self, buckets: list[Bucket] | None = None) -> None:
        """Captures the graphs of `buckets` (default: all), the largest first, and runs each once."""
        largest_first = sorted(buckets or self.buckets, reverse=True)
        layouts = {bucket: self._runner.inputs.layout(**self._fields(bucket)) for bucket in largest_first}
        with torch.inference_mode():
            for bucket, inputs in layouts.items():  # once eagerly: kernels load, cuBLAS picks its algorithms
                self._fill_padding(inputs)
                self._step(bucket, inputs.tensors)
            for bucket, inputs in layouts.items():
                self._fill_padding(inputs)
                graph, logits = capture(partial(self._step, bucket, inputs.tensors), self._pool)
                graph.replay()  # the first replay uploads the graph
                self._graphs[bucket] = StepGraph(graph, inputs, logits)

    def _fill_padding(self, inputs: InputLayout) -> None:
        """Inputs of a step without sequences: nothing of the cache is stored or read."""
        for name, tensor in inputs.tensors.items():
            tensor.fill_(-1 if name == "start_pos" else 0)


class DecodeGraphs(StepGraphs[int]):
    """Steps of decodes only; the graph of B covers rows 0..B-1 of the row table.

    A step sends, for each row, its context length (0: the row does not decode, it writes nothing and keeps its last
    token) and what follows from it; all else is on the device already. Where the layers rotate and store within
    attention, nobody needs positions and slots.
    """

    def __init__(self, runner: ModelRunner, pool: Any) -> None:
        rows, device = runner.config.max_running, runner.device
        super().__init__(runner, pool, batch_buckets(rows))
        self._cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def _fields(self, size: int) -> dict[str, tuple[int, type[np.generic]]]:
        return {
            "context_lens": (size, np.int32),
            "start_pos": (size, np.int32),
            "sample_positions": (size, np.int64),
            "turn": (1, np.int32),
        }

    def _step(self, size: int, t: dict[str, Tensor]) -> Tensor:
        rows = self._runner.rows
        logits = self._logits(size, t)
        params = {n: p[:size] for n, p in rows.params.items()}
        self._runner.sample(rows.last_token_ids[:size], logits, params, t["sample_positions"], t["turn"])
        return logits

    def _logits(self, size: int, t: dict[str, Tensor]) -> Tensor:
        r = self._runner
        lens, tables, last = t["context_lens"], r.rows.block_tables[:size], r.rows.last_token_ids[:size]
        positions, slots = r.positions[:size], r.slots[:size]
        if not r.decodes_by_rope_attention:
            ops.slot_mapping(positions, slots, tables, self._cu_seqlens[: size + 1], t["start_pos"], r.block_size)
        ops.decode_plan(r.plan, lens, r.model_config.num_kv_heads, r.block_size)
        context = Context(
            slot_mapping=slots,
            num_decode=size,
            decode_block_tables=tables,
            decode_context_lens=lens,
            plan=r.plan,
            workspace=r.workspace,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            context_lens=None,
            block_tables=None,
            max_seqlen_q=0,
        )
        return r.run_model(last, positions, context)

    def find(self, batch: Batch, rows: np.ndarray) -> int | None:
        if batch.chunks:
            return None
        i = bisect_left(self.buckets, int(rows.max()) + 1)
        return self.buckets[i] if self.buckets[i] in self._graphs else None

    def places(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def positions(self, size: int) -> Tensor:
        """Of the last step of this size, by row."""
        return self._graphs[size].inputs.tensors["start_pos"]

    def launch(self, size: int, batch: Batch, rows: np.ndarray, turn: int) -> StepGraph:
        graph = self._graphs[size]
        arrays = graph.inputs.arrays()
        lens, positions = arrays["context_lens"], arrays["sample_positions"]
        lens.fill(0)
        positions.fill(-1)
        lens[rows] = positions[rows] = batch.decode_ends
        np.subtract(lens, 1, out=arrays["start_pos"])
        arrays["turn"][0] = turn
        graph.launch()
        return graph


class FusedDecodeGraphs(DecodeGraphs):
    """The same steps by the runner's decoder_step: of few rows and tokens of context, where it is faster."""

    def __init__(self, runner: ModelRunner, pool: Any) -> None:
        super().__init__(runner, pool)
        most = max_fused_rows(runner.model_config)
        self.buckets = [size for size in self.buckets if size <= most]

    def _logits(self, size: int, t: dict[str, Tensor]) -> Tensor:
        r = self._runner
        rows = r.rows.last_token_ids[:size], r.rows.block_tables[:size], t["context_lens"]
        return r.decoder_step(*rows, r.kv_cache)

    def find(self, batch: Batch, rows: np.ndarray) -> int | None:
        if rows.max() >= self.buckets[-1] or sum(batch.decode_ends) > MAX_FUSED_TOKENS:
            return None
        return super().find(batch, rows)


class MixedGraphs(StepGraphs[MixedBucket]):
    """Steps with prompt chunks, up to some length: first the decodes, one token each, then the chunks.

    Sequences have places: bucket.decodes for decodes, then bucket.chunks for chunks, either filled from its first
    one. Decode attention covers the first bucket.decodes tokens; those that are of chunks have a context of 0 there,
    and prefill attention, which reads all keys and values through block tables, fills them after it.
    """

    def __init__(self, runner: ModelRunner, pool: Any) -> None:
        c = runner.config
        longest = longest_graph(sum(p.numel() for p in runner.model.parameters()))
        super().__init__(runner, pool, mixed_buckets(min(c.max_num_batched_tokens, longest), c.max_running))

    def _fields(self, bucket: MixedBucket) -> dict[str, tuple[int, type[np.generic]]]:
        seqs = bucket.decodes + bucket.chunks
        return {
            "input_ids": (bucket.tokens, np.int64),  # negative: the last token of this place's row
            "rows": (seqs, np.int64),
            "cu_seqlens": (seqs + 1, np.int32),
            "start_pos": (seqs, np.int32),
            "decode_context_lens": (bucket.decodes, np.int32),
            "context_lens": (bucket.chunks, np.int32),
            "logits_indices": (seqs, np.int64),
            "sampled_rows": (seqs, np.int64),
            "sample_positions": (seqs, np.int64),
            "turn": (1, np.int32),
        }

    def _step(self, bucket: MixedBucket, t: dict[str, Tensor]) -> Tensor:
        r, num_decode = self._runner, bucket.decodes
        tables = r.rows.block_tables.index_select(0, t["rows"])
        input_ids, positions, slots = t["input_ids"], r.positions[: bucket.tokens], r.slots[: bucket.tokens]
        if num_decode:
            first = input_ids[:num_decode]
            last = r.rows.last_token_ids.index_select(0, t["rows"][:num_decode])
            torch.where(first < 0, last, first, out=first)
            ops.decode_plan(r.plan, t["decode_context_lens"], r.model_config.num_kv_heads, r.block_size)
        ops.slot_mapping(positions, slots, tables, t["cu_seqlens"], t["start_pos"], r.block_size)
        context = Context(
            slot_mapping=slots,
            num_decode=num_decode,
            decode_block_tables=tables[:num_decode],
            decode_context_lens=t["decode_context_lens"],
            plan=r.plan,
            workspace=r.workspace,
            cu_seqlens_q=t["cu_seqlens"][num_decode:],
            cu_seqlens_k=None,
            context_lens=t["context_lens"],
            block_tables=tables[num_decode:],
            max_seqlen_q=bucket.tokens,
            first_prefill_row=0,
        )
        logits = r.run_model(input_ids, positions, context, t["logits_indices"])
        params = {name: p.index_select(0, t["sampled_rows"]) for name, p in r.rows.params.items()}
        token_ids = torch.empty_like(t["sampled_rows"])
        r.sample(token_ids, logits, params, t["sample_positions"], t["turn"])
        r.rows.last_token_ids.index_copy_(0, t["sampled_rows"], token_ids)
        return logits

    def find(self, batch: Batch, rows: np.ndarray) -> MixedBucket | None:
        if not batch.chunks:
            return None
        bucket = smallest_mixed_bucket(self.buckets, batch.num_tokens, len(batch.decodes), len(batch.chunks))
        return bucket if bucket in self._graphs else None

    def places(self, rows: np.ndarray) -> None:
        return None

    def launch(self, bucket: MixedBucket, batch: Batch, rows: np.ndarray, turn: int) -> StepGraph:
        graph = self._graphs[bucket]
        arrays = graph.inputs.arrays()
        fill_mixed_inputs(arrays, bucket, batch, rows, self._runner.rows.spare_row)
        arrays["turn"][0] = turn
        graph.launch()
        return graph


def fill_mixed_inputs(
    a: dict[str, np.ndarray], bucket: MixedBucket, batch: Batch, rows: np.ndarray, spare_row: int
) -> None:
    """Writes the arrays of MixedGraphs for a batch, but for the turn.

    Unused places have no tokens and the spare row; tokens past the last sequence get slot -1 on the device.
    """
    num_decode, num_chunks, first = len(batch.decodes), len(batch.chunks), bucket.decodes
    used = slice(first, first + num_chunks)
    a["rows"].fill(spare_row)
    a["rows"][:num_decode], a["rows"][used] = rows[:num_decode], rows[num_decode:]
    a["start_pos"].fill(-1)
    a["start_pos"][used] = [c.start for c in batch.chunks]
    a["context_lens"].fill(0)
    a["context_lens"][:num_chunks] = ends = [c.end for c in batch.chunks]
    cu_seqlens, input_ids = a["cu_seqlens"], a["input_ids"]
    cu_seqlens[: first + 1] = num_decode
    cu_seqlens[:num_decode] = np.arange(num_decode)
    end = num_decode
    for i, c in enumerate(batch.chunks, first + 1):
        begin, end = end, end + c.end - c.start
        input_ids[begin:end] = c.seq.token_ids[c.start : c.end]
        cu_seqlens[i] = end
    input_ids[end:] = 0
    cu_seqlens[first + num_chunks + 1 :] = end

    lasts = [i for i, c in enumerate(batch.chunks) if c.is_last]
    num_sampled = num_decode + len(lasts)
    a["logits_indices"].fill(0)
    a["logits_indices"][num_decode:num_sampled] = cu_seqlens[first + 1 :][lasts] - 1
    a["sampled_rows"].fill(spare_row)
    a["sampled_rows"][num_decode:num_sampled] = rows[num_decode:][lasts]
    a["sample_positions"].fill(0)
    a["sample_positions"][num_decode:num_sampled] = [ends[i] for i in lasts]
    a["decode_context_lens"].fill(0)
    if num_decode:
        input_ids[:num_decode] = -1
        a["start_pos"][:num_decode] = a["decode_context_lens"][:num_decode] = batch.decode_ends
        a["start_pos"][:num_decode] -= 1
        a["logits_indices"][:num_decode] = np.arange(num_decode)
        a["sampled_rows"][:num_decode] = rows[:num_decode]
        a["sample_positions"][:num_decode] = batch.decode_ends
