"""The rotary table against transformers, near 0 and at positions where a last bit of the frequency shows."""

import dataclasses

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.layers.rotary import RotaryEmbedding, cos_sin_table
from nanovllm.models.config import ModelConfig
from tests.tiny import tiny_config

SCALINGS = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
]


def table_of(inv_freq: torch.Tensor, attention_factor: float, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None].float() * inv_freq[None, :].float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


@pytest.mark.parametrize("theta", [10000.0, 5e5, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(f"{v}" for v in s.values()))
def test_table_equals_transformers(scaling, theta):
    hf_config = tiny_config(
        "LlamaForCausalLM",
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=theta,
        rope_scaling=scaling,
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf_config, torch.device("cpu"))
    config = ModelConfig.from_hf(hf_config)
    positions = torch.cat((torch.arange(0, 200), torch.arange(131072 - 200, 131072)))
    ours = cos_sin_table(config)[positions]
    torch.testing.assert_close(ours, table_of(inv_freq, attention_factor, positions), atol=1e-5, rtol=0)


def test_default_table_equals_transformers():
    config = ModelConfig.from_hf(tiny_config("LlamaForCausalLM", head_dim=128, max_position_embeddings=131072))
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, 128, 2, dtype=torch.int64).float() / 128))
    positions = torch.cat((torch.arange(0, 200), torch.arange(131072 - 200, 131072)))
    expected = table_of(inv_freq, 1.0, positions)
    torch.testing.assert_close(cos_sin_table(config)[positions], expected, atol=1e-5, rtol=0)


def test_divisors_divide_each_frequency():
    hf_config = tiny_config("LlamaForCausalLM", head_dim=8)
    plain = ModelConfig.from_hf(hf_config)
    hf_config.rope_freq_divisors = [1.0, 2.0, 4.0, 8.0]
    divided = cos_sin_table(ModelConfig.from_hf(hf_config))
    expected = torch.stack([cos_sin_table(plain)[8 // d :: 8 // d][:10, i] for i, d in enumerate((1, 2, 4, 8))])
    torch.testing.assert_close(divided[8:88:8, :4].T, expected, atol=1e-5, rtol=0)


def test_shorter_table_is_a_prefix():
    hf_config = tiny_config("LlamaForCausalLM", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    config = ModelConfig.from_hf(hf_config)
    short = dataclasses.replace(config, max_position_embeddings=100)
    assert torch.equal(cos_sin_table(short), cos_sin_table(config)[:100])


def test_module_holds_the_table_and_saves_nothing():
    config = ModelConfig.from_hf(tiny_config("LlamaForCausalLM"))
    rotary_emb = RotaryEmbedding(config)
    assert rotary_emb.cos_sin.shape == (512, 64) and rotary_emb.cos_sin.dtype == torch.float32
    assert not rotary_emb.state_dict()
