"""ModelConfig over the spellings of different transformers versions, and what it refuses."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from nanovllm.layers.rotary import cos_sin_table
from nanovllm.models.config import DEFAULT_DTYPE, ModelConfig
from tests.tiny import ARCHITECTURES, tiny_config


def plain_config(architecture: str = "LlamaForCausalLM", **fields: object) -> SimpleNamespace:
    """A config with only the given rotary and dtype fields, as an older or newer transformers would have it."""
    base = {
        "architectures": [architecture],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    } | fields
    return SimpleNamespace(**{name: value for name, value in base.items() if value != "absent"})


def test_fields():
    config = ModelConfig.from_hf(plain_config(head_dim=32, tie_word_embeddings=True, dtype="float16"))
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 64, 96)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (100, 256, 1e-6)
    assert (config.tie_word_embeddings, config.dtype, config.rotary_dim) == (True, torch.float16, 32)


def test_head_dim_and_kv_heads_default_to_the_query_heads():
    config = ModelConfig.from_hf(plain_config(head_dim=None, num_key_value_heads=None))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": "absent"},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": "absent"},
        {
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "rope_scaling": None,
            "rope_theta": None,
        },
    ],
)
def test_every_spelling_of_no_scaling_gives_the_same_table(fields):
    expected = cos_sin_table(ModelConfig.from_hf(plain_config()))
    assert torch.equal(cos_sin_table(ModelConfig.from_hf(plain_config(**fields))), expected)


def test_theta_is_read_where_transformers_5_moved_it_and_never_guessed():
    moved = plain_config(rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    assert ModelConfig.from_hf(moved).rope_theta == 5e6
    with pytest.raises(ValueError, match=r"rope_theta: expected a number .* got none"):
        ModelConfig.from_hf(plain_config(rope_theta="absent", rope_parameters={"rope_type": "default"}))


def test_config_stays_hashable_with_scaling():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert hash(ModelConfig.from_hf(plain_config(rope_scaling=scaling)))


def test_unknown_rope_type_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"rope_type: expected one of .*, got longrope"):
        ModelConfig.from_hf(plain_config(rope_scaling={"rope_type": "longrope", "factor": 4.0}))


def test_scaling_without_factor_is_refused():
    with pytest.raises(ValueError, match="expected a factor for rope_type linear"):
        ModelConfig.from_hf(plain_config(rope_scaling={"rope_type": "linear"}))


@pytest.mark.parametrize("bad", [-1.0, "2", [2], float("inf"), True])
@pytest.mark.parametrize(
    "kind, name",
    [
        ("linear", "factor"),
        ("llama3", "high_freq_factor"),
        ("llama3", "original_max_position_embeddings"),
        ("yarn", "factor"),
        ("yarn", "beta_fast"),
        ("yarn", "attention_factor"),
        ("yarn", "mscale"),
    ],
)
def test_scaling_takes_numbers_above_zero(kind, name, bad):
    scaling = {"factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0} | {"rope_type": kind, name: bad}
    with pytest.raises(ValueError, match=rf"rope_scaling\.{name}: expected a number above 0, got"):
        ModelConfig.from_hf(plain_config(rope_scaling=scaling))


@pytest.mark.parametrize(
    "fields, error",
    [
        (
            {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1},
            "rope_theta: expected more than 1 for rope_type yarn",
        ),
        ({"rope_parameters": 5}, "rope_parameters: expected an object, got 5"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected a share of at most 1, got 1.5"),
        ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor: expected a number above 0, got inf"),
        ({"quantization_config": 5}, "quantization_config: expected an object, got 5"),
    ],
)
def test_what_is_no_rotation_and_no_quantisation_is_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        ModelConfig.from_hf(plain_config(**fields))


@pytest.mark.parametrize(
    "fields, dtype",
    [
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": torch.float16}, torch.float16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({"dtype": None}, DEFAULT_DTYPE),
        ({}, DEFAULT_DTYPE),
    ],
)
def test_dtype_spellings(fields, dtype):
    assert ModelConfig.from_hf(plain_config(**fields)).dtype == dtype


def test_unsupported_dtype():
    with pytest.raises(ValueError, match="dtype: expected one of bfloat16, float16, float32, got float64"):
        ModelConfig.from_hf(plain_config(dtype=torch.float64))


@pytest.mark.parametrize("architectures, got", [(["GPT2LMHeadModel"], "got GPT2LMHeadModel"), (None, "got none")])
def test_unsupported_architecture_lists_the_supported(architectures, got):
    with pytest.raises(ValueError, match=f"Qwen3ForCausalLM.*LlamaForCausalLM.*{got}"):
        ModelConfig.from_hf(plain_config(architectures=architectures))


def test_quantisation_is_refused_by_method():
    with pytest.raises(ValueError, match="quantisation method gptq"):
        ModelConfig.from_hf(plain_config(quantization_config={"quant_method": "gptq"}))


def test_activation():
    with pytest.raises(ValueError, match="hidden_act: expected silu, got gelu"):
        ModelConfig.from_hf(plain_config(hidden_act="gelu"))


def test_missing_field_is_named():
    with pytest.raises(ValueError, match="vocab_size: expected a value"):
        ModelConfig.from_hf(plain_config(vocab_size="absent"))


def test_heads_that_do_not_group():
    with pytest.raises(ValueError, match=r"num_key_value_heads: expected a divisor of .*=4, got 3"):
        ModelConfig.from_hf(plain_config(num_key_value_heads=3))


@pytest.mark.parametrize(
    "architecture, fields",
    [
        ("MistralForCausalLM", {"sliding_window": 128}),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_active_sliding_window_is_refused(architecture, fields):
    with pytest.raises(ValueError, match=r"sliding_window: expected none .* window of 128 tokens"):
        ModelConfig.from_hf(plain_config(architecture, **fields))
    with pytest.raises(ValueError, match=r"sliding_window: expected none .* window of 128 tokens"):
        ModelConfig.from_hf(tiny_config(architecture, **fields))


@pytest.mark.parametrize(
    "architecture, fields",
    [
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 0}),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 28}),
    ],
)
def test_inactive_sliding_window_is_ignored(architecture, fields):
    ModelConfig.from_hf(plain_config(architecture, **fields))
    ModelConfig.from_hf(tiny_config(architecture, **fields))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_biases_and_norms_of_each_architecture(architecture):
    config = ModelConfig.from_hf(tiny_config(architecture))
    assert config.qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")
    assert not config.o_bias and not config.mlp_bias
    assert config.rope_theta == 10000.0 and config.head_dim == 64


def test_llama_biases():
    config = ModelConfig.from_hf(tiny_config("LlamaForCausalLM", attention_bias=True, mlp_bias=True))
    assert config.qkv_bias and config.o_bias and config.mlp_bias


def test_yarn_reaches_factor_times_the_original_length():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert ModelConfig.from_hf(plain_config(rope_scaling=scaling)).max_position_embeddings == 1024


def test_import_loads_no_compiled_extension():
    code = (
        "import sys, json; import nanovllm.models.config, nanovllm.engine.context; "
        "print(json.dumps([m for m in sys.modules if m.startswith('nanovllm._C') or m == 'nanovllm.ops']))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(loaded) == []


@pytest.mark.parametrize("value", [-1, 2**31, 1.5, True, "3", []])
@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_a_size_is_a_positive_int32(name, value):
    config = tiny_config("LlamaForCausalLM")
    object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=rf"{name}: expected an integer in \[1, 2147483647\], got "):
        ModelConfig.from_hf(config)
