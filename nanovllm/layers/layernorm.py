import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.layers.layer import Layer
from nanovllm.layers.parameter import make_parameter
from nanovllm.parallel.group import current_group


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = current_group()
        self.eps = eps
        self.weight = make_parameter((hidden_size,), dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or with a residual stream (norm(residual + x), residual + x).

        x [num_tokens, hidden] is left as it is; residual, of the same shape, becomes the sum in place. With several
        ranks and a residual, x is this rank's part of a sum over them, and may be overwritten.
        """
        out = torch.empty_like(x)
        if residual is None:
            ops.rms_norm(out, x, self.weight, self.eps)
            return out
        self.group.add_rms_norm(out, residual, x, self.weight, self.eps)
        return out, residual
