"""CUDA graphs of whole decode steps: from the rows' last tokens to their next ones in one launch."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.batch import Batch
from nanovllm.engine.context import Context

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


def batch_buckets(max_rows: int) -> list[int]:
    """Batch sizes with a graph: fine where a step is short, and max_rows itself; each 1..max_rows fits into one."""
    steps = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, 512, 64), *range(512, max_rows, 128)]
    return [b for b in steps if b < max_rows] + [max_rows]


class DecodeGraphs:
    """One graph a bucket; a graph of B covers rows 0..B-1 of the row table.

    A step sends, for each row, its context length (0: the row does not decode, it writes nothing and keeps its last
    token); all else is on the device already. The graphs read and write fixed buffers, share one memory pool, and are
    captured largest first.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        rows, device = runner.config.max_running, runner.device
        self.buckets = batch_buckets(rows)
        self._context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._start_pos = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._sample_positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, buckets: list[int] | None = None) -> None:
        """Captures the graphs of `buckets` (default: all)."""
        for size in sorted(buckets or self.buckets, reverse=True):
            with torch.inference_mode():
                self._step(size)  # once eagerly: kernels load, cuBLAS picks its algorithms
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._step(size)
            self._graphs[size] = graph

    def _step(self, size: int) -> None:
        r = self._runner
        lens, tables, last = self._context_lens[:size], r.rows.block_tables[:size], r.rows.last_token_ids[:size]
        positions, slots = r.positions[:size], r.slots[:size]
        ops.slot_mapping(positions, slots, tables, self._cu_seqlens[: size + 1], self._start_pos[:size], r.block_size)
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
        logits = r.run_model(last, positions, context)
        sampled = self._sampled[:size]
        r.sample(sampled, logits, {n: t[:size] for n, t in r.rows.params.items()}, self._sample_positions[:size])
        torch.where(lens > 0, sampled, last, out=last)

    def bucket(self, batch: Batch) -> int | None:
        """The graph that can run this batch: decodes only, none that needs the host, rows that fit."""
        if batch.chunks or not batch.decodes:
            return None
        rows = [seq.row for seq in batch.decodes]
        if self._runner.rows.is_special[rows].any():
            return None
        i = bisect_left(self.buckets, max(rows) + 1)
        size = self.buckets[i] if i < len(self.buckets) else None
        return size if size in self._graphs else None

    def launch(self, batch: Batch, size: int) -> tuple[Tensor, np.ndarray]:
        """Replays the step; token ids [size] by row, and the rows of batch.decodes."""
        r = self._runner
        rows = np.fromiter((seq.row for seq in batch.decodes), np.int64, len(batch.decodes))
        lens = np.zeros(size, np.int32)
        lens[rows] = batch.decode_ends
        sent = r.staging.send(r.rows.changes(batch.decodes) | {"lens": lens})
        r.rows.apply(sent)
        self._context_lens[:size] = sent["lens"]
        torch.sub(sent["lens"], 1, out=self._start_pos[:size])
        self._sample_positions[:size] = sent["lens"]
        self._graphs[size].replay()
        return self._sampled[:size], rows
