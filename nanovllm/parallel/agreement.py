"""check_agreement: after every step, ranks compare what must be the same on all of them."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from nanovllm.engine.batch import Batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step_graphs import DecodeGraphs

_WHAT = ("block tables", "positions", "sampled token ids")


class AgreementError(RuntimeError):
    """Two ranks have different states: a bug, found before it becomes wrong text."""


def report_step(runner: ModelRunner, batch: Batch, step: int) -> None:
    """Compares the launched step between the ranks; waits for it. All ranks call this with the same batch.

    Raises:
        AgreementError: on rank 0, with the ranks and what differs.
    """
    digests = torch.tensor([_digests(runner, batch)], dtype=torch.int64, device=runner.device)
    columns = runner.group.gather(digests)
    if runner.group.rank != 0:
        return
    by_rank = columns.view(runner.group.size, len(_WHAT)).tolist()
    for rank, other in enumerate(by_rank):
        wrong = [what for what, mine, theirs in zip(_WHAT, by_rank[0], other) if mine != theirs]
        if wrong:
            raise AgreementError(f"rank {rank} does not agree with rank 0 in step {step}: {', '.join(wrong)} differ")


def _digests(runner: ModelRunner, batch: Batch) -> list[int]:
    """A 63-bit hash of each thing in _WHAT."""
    seqs = batch.decodes + [c.seq for c in batch.chunks]
    rows = [s.row for s in seqs]
    tables = runner.rows.block_tables[rows].cpu().numpy()
    used = np.concatenate([table[: len(s.block_table)] for table, s in zip(tables, seqs)])
    graphs, bucket = runner.find_graph(batch, np.array(rows))
    is_decode = isinstance(graphs, DecodeGraphs)
    positions = graphs.positions(bucket)[rows] if is_decode else runner.positions[: batch.num_tokens]
    last = runner.rows.last_token_ids[[s.row for s in batch.sampled]]
    arrays = (used, positions.cpu().numpy(), last.cpu().numpy())
    return [xxhash.xxh3_64_intdigest(np.ascontiguousarray(a).tobytes()) >> 1 for a in arrays]
