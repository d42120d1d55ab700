import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.layer import Layer
from nanovllm.layers.linear import linear
from nanovllm.layers.parameter import PackedWeight, make_parameter


class VocabParallelEmbedding(Layer):
    """Token ids -> rows of weight [vocab_size, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = make_parameter((vocab_size, hidden_size), dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class ParallelLMHead(Layer):
    """Hidden states [rows, hidden] -> logits [rows, vocab_size], by the weight of `tied_to` or one of its own.

    The loader may set `packed`, the quantised form of weight: a decode step then reads that.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, tied_to: VocabParallelEmbedding | None
    ) -> None:
        super().__init__()
        self.weight = make_parameter((vocab_size, hidden_size), dtype) if tied_to is None else tied_to.weight
        self.packed: PackedWeight | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return linear(hidden_states, self.weight, packed=self.packed)
