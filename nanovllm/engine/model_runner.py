"""Turns a scheduled batch into tensors, runs the model over the paged KV cache, and samples."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.config import DEFAULT_CPU_KV_BYTES, EngineConfig
from nanovllm.engine.batch import Batch, Chunk
from nanovllm.engine.context import Context, set_context
from nanovllm.engine.kv_cache import block_bytes, max_useful_blocks, num_blocks_in_bytes, num_blocks_on_gpu
from nanovllm.engine.row_table import Arrays, RowTable
from nanovllm.engine.staging import FixedInputs, StagingBuffer, device_view
from nanovllm.engine.step_graphs import MAX_GRAPH_TOKENS, DecodeGraphs, FusedDecodeGraphs, MixedGraphs, StepGraphs
from nanovllm.layers.decode_linear import share_workspace
from nanovllm.layers.logits import Logprobs, process_row
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder_step import DecoderStep, supports
from nanovllm.outputs import Logprob
from nanovllm.parallel.group import Group

_WARMUP_TOKENS_ON_CPU = 32
_GRAPH_MARGIN = 4 << 20  # bytes a captured graph may take beyond the shared pool


@dataclass(slots=True)
class StepHandle:
    """Where the results of a launched step will be.

    token_ids: [>= num_sampled] int64 on the host, written by the device; index: where batch.sampled is in it.
    event: when it is written; None: at once. start: when the device began, where it is timed.
    """

    token_ids: np.ndarray
    index: np.ndarray | slice
    event: torch.cuda.Event | None = None
    logprobs: Logprobs | None = None
    start: torch.cuda.Event | None = None

    def device_seconds(self) -> float | None:
        """Time on the device of a collected step, from its launch or the end of the step before; None: not timed."""
        if self.start is None or self.event is None:
            return None
        return self.start.elapsed_time(self.event) * 1e-3


class ModelRunner:
    """Owns the model, the KV cache and the per-row tables of one device.

    A running sequence has a row in the row table, with its last sampled token on the device, from where the next step
    takes it. So a step can be launched before the step before it was collected.

    Args:
        model_config: with the head counts of this rank.
        model: forward(input_ids [T] i64, positions [T] i64) -> hidden [T, H]; compute_logits(hidden) -> [rows, vocab].
        group: the ranks that share the model; rank 0 samples for all. None: this one alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:
        self.config, self.model_config, self.model = config, model_config, model
        self.group = group or Group()
        self.device, self.dtype, self.block_size = device, dtype, config.kvcache_block_size
        self.kv_cache_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3" else dtype
        rows, width, tokens = config.max_running, config.max_blocks_per_seq, config.max_num_batched_tokens
        self.rows = RowTable(rows, width, device)
        per_row = 12 * width + 256  # bytes that a step may send of a row: its whole block table, and scalars
        self.staging = StagingBuffer(8 * tokens + rows * per_row + 4096, device)
        self.input_ids, self.positions, self.slots = (
            torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        pin = device.type == "cuda"
        # Token ids of steps, which the device writes; they take turns: with one step in flight the ones before may
        # still be read. A graph may have places for more sequences than run at once.
        self._host_results = torch.empty(2, 2 * rows, dtype=torch.int64, pin_memory=pin)
        self.results = device_view(self._host_results, device)
        self._events = [torch.cuda.Event() for _ in range(2)] if pin else []
        self._turn = 0
        self.times_steps = False  # on CUDA: with events, for an observer
        heads = (model_config.num_q_heads, model_config.num_kv_heads, model_config.head_dim)
        self.plan = torch.empty(ops.decode_plan_numel(rows, device), dtype=torch.int32, device=device)
        numel = ops.decode_workspace_numel(rows, config.max_model_len, *heads, device)
        self.workspace = torch.zeros(numel, dtype=torch.float32, device=device)
        share_workspace(self.model, device)
        self.allocate_kv_cache(0)
        self.warmup_model()
        self.decodes_by_rope_attention = all(a.decodes_by_rope_attention for a in self._attentions())
        self.graphs: list[StepGraphs] = []
        self.decoder_step = self._make_decoder_step()
        if device.type == "cuda" and not config.enforce_eager:
            self.inputs = FixedInputs(64 * rows + 8 * MAX_GRAPH_TOKENS + 4096, device)
            self.graphs = self._make_graphs()
        self.num_kvcache_blocks = self.group.min(self._num_kvcache_blocks())
        self.allocate_kv_cache(self.num_kvcache_blocks)
        start = time.perf_counter()
        self.capture_cudagraph()
        self.capture_seconds = time.perf_counter() - start

    # Memory

    def _empty_cache(self, num_blocks: int) -> Tensor:
        m = self.model_config
        shape = (2, m.num_layers, num_blocks, self.block_size, m.num_kv_heads, m.head_dim)
        return torch.empty(shape, dtype=self.kv_cache_dtype, device=self.device)

    def _num_kvcache_blocks(self) -> int:
        c, m = self.config, self.model_config
        if c.num_kvcache_blocks > 0:
            return c.num_kvcache_blocks
        size = block_bytes(m.num_layers, self.block_size, m.num_kv_heads, m.head_dim, self.kv_cache_dtype.itemsize)
        if c.kv_cache_memory_bytes is None and self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            stats = torch.cuda.memory_stats(self.device)
            peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
            free -= self._graph_bytes()
            most = max_useful_blocks(c.max_running, c.max_blocks_per_seq)
            return num_blocks_on_gpu(total, free, peak, current, c.gpu_memory_utilization, size, most)
        memory = c.kv_cache_memory_bytes or DEFAULT_CPU_KV_BYTES
        return num_blocks_in_bytes(memory, size, c.max_running * c.max_blocks_per_seq)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """One tensor [2, layers, blocks, block_size, kv_heads, head_dim]; each attention layer gets its views."""
        self.kv_cache = self._empty_cache(num_blocks)
        for layer, attention in enumerate(self._attentions()):
            attention.k_cache, attention.v_cache = self.kv_cache[0, layer], self.kv_cache[1, layer]

    def _attentions(self) -> list[Any]:
        """The attention layers, in order."""
        return [m for m in self.model.modules() if hasattr(m, "k_cache")]

    def warmup_model(self) -> None:
        """One prefill as large as steps get (small on CPU, where no memory is measured), before there are pages."""
        tokens = self.config.max_num_batched_tokens
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            tokens = min(tokens, _WARMUP_TOKENS_ON_CPU)
        length = min(tokens, self.config.max_model_len)
        count = max(1, min(tokens // length, self.config.max_running))
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=self.device) * length
        cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
        total = count * length
        positions = torch.arange(length, device=self.device).repeat(count)
        context = Context(
            slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=self.device),
            num_decode=0,
            decode_block_tables=None,
            decode_context_lens=None,
            plan=self.plan,
            workspace=self.workspace,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            context_lens=torch.full((count,), length, dtype=torch.int32, device=self.device),
            block_tables=None,
            max_seqlen_q=length,
        )
        num_sampled = min(total, self.config.max_running)
        logits = self.run_model(
            self.input_ids[:total], positions, context, torch.arange(num_sampled, device=self.device)
        )
        token_ids = torch.zeros(num_sampled, dtype=torch.int64, device=self.device)
        turn = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.sample(token_ids, logits, {n: t[:num_sampled] for n, t in self.rows.params.items()}, token_ids, turn)

    def _make_decoder_step(self) -> DecoderStep | None:
        """The fused step for graphs of few rows, where the model, the cache and the options allow it."""
        native = self.config.attention_backend in ("auto", "native") and self.kv_cache_dtype == self.dtype
        can = native and not self.config.enforce_eager and self.group.size == 1
        can = can and supports(self.model_config, self.device)
        return DecoderStep(self.model) if can else None

    def _make_graphs(self) -> list[StepGraphs]:
        pool = torch.cuda.graph_pool_handle()
        fused = [FusedDecodeGraphs(self, pool)] if self.decoder_step is not None else []
        return [*fused, DecodeGraphs(self, pool), MixedGraphs(self, pool)]

    def _graph_bytes(self) -> int:
        """Memory that the graphs will take: that of the largest, captured for once without pages, and a margin."""
        if not self.graphs:
            return 0
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(self.device)[0]
        trial = self._make_graphs()
        for graphs in trial:
            graphs.capture(graphs.buckets[-1:])
        used = before - torch.cuda.mem_get_info(self.device)[0]
        del trial, graphs
        torch.cuda.empty_cache()
        return int(1.1 * used) + sum(len(g.buckets) for g in self.graphs) * _GRAPH_MARGIN

    def capture_cudagraph(self) -> None:
        """Captures the steps of every bucket; nothing on CPU or with enforce_eager."""
        for graphs in self.graphs:
            graphs.capture()

    # One step

    def run(self, batch: Batch) -> list[int]:
        """The sampled token ids of batch.sampled: launch and collect at once."""
        return self.collect(self.launch(batch))[0]

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle:
        """Enqueues a step; its token ids are on the device for the next launch at once, for the host after collect."""
        start = None
        if self.times_steps and self.device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)
            start.record()
        handle = self._launch(batch)
        handle.start = start
        return handle

    def _launch(self, batch: Batch) -> StepHandle:
        seqs = batch.decodes + [c.seq for c in batch.chunks]
        self._turn ^= 1
        arrays = self.rows.changes(seqs, batch.moves)
        rows = np.fromiter((s.row for s in seqs), np.int64, len(seqs))
        graphs, bucket = self.find_graph(batch, rows)
        places = graphs.places(rows) if graphs is not None else None
        special = self._special(batch) if self.rows.is_special[rows].any() else []
        if special:
            arrays |= self._prepare_special(batch, special, places)
        if graphs is not None:
            sent = self.staging.send(arrays) if arrays else {}
            self.rows.apply(sent)
            logits = graphs.launch(bucket, batch, rows, self._turn).logits
        else:
            logits, sent = self._launch_eagerly(batch, rows, arrays)
        logprobs = self._sample_special(batch, special, sent, logits) if special else None
        return self._handle(slice(batch.num_sampled) if places is None else places, logprobs)

    def find_graph(self, batch: Batch, rows: np.ndarray) -> tuple[StepGraphs | None, Any]:
        for graphs in self.graphs:
            bucket = graphs.find(batch, rows)
            if bucket is not None:
                return graphs, bucket
        return None, None

    def _launch_eagerly(self, batch: Batch, rows: np.ndarray, more: Arrays) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of batch.sampled, and what was sent: the step's own arrays and `more`."""
        num_decode = len(batch.decodes)
        arrays = self.prepare_decode(batch.decode_ends)
        arrays |= self.prepare_prefill(batch.chunks)
        width = self.table_width(arrays)
        arrays["start_pos"] = np.concatenate((arrays.pop("decode_start_pos"), arrays.pop("prefill_start_pos")))
        arrays["cu_seqlens"] = np.concatenate(
            (np.arange(num_decode, dtype=np.int32), arrays["cu_seqlens_q"] + np.int32(num_decode))
        )
        arrays |= self.prepare_sample(batch, rows, arrays)
        arrays["turn"] = np.array([self._turn], np.int32)
        t = self.staging.send(arrays | more)
        self.rows.apply(t)

        num_tokens = num_decode + t["input_ids"].shape[0]
        input_ids, positions, slots = (x[:num_tokens] for x in (self.input_ids, self.positions, self.slots))
        if num_decode:
            torch.index_select(self.rows.last_token_ids, 0, t["rows"][:num_decode], out=input_ids[:num_decode])
        if batch.chunks:
            input_ids[num_decode:] = t["input_ids"]
        block_tables = self.prepare_block_tables(t["rows"], width)
        if num_decode:  # after the block tables: decode attention reads them while the kernel before it runs
            ops.decode_plan(self.plan, t["decode_context_lens"], self.model_config.num_kv_heads, self.block_size)
        ops.slot_mapping(positions, slots, block_tables, t["cu_seqlens"], t["start_pos"], self.block_size)
        has_prefix = any(c.start > 0 for c in batch.chunks)
        context = Context(
            slot_mapping=slots,
            num_decode=num_decode,
            decode_block_tables=block_tables[:num_decode],
            decode_context_lens=t["decode_context_lens"],
            plan=self.plan,
            workspace=self.workspace,
            cu_seqlens_q=t["cu_seqlens_q"],
            cu_seqlens_k=t["cu_seqlens_k"],
            context_lens=t["context_lens"],
            block_tables=block_tables[num_decode:] if has_prefix else None,
            max_seqlen_q=max((c.end - c.start for c in batch.chunks), default=0),
        )
        logits = self.run_model(input_ids, positions, context, t["logits_indices"])
        if batch.num_sampled:
            token_ids = torch.empty(batch.num_sampled, dtype=torch.int64, device=self.device)
            params = {name: tensor[t["sampled_rows"]] for name, tensor in self.rows.params.items()}
            self.sample(token_ids, logits, params, t["sample_positions"], t["turn"])
            self.rows.last_token_ids.index_copy_(0, t["sampled_rows"], token_ids)
        return logits, t

    def _handle(self, index: np.ndarray | slice, logprobs: Logprobs | None) -> StepHandle:
        """Of the step that was just enqueued."""
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True) if self.times_steps else self._events[self._turn]
            event.record()
        return StepHandle(self._host_results[self._turn].numpy(), index, event, logprobs)

    def collect(self, handle: StepHandle) -> tuple[list[int], dict[int, dict[int, Logprob]]]:
        """Waits for a step: its token ids, and logprobs by index among them for the rows that want any."""
        if handle.event is not None:
            handle.event.synchronize()
        return handle.token_ids[handle.index].tolist(), handle.logprobs.to_dicts() if handle.logprobs else {}

    def run_model(
        self, input_ids: Tensor, positions: Tensor, context: Context, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Logits [len(logits_indices), vocab] of the tokens at logits_indices (None: of all)."""
        with torch.inference_mode(), set_context(context):
            hidden = self.model(input_ids, positions)
            return self.model.compute_logits(hidden if logits_indices is None else hidden[logits_indices])

    def sample(
        self, token_ids: Tensor, logits: Tensor, params: dict[str, Tensor], positions: Tensor, turn: Tensor | None
    ) -> None:
        """ops.sample with the parameters of some rows, on rank 0, whose tokens the other ranks get. On rank 0 they go
        to results[turn] too, unless turn is None."""
        if self.group.rank == 0:
            p = [params[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds")]
            results = None if turn is None else self.results[:, : len(token_ids)]
            ops.sample(token_ids, logits, *p, positions, results, turn)
        self.group.broadcast(token_ids)

    def check_health(self) -> None:
        """One rank alone is well while its steps do not raise."""

    def close(self) -> None:
        """Drops the graphs, which may hold the group's collectives: no step may follow."""
        self.graphs = []

    # Host arrays of a step

    def prepare_decode(self, ends: Seq[int]) -> Arrays:
        """Of each decoding sequence: context length [B], and position [B] of its one token."""
        context_lens = np.array(ends, np.int32)
        return {"decode_context_lens": context_lens, "decode_start_pos": context_lens - 1}

    def prepare_prefill(self, chunks: Seq[Chunk]) -> Arrays:
        """Packed prompt tokens and their borders.

        input_ids [T]; cu_seqlens_q [P+1]: chunk i is rows cu_seqlens_q[i] .. cu_seqlens_q[i+1]-1; cu_seqlens_k [P+1]:
        the same for the contexts that the chunks attend to, which end with them; context_lens, prefill_start_pos [P].
        """
        input_ids: list[int] = []
        for c in chunks:
            input_ids += c.seq.token_ids[c.start : c.end]
        starts = np.array([c.start for c in chunks], np.int32)
        ends = np.array([c.end for c in chunks], np.int32)
        cu_seqlens = np.zeros((2, len(chunks) + 1), np.int32)
        np.cumsum(ends - starts, out=cu_seqlens[0, 1:])
        np.cumsum(ends, out=cu_seqlens[1, 1:])
        return {
            "input_ids": np.array(input_ids, np.int64),
            "cu_seqlens_q": cu_seqlens[0],
            "cu_seqlens_k": cu_seqlens[1],
            "context_lens": ends,
            "prefill_start_pos": starts,
        }

    def table_width(self, arrays: Arrays) -> int:
        """Blocks of the step's longest context."""
        longest = max(arrays["decode_context_lens"].max(initial=1), arrays["context_lens"].max(initial=1))
        return -(-int(longest) // self.block_size)

    def prepare_block_tables(self, rows: Tensor, width: int) -> Tensor:
        """[len(rows), width] int32 block tables of some rows; entries past a context are stale or -1."""
        return self.rows.block_tables[:, :width].index_select(0, rows)

    def prepare_sample(self, batch: Batch, rows: np.ndarray, arrays: Arrays) -> Arrays:
        """Which rows get a token, where their logits are, and the index of that token in its sequence."""
        num_decode = len(batch.decodes)
        lasts = [i for i, c in enumerate(batch.chunks) if c.is_last]
        sampled_rows = np.concatenate((rows[:num_decode], rows[num_decode:][lasts]))
        ends = np.concatenate((arrays["decode_context_lens"], arrays["context_lens"][lasts]))
        logits_indices = np.concatenate(
            (
                np.arange(num_decode, dtype=np.int64),
                num_decode + arrays["cu_seqlens_q"][1:][lasts].astype(np.int64) - 1,
            )
        )
        return {
            "rows": rows,
            "sampled_rows": sampled_rows,
            "logits_indices": logits_indices,
            "sample_positions": ends.astype(np.int64),
        }

    # Rows whose logits need the host

    def _special(self, batch: Batch) -> list[int]:
        """Which of batch.sampled have logits that the host has to see: RowTable.is_special."""
        return [i for i, seq in enumerate(batch.sampled) if self.rows.is_special[seq.row]]

    def _prepare_special(self, batch: Batch, special: list[int], places: np.ndarray | None) -> Arrays:
        """Of those: where their token ids and logits will be, their rows, and the index of the token to come."""
        ends = batch.decode_ends + [c.end for c in batch.chunks if c.is_last]
        index = np.array(special, np.int64)
        return {
            "special_places": index if places is None else places[index],
            "special_rows": np.array([batch.sampled[i].row for i in special], np.int64),
            "special_positions": np.array([ends[i] for i in special], np.int64),
        }

    def _sample_special(
        self, batch: Batch, special: list[int], sent: dict[str, Tensor], logits: Tensor
    ) -> Logprobs | None:
        """Samples them again from their processed logits, and puts that in the place of what the step gave them.

        Rank 0 alone has logits, and sequences to process them by; the others get its tokens.
        """
        places, rows = sent["special_places"], sent["special_rows"]
        raw = logits.index_select(0, places)
        processed = raw.to(torch.float32, copy=True)
        seqs = [batch.sampled[i] for i in special] if self.group.rank == 0 else []
        for row, seq in zip(processed, seqs):
            process_row(row, seq, len(seq) - 1 - seq.num_prompt_tokens)
        params = {name: tensor.index_select(0, rows) for name, tensor in self.rows.params.items()}
        again = torch.empty(len(special), dtype=torch.int64, device=self.device)
        self.sample(again, processed, params, sent["special_positions"], None)
        self.results[self._turn].index_copy_(0, places, again)
        self.rows.last_token_ids.index_copy_(0, rows, again)
        wanted = [i for i, seq in enumerate(seqs) if seq.params.logprobs is not None]
        if not wanted:
            return None
        counts = [seqs[i].params.logprobs or 0 for i in wanted]
        return Logprobs.of(raw[wanted], again[wanted], [special[i] for i in wanted], counts)
