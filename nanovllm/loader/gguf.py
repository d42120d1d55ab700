"""GGUF models by their Hugging Face names: config, end-of-sequence ids, and dequantised tensors.

The metadata keys and tensor names are those that llama.cpp's convert_hf_to_gguf.py writes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from nanovllm.layers.parameter import PackedWeight
from nanovllm.loader.gguf_file import GgufFile, GgufTensor
from nanovllm.loader.readable import readable
from nanovllm.parallel.shards import Slice

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QUANTS = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
)
_PACKED_QUANTS = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_FREQS = "rope_freqs.weight"  # Llama 3's scaling, as a divisor of each frequency
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CHUNK = 1 << 22  # elements dequantised at once: temporaries stay in tens of megabytes


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays as it is."""
    module, _, leaf = name.rpartition(".")
    if module.startswith("blk.") and module.count(".") >= 2:
        _, layer, module = module.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_MODULES[module]}.{leaf}" if module in _LAYER_MODULES else name
    return f"{_MODULES[module]}.{leaf}" if module in _MODULES else name


class GgufCheckpoint:
    """One GGUF file as nanovllm.loader.weights.Checkpoint.

    Raises:
        ValueError: the file does not parse, its architecture or a tensor's type is not supported, or a
            metadata key is missing; the text names it.
    """

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.architecture = self.file.metadata.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{path}: general.architecture: expected one of {', '.join(_ARCHITECTURES)}, got {self.architecture}"
            )
        for name, tensor in self.file.tensors.items():
            if tensor.quant not in _QUANTS:
                supported = ", ".join(quant.name for quant in _QUANTS)
                raise ValueError(f"{path}: {name}: expected one of the types {supported}, got {tensor.quant.name}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {_hf_name(name): tensor.shape for name, tensor in self._weights()}

    def tensors(self, dtype: torch.dtype, parts: Mapping[str, Slice] | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights():
            hf_name = _hf_name(name)
            if parts is None:
                yield hf_name, self._dequantized(name, tensor, dtype)
            elif hf_name in parts:
                yield hf_name, self._dequantized(name, tensor, dtype, parts[hf_name])

    def packed(self, parts: Mapping[str, Slice]) -> PackedWeight | None:
        """The blocks of parts of some matrices, stacked along their rows, as they are in the file; None unless all are
        of one type that ops.skinny_linear_gguf reads, and no part ends inside a block or has padding."""
        by_name = {_hf_name(name): (name, tensor) for name, tensor in self._weights()}
        quants = {by_name[name][1].quant for name in parts}
        if len(quants) > 1 or not quants <= set(_PACKED_QUANTS):
            return None
        quant = quants.pop()
        size, size_bytes = GGML_QUANT_SIZES[quant]
        blocks = []
        for hf_name, part in parts.items():
            unit, unit_bytes = (1, 1) if part.dim == 0 else (size, size_bytes)
            if part.count != part.size or part.first % unit or part.size % unit:
                return None
            name, tensor = by_name[hf_name]
            raw = np.fromfile(self.file.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
            rows = self._unpermuted(name, torch.from_numpy(raw).view(tensor.shape[0], -1))
            first, count = part.first // unit * unit_bytes, part.size // unit * unit_bytes
            blocks.append(rows.narrow(part.dim, first, count).contiguous())
        return PackedWeight(torch.cat(blocks), int(quant))

    def _weights(self) -> Iterator[tuple[str, GgufTensor]]:
        return ((name, tensor) for name, tensor in self.file.tensors.items() if name != _ROPE_FREQS)

    def _dequantized(self, name: str, tensor: GgufTensor, dtype: torch.dtype, part: Slice | None = None) -> Tensor:
        """The part of a tensor (None: all), read and converted a few rows at a time."""
        *_, columns = tensor.shape
        block, block_bytes = GGML_QUANT_SIZES[tensor.quant]
        row_bytes = columns // block * block_bytes
        rows = tensor.num_bytes // row_bytes
        out = torch.empty(rows, columns, dtype=dtype, device="cpu")
        step = max(1, _CHUNK // columns)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            offset = tensor.offset + first * row_bytes
            raw = np.fromfile(self.file.path, np.uint8, count * row_bytes, offset=offset).reshape(count, row_bytes)
            out[first : first + count] = torch.from_numpy(dequantize(raw, tensor.quant))
        whole = self._unpermuted(name, out.view(tensor.shape))
        return whole if part is None else whole.narrow(part.dim, part.start, part.count)

    def _unpermuted(self, name: str, tensor: Tensor) -> Tensor:
        """llama.cpp pairs neighbours in the rotary embedding and stores llama's q and k rows in that order;
        undo it."""
        is_query = ".attn_q." in name
        if self.architecture != "llama" or not (is_query or ".attn_k." in name):
            return tensor
        heads = self._count("attention.head_count" if is_query else "attention.head_count_kv")
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)

    def _count(self, key: str, *default: int) -> int:
        value = self._get(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            key = f"{self.architecture}.{key}"
            raise ValueError(f"{self.file.path}: {key}: expected an integer above 0, got {value!r}")
        return value

    def _get(self, key: str, *default: Any) -> Any:
        """The metadata value of <architecture>.<key>."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", *default)
        if value is None and not default:
            raise ValueError(f"{self.file.path}: expected the metadata key {self.architecture}.{key}, got none")
        return value

    def hf_config(self) -> Any:
        """The transformers config that this model would have had.

        Raises:
            NotImplementedError: mixture of experts or a rotary scaling that is not supported, by name.
        """
        if self._get("expert_count", 0):
            raise NotImplementedError(f"{self.file.path}: {self.architecture}.expert_count: mixtures are not supported")
        from transformers import AutoConfig  # not above: worker processes read weights only

        tensors, metadata = self.file.tensors, self.file.metadata
        hidden_size, num_heads = self._count("embedding_length"), self._count("attention.head_count")
        head_dim = self._count("attention.key_length", hidden_size // num_heads)
        if "token_embd.weight" not in tensors:
            raise ValueError(f"{self.file.path}: expected the tensor token_embd.weight, got none")
        fields = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "num_hidden_layers": self._count("block_count"),
            "hidden_size": hidden_size,
            "intermediate_size": self._count("feed_forward_length"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._count("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._get("rope.freq_base", 10000.0),  # the default of the format
            "rope_scaling": self._rope_scaling(),
            "partial_rotary_factor": self._count("rope.dimension_count", head_dim) / head_dim,
            "attention_bias": self.architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            "sliding_window": self._get("attention.sliding_window", 0) or None,
            "use_sliding_window": bool(self._get("attention.sliding_window", 0)),
            "dtype": _PLAIN_DTYPES.get(tensors["token_embd.weight"].quant.name, "float32"),  # of quantised blocks
        }

        with readable(self.file.path):
            config = AutoConfig.for_model(self.architecture, **fields)
        if _ROPE_FREQS in tensors:
            divisors = self._dequantized(_ROPE_FREQS, tensors[_ROPE_FREQS], torch.float32)
            config.rope_freq_divisors = divisors.tolist()
        return config

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise NotImplementedError(
                f"{self.file.path}: {self.architecture}.rope.scaling.type: expected none, linear or yarn, got {kind}"
            )
        if self._get("rope.scaling.attn_factor", 1.0) != 1.0:
            raise NotImplementedError(
                f"{self.file.path}: {self.architecture}.rope.scaling.attn_factor is not supported"
            )
        scaling = {"rope_type": kind, "factor": self._get("rope.scaling.factor")}
        original = self._get("rope.scaling.original_context_length", None)
        return scaling if original is None else scaling | {"original_max_position_embeddings": original}

    def eos_token_ids(self) -> list[int]:
        """Ids that end a text or a turn, without duplicates."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = (self.file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
        return list(dict.fromkeys(token for token in ids if token is not None))
