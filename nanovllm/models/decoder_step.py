"""The fused decode step of a dense decoder, for the few rows that ops.decoder_step takes."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer
from nanovllm.ops.decoder_step import HEAD_DIMS, MAX_GROUP, MAX_LAYERS, POINTERS

_HOPPER = 9  # compute capability
MAX_FUSED_ROWS = 8
MAX_FUSED_ROWS_OF_LARGE, _LARGE_HIDDEN = 4, 3072
"""Of models of more hidden elements than the second."""
MAX_FUSED_TOKENS = 16384
"""Of the rows' contexts together. Beyond these, the layers' operators are about as fast, at 8 rows faster:
docs/kernels/decoder_step.md."""


def supports(config: ModelConfig, device: torch.device) -> bool:
    """Whether `DecoderStep` can run a model of this shape on this device; the layers run what it cannot."""
    return (
        device.type == "cuda"
        and ops.has_cuda_kernel("decoder_step")
        and torch.cuda.get_device_capability(device)[0] == _HOPPER
        and config.dtype == torch.bfloat16
        and config.head_dim in HEAD_DIMS
        and config.num_q_heads % config.num_kv_heads == 0
        and config.num_q_heads // config.num_kv_heads <= MAX_GROUP
        and config.hidden_size <= _max_hidden(config, device)
        and config.hidden_size % 8 == 0
        and config.intermediate_size % 8 == 0
        and 2 <= config.num_layers <= MAX_LAYERS
    )


def _max_hidden(c: ModelConfig, device: torch.device) -> int:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    heads = c.num_q_heads, c.num_kv_heads, c.head_dim
    return ops.decoder_step_max_hidden(c.intermediate_size, *heads, c.vocab_size, num_sms)


def max_fused_rows(config: ModelConfig) -> int:
    """Up to so many rows the fused step is the faster one for a model of this shape."""
    return MAX_FUSED_ROWS if config.hidden_size <= _LARGE_HIDDEN else MAX_FUSED_ROWS_OF_LARGE


class DecoderStep:
    """Logits of up to ops.decoder_step's 8 decode rows of one model, in one launch.

    Holds the addresses of the model's weights: it is made once they are where they stay.

    Args:
        model: of a shape that `supports` accepts, on its device.
    """

    def __init__(self, model: DecoderForCausalLM) -> None:
        self._model, c = model, model.config
        self._layers = torch.tensor([_pointers(layer) for layer in model.model.layers], dtype=torch.int64)
        weight = model.lm_head.weight
        self._layers = self._layers.to(weight.device)
        shape = (c.hidden_size, c.intermediate_size, c.num_q_heads, c.num_kv_heads, c.head_dim)
        numel = ops.decoder_step_workspace_numel(*shape, weight.device)
        self._workspace = torch.full((numel,), -1, dtype=torch.int32, device=weight.device)

    def __call__(self, token_ids: Tensor, block_tables: Tensor, context_lens: Tensor, kv_cache: Tensor) -> Tensor:
        """Logits [rows, vocab_size] bfloat16; arguments as in ops.decoder_step."""
        model, c = self._model, self._model.config
        logits = torch.empty(len(token_ids), c.vocab_size, dtype=c.dtype, device=token_ids.device)
        ops.decoder_step(
            logits,
            self._workspace,
            kv_cache,
            token_ids,
            block_tables,
            context_lens,
            self._layers,
            model.model.embed_tokens.weight,
            model.model.norm.weight,
            model.lm_head.weight,
            model.model.layers[0].self_attn.attn.rotary_emb.cos_sin,
            c.num_q_heads,
            c.intermediate_size,
            c.rms_norm_eps,
        )
        return logits


def _pointers(layer: DecoderLayer) -> list[int]:
    attention, mlp = layer.self_attn, layer.mlp
    tensors = {
        "input_norm": layer.input_layernorm.weight,
        "qkv": attention.qkv_proj.weight,
        "qkv_bias": attention.qkv_proj.bias,
        "o": attention.o_proj.weight,
        "o_bias": attention.o_proj.bias,
        "post_norm": layer.post_attention_layernorm.weight,
        "gate_up": mlp.gate_up_proj.weight,
        "gate_up_bias": mlp.gate_up_proj.bias,
        "down": mlp.down_proj.weight,
        "down_bias": mlp.down_proj.bias,
    }
    if attention.qk_norm:
        tensors |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
    return [0 if tensors.get(name) is None else tensors[name].data_ptr() for name in POINTERS]
