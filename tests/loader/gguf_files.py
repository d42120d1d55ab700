"""Writes GGUF files as llama.cpp's converter does, and dequantises blocks one by one as ggml's C code does."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, leaf = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{MODULES[module]}.{leaf}"
    return f"{MODULES[module]}.{leaf}"


def permuted(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Row h * D + 2i + j of the result is row h * D + j * D / 2 + i: NeoX halves become neighbours."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_model(
    path: Path,
    model: PreTrainedModel,
    quant: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    quants: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a transformers model: matrices in `quant`, vectors in F32. `metadata` maps further keys, without the
    architecture before them, to numbers or strings; `extra` adds F32 tensors; `quants` maps modules ("attn_v") to
    another type than `quant`."""
    config = model.config
    architecture = config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = getattr(config, "rope_parameters", None)  # since transformers 5
    rope_theta = rope["rope_theta"] if rope else config.rope_theta
    writer.add_rope_freq_base(rope_theta)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        array = tensor.numpy()
        for module, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and f".{module}." in name:
                array = permuted(array, heads)
        name = gguf_name(name)
        matrix_quant = (quants or {}).get(name.split(".")[-2], quant)
        add_tensor(writer, name, array, matrix_quant if array.ndim == 2 else GGMLQuantizationType.F32)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    finish(writer)
    return path


def add_tensor(writer: GGUFWriter, name: str, array: np.ndarray, quant: GGMLQuantizationType) -> None:
    writer.add_tensor(name, np.ascontiguousarray(quantize(array, quant)), raw_dtype=quant)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- dequantisation of one block, value by value (ggml-quants.c) ----


def _half(block: bytes, offset: int) -> float:
    return struct.unpack_from("<e", block, offset)[0]


def _q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * q for q in struct.unpack_from("<32b", block, 2)]


def _q4_0(block: bytes) -> list[float]:
    nibbles = [b & 15 for b in block[2:]] + [b >> 4 for b in block[2:]]
    return [_half(block, 0) * (q - 8) for q in nibbles]


def _q4_1(block: bytes) -> list[float]:
    nibbles = [b & 15 for b in block[4:]] + [b >> 4 for b in block[4:]]
    return [_half(block, 0) * q + _half(block, 2) for q in nibbles]


def _q4_k(block: bytes) -> list[float]:
    """Bytes: 0 d, 2 dmin, 4 twelve of 6-bit scales and minima, 16 nibbles."""
    d, dmin, packed, quants = _half(block, 0), _half(block, 2), block[4:16], block[16:]
    values = []
    for sub in range(8):
        if sub < 4:
            scale, minimum = packed[sub] & 63, packed[sub + 4] & 63
        else:
            scale = (packed[sub + 4] & 15) | (packed[sub - 4] >> 6) << 4
            minimum = (packed[sub + 4] >> 4) | (packed[sub] >> 6) << 4
        part = quants[sub // 2 * 32 :][:32]
        nibbles = [b >> 4 if sub % 2 else b & 15 for b in part]
        values += [d * scale * q - dmin * minimum for q in nibbles]
    return values


def _q6_k(block: bytes) -> list[float]:
    """Bytes: 0 low nibbles, 128 high pairs of bits, 192 sixteen int8 scales, 208 d."""
    d, scales = _half(block, 208), struct.unpack_from("<16b", block, 192)
    values = []
    for i in range(256):
        half, quarter, lane = i // 128, i % 128 // 32, i % 32
        low = block[half * 64 + quarter % 2 * 32 + lane]
        low = low >> 4 if quarter >= 2 else low & 15
        high = block[128 + half * 32 + lane] >> 2 * quarter & 3
        values.append(d * scales[i // 16] * ((low | high << 4) - 32))
    return values


_BLOCKS: dict[str, tuple[int, Callable[[bytes], list[float]]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
    "F32": (4, lambda block: [*struct.unpack("<f", block)]),
    "F16": (2, lambda block: [_half(block, 0)]),
    "BF16": (2, lambda block: [*struct.unpack("<f", b"\0\0" + block)]),
}


def block_bytes(quant: GGMLQuantizationType) -> int:
    return _BLOCKS[quant.name][0]


def dequantized(raw: bytes, quant: GGMLQuantizationType) -> np.ndarray:
    """All values of a run of blocks, fp32."""
    size, one = _BLOCKS[quant.name]
    blocks = (raw[i : i + size] for i in range(0, len(raw), size))
    return np.array([value for block in blocks for value in one(block)], np.float32)
