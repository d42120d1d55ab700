from torch import Tensor

from nanovllm import ops
from nanovllm.layers.layer import Layer


class SiluAndMul(Layer):
    """[num_tokens, 2 * size], gate beside up -> silu(gate) * up [num_tokens, size]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        ops.silu_and_mul(out, gate_up)
        return out
