import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.layers.layer import Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import linear
from nanovllm.layers.parameter import PackedWeight, make_parameter
from nanovllm.parallel.group import current_group
from nanovllm.parallel.shards import even_slice


def _vocab_parameter(vocab_size: int, hidden_size: int, dtype: torch.dtype) -> nn.Parameter:
    """This rank's share of the vocabulary's rows, padded with zeros to the same size on every rank."""
    group = current_group()
    part = even_slice(vocab_size, group.rank, group.size)
    return make_parameter((part.size, hidden_size), dtype, {None: part})


class VocabParallelEmbedding(Layer):
    """Token ids -> rows of weight [vocab_size, hidden], of which each rank has a share."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _vocab_parameter(vocab_size, hidden_size, dtype)
        self.group = current_group()

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        part = self.weight.shards[None]
        local = input_ids - part.first
        is_elsewhere = (local < 0) | (local >= part.size)
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere[..., None], 0))

    def forward_and_norm(self, input_ids: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The rows of token ids [T], and their norm."""
        if self.group.size > 1:
            rows = self(input_ids)
            return rows, norm(rows)
        rows = self.weight.new_empty(len(input_ids), self.weight.shape[1])
        normed = torch.empty_like(rows)
        ops.embed_rms_norm(normed, rows, input_ids, self.weight, norm.weight, norm.eps)
        return rows, normed


class ParallelLMHead(Layer):
    """Hidden states [rows, hidden] -> logits [rows, vocab_size], by the weight of `tied_to` or one of its own.

    Each rank computes its share of the vocabulary. Rank 0 gets all of them, without the padding at the end of the
    vocabulary; what the others get means nothing. The loader may set `packed`, the quantised form of weight: a decode
    step then reads that.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, tied_to: VocabParallelEmbedding | None
    ) -> None:
        super().__init__()
        self.weight = _vocab_parameter(vocab_size, hidden_size, dtype) if tied_to is None else tied_to.weight
        self.packed: PackedWeight | None = None
        self.workspace: Tensor | None = None
        self.group, self.vocab_size = current_group(), vocab_size

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = linear(hidden_states, self.weight, None, self.packed, self.workspace)
        if self.group.size == 1:
            return logits
        return self.group.gather(logits)[:, : self.vocab_size].contiguous()  # a copy only where there is padding
