"""Runs a model over a paged cache, with the batch metadata written out by hand for each step."""

import random
from collections.abc import Iterable

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.context import Context, set_context
from nanovllm.layers.attention import Attention
from nanovllm.models.decoder import DecoderForCausalLM

Step = tuple[int, list[int]]  # a sequence's number, and the tokens to compute next


class PagedModel:
    """Sequences get their blocks in shuffled order; whatever was not written is NaN."""

    def __init__(self, model: DecoderForCausalLM, block_size: int, num_blocks: int = 64, seed: int = 0) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        self.free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=config.dtype)
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        for layer, attention in enumerate(layers):
            attention.k_cache, attention.v_cache = self.cache[:, layer]
        self.plan = torch.empty(ops.decode_plan_numel(8, "cpu"), dtype=torch.int32)
        heads = config.num_q_heads, config.num_kv_heads, config.head_dim
        self.workspace = torch.empty(ops.decode_workspace_numel(8, num_blocks * block_size, *heads, "cpu"))

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Let `child` begin with the parent's first tokens, a multiple of the block size, from the same blocks."""
        self.tables[child] = self.tables[parent][: num_tokens // self.block_size]
        self.lengths[child] = num_tokens

    def step(self, decodes: Iterable[Step] = (), prefills: Iterable[Step] = ()) -> Tensor:
        """Logits [T, vocab] of every row: first the one-token decodes, then the prefill chunks."""
        decodes, prefills = list(decodes), list(prefills)
        starts = [self._extend(seq, len(tokens)) for seq, tokens in decodes + prefills]
        rows = [
            (seq, start + i) for (seq, tokens), start in zip(decodes + prefills, starts) for i in range(len(tokens))
        ]
        chunks = torch.tensor([len(tokens) for _, tokens in prefills], dtype=torch.int32)
        context_lens = self._context_lens(prefills)
        has_cached = any(starts[len(decodes) :])
        context = Context(
            slot_mapping=torch.tensor([self._slot(seq, position) for seq, position in rows]),
            num_decode=len(decodes),
            decode_block_tables=self._block_tables(decodes),
            decode_context_lens=self._context_lens(decodes),
            plan=self.plan,
            workspace=self.workspace,
            cu_seqlens_q=_cumulated(chunks),
            cu_seqlens_k=_cumulated(context_lens),
            context_lens=context_lens,
            block_tables=self._block_tables(prefills) if has_cached else None,
            max_seqlen_q=max(chunks.tolist(), default=0),
        )
        if decodes:
            num_kv_heads = self.model.config.num_kv_heads
            ops.decode_plan(self.plan, context.decode_context_lens, num_kv_heads, self.block_size)
        input_ids = torch.tensor([token for _, tokens in decodes + prefills for token in tokens])
        with set_context(context):
            hidden_states = self.model(input_ids, torch.tensor([position for _, position in rows]))
            return self.model.compute_logits(hidden_states)

    def _extend(self, seq: int, count: int) -> int:
        """Take blocks for `count` more tokens; returns the position of the first."""
        start = self.lengths.get(seq, 0)
        table = self.tables.setdefault(seq, [])
        self.lengths[seq] = start + count
        while len(table) * self.block_size < start + count:
            table.append(self.free.pop())
        return start

    def _slot(self, seq: int, position: int) -> int:
        return self.tables[seq][position // self.block_size] * self.block_size + position % self.block_size

    def _block_tables(self, steps: list[Step]) -> Tensor:
        """[len(steps), M] int32, padded with -1."""
        width = max((len(self.tables[seq]) for seq, _ in steps), default=0) + 1
        rows = [self.tables[seq] + [-1] * (width - len(self.tables[seq])) for seq, _ in steps]
        return torch.tensor(rows, dtype=torch.int32).view(len(steps), width)

    def _context_lens(self, steps: list[Step]) -> Tensor:
        return torch.tensor([self.lengths[seq] for seq, _ in steps], dtype=torch.int32)


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
