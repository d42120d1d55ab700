"""Tiny random checkpoints, made by transformers, of every supported architecture."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MODEL_TYPES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
ARCHITECTURES = list(MODEL_TYPES)
_DEFAULTS = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": torch.float32,
    "initializer_range": 0.2,  # wide, so that greedy tokens vary and near ties are rare
}


def tiny_config(architecture: str, **overrides: Any) -> Any:
    """A transformers config of `architecture`; overrides are its fields."""
    fields = _DEFAULTS | {"architectures": [architecture]} | overrides
    return AutoConfig.for_model(MODEL_TYPES[architecture], **fields)


def tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random transformers model in fp32. Norm weights and biases are random too, so that none can be
    ignored."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **overrides)).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".bias"):
                param.normal_(std=0.5)
            elif param.dim() == 1:
                param.uniform_(0.5, 1.5)
    return model


def save_tiny(path: Path, architecture: str, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any) -> Path:
    """Write such a model to `path` as config.json and safetensors; returns `path`."""
    tiny_model(architecture, seed, **overrides).save_pretrained(path, max_shard_size=max_shard_size)
    return path
