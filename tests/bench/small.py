"""A model small enough to measure in a test, by its config alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.bench.hf_configs import HF_CONFIGS, config_folder

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_small_config(folder: Path) -> Path:
    path = folder / "small.json"
    path.write_text(json.dumps(HF_CONFIGS["qwen3-0.6b"] | SMALL))
    return path


@pytest.fixture
def small_llm(tmp_path: Path) -> Iterator[LLM]:
    options = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_model_len": 256}
    with config_folder(str(write_small_config(tmp_path))) as model, LLM(model, **options) as llm:
        yield llm
