"""Published config.json files of models whose speed people compare, for dummy weights without a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _qwen3(hidden_size: int, intermediate_size: int, layers: int, heads: int, **other: Any) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        **other,
    }


HF_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    },
}


@contextmanager
def config_folder(name: str) -> Iterator[str]:
    """A folder with the config.json of that name, or of the file at that path, to build a dummy model from.

    Raises:
        ValueError: there is neither; the text lists the names.
    """
    if name in HF_CONFIGS:
        text = json.dumps(HF_CONFIGS[name])
    elif Path(name).is_file():
        text = Path(name).read_text()
    else:
        raise ValueError(f"hf_config: expected one of {', '.join(HF_CONFIGS)}, or a config.json, got {name!r}")
    with TemporaryDirectory(prefix="nanovllm-") as folder:
        Path(folder, "config.json").write_text(text)
        yield folder
