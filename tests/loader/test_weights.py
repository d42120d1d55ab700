"""Safetensors loading: every tensor in its place, every fault named, and memory bounded."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanovllm.loader.dummy import fill_dummy
from nanovllm.loader.source import load_hf_config, resolve
from nanovllm.loader.weights import check_sizes, load_weights
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import model_class
from tests.loader.memory import load_memory, needs_proc
from tests.tiny import ARCHITECTURES, save_tiny, tiny_config, tiny_model

QKV = ["q_proj", "k_proj", "v_proj"]
GATE_UP = ["gate_proj", "up_proj"]


def build(path: Path, **changes: object) -> DecoderForCausalLM:
    """The model of a checkpoint, its parameters NaN, so that a test sees what was not filled."""
    config = dataclasses.replace(ModelConfig.from_hf(load_hf_config(resolve(path))), **changes)
    model = model_class(config.architecture)(config)
    for param in model.parameters():
        param.fill_(float("nan"))
    return model


def load(path: Path, **changes: object) -> DecoderForCausalLM:
    model = build(path, **changes)
    load_weights(model, resolve(path))
    return model


def expected_parameter(name: str, state: dict[str, Tensor]) -> Tensor:
    """A parameter by our name from a transformers state dict."""
    for fused, parts in (("qkv_proj", QKV), ("gate_up_proj", GATE_UP)):
        if f".{fused}." in name:
            return torch.cat([state[name.replace(fused, part)] for part in parts])
    return state[name]


def assert_loaded(model: DecoderForCausalLM, state: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        assert torch.equal(param, expected_parameter(name, state).to(param.dtype)), name


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the tensors of a one-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter(tmp_path, architecture, tied):
    save_tiny(tmp_path, architecture, tie_word_embeddings=tied)
    state = tiny_model(architecture, tie_word_embeddings=tied).state_dict()
    model = load(tmp_path)
    assert_loaded(model, state)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_llama_biases(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    model = load(tmp_path)
    assert_loaded(model, tiny_model("LlamaForCausalLM", attention_bias=True, mlp_bias=True).state_dict())
    assert model.model.layers[0].self_attn.o_proj.bias is not None
    assert model.model.layers[0].mlp.down_proj.bias is not None


def test_shards(tmp_path):
    save_tiny(tmp_path, "Qwen3ForCausalLM", max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_loaded(load(tmp_path), tiny_model("Qwen3ForCausalLM").state_dict())


def test_dtype_is_converted(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    model = load(tmp_path, dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert_loaded(model, tiny_model("LlamaForCausalLM").state_dict())


def test_missing_shard_is_named(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM", max_shard_size="200KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"missing {lost.name}"):
        load(tmp_path)


def test_all_faults_are_in_one_error(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM")

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(256)
        tensors["model.norm.weight"] = torch.ones(95)

    edit(tmp_path, spoil)
    model = build(tmp_path)
    with pytest.raises(ValueError) as error:
        load_weights(model, resolve(tmp_path))
    text = str(error.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in text
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in text
    assert "1 misshapen: model.norm.weight (expected [96], got [95])" in text
    assert all(param.isnan().all() for param in model.parameters()), "nothing is loaded before all is checked"


def test_long_lists_are_cut_and_counted(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.2" in name])
    with pytest.raises(ValueError, match=r"9 missing: model\.layers\.2\..* and 4 more"):
        load(tmp_path)


def test_qwen2_biases_in_a_llama_model_are_unexpected(tmp_path):
    save_tiny(tmp_path, "Qwen2ForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"9 unexpected: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load(tmp_path)


def test_allowed_extras(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)

    edit(tmp_path, add)
    assert_loaded(load(tmp_path), tiny_model("LlamaForCausalLM", tie_word_embeddings=True).state_dict())


def test_pickled_weights_are_refused(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"got pytorch_model\.bin, whose pickle format is not supported"):
        load(tmp_path)


def test_no_weights_at_all(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors .* got neither"):
        load(tmp_path)


def test_unsupported_architecture_is_refused_before_weights_are_read(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["NewForCausalLM"], "model_type": "unknown_to_transformers"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expected one of Qwen3ForCausalLM.*, got NewForCausalLM"):
        load(tmp_path)


def test_dummy_weights_are_seeded(tmp_path):
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    models = [build(tmp_path) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1)):
        fill_dummy(model, seed)
    first, again, other = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, other))
    assert all(param.isfinite().all() and param.std() > 0 for param in first)


@needs_proc
def test_peak_memory_is_the_model_and_one_tensor(tmp_path):
    """A model of 400 MB: holding the checkpoint beside it would show as 400 MB more."""
    config = tiny_config(
        "LlamaForCausalLM",
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    save_file(zeros, tmp_path / "model.safetensors")
    memory = load_memory(tmp_path)
    shutil.rmtree(tmp_path)
    assert memory.model > 350e6
    assert memory.growth < memory.model + memory.largest + 60e6, memory


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_quantised_tensors_are_refused(tmp_path, dtype):
    save_tiny(tmp_path, "LlamaForCausalLM")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: expected a dtype of F64, F32, F16, BF16, got "):
        load(tmp_path)


def test_damaged_safetensors_are_named(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    for damaged in (b"", raw[:5], raw[:100], raw[:-1], b"\xff" * 8 + raw[8:], raw[:8] + b"[" + raw[9:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors: could not be read: SafetensorError"):
            load(tmp_path)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_config_larger_than_its_checkpoint_is_refused_before_it_is_built(tmp_path, name):
    save_tiny(tmp_path, "LlamaForCausalLM")
    found = resolve(tmp_path)
    config = ModelConfig.from_hf(load_hf_config(found))
    check_sizes(config, found)
    limit = 30 if name == "num_layers" else 256  # 3 + 3 * 9 tensors; 4 heads of 64
    check_sizes(dataclasses.replace(config, **{name: limit}), found)
    with pytest.raises(
        ValueError, match=f"{name}: expected at most {limit}, the .* of the checkpoint, got {limit + 1}"
    ):
        check_sizes(dataclasses.replace(config, **{name: limit + 1}), found)
