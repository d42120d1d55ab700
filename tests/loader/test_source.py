"""What a model may be given as, and what is said of everything else."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig

from nanovllm.loader import source
from nanovllm.loader.source import load_generation_config, load_hf_config, resolve
from nanovllm.models.config import ModelConfig
from tests.tiny import ARCHITECTURES, save_tiny

ACCEPTED = r"expected a directory with config\.json, a \.gguf file, or a Hugging Face hub id like org/name, got .*"


def test_directory(tmp_path):
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    found = resolve(str(tmp_path))
    assert (found.kind, found.path) == ("hf", tmp_path)
    assert load_hf_config(found).architectures == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_without_transformers_is_the_same(tmp_path, architecture):
    """config.json is read as it is where it has every field, with transformers' defaults where it does not."""
    save_tiny(tmp_path, architecture)
    found = resolve(tmp_path)
    expected = ModelConfig.from_hf(AutoConfig.from_pretrained(tmp_path))
    assert isinstance(load_hf_config(found), SimpleNamespace)
    assert ModelConfig.from_hf(load_hf_config(found)) == expected
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for name in ("rms_norm_eps", "head_dim", "tie_word_embeddings", "sliding_window", "rope_parameters", "rope_theta"):
        path.write_text(json.dumps({k: v for k, v in fields.items() if k != name}))
        expected = attempt(lambda: ModelConfig.from_hf(AutoConfig.from_pretrained(tmp_path)))
        assert attempt(lambda: ModelConfig.from_hf(load_hf_config(found))) == expected, name


def attempt(call):
    try:
        return call()
    except ValueError as error:
        return str(error)


def test_gguf_file(tmp_path):
    file = tmp_path / "x.gguf"
    file.touch()
    assert resolve(file).kind == "gguf"


@pytest.mark.parametrize("name", ["missing.gguf", "no/such/place", "/nowhere/at/all", "a model", "org/x.gguf"])
def test_what_does_not_exist(name):
    with pytest.raises(ValueError, match=ACCEPTED + "which does not exist"):
        resolve(name)


def test_directory_without_config(tmp_path):
    with pytest.raises(ValueError, match=ACCEPTED + r"which has no config\.json"):
        resolve(tmp_path)


def test_file_of_another_kind(tmp_path):
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ValueError, match=ACCEPTED + r"the file .*model\.bin"):
        resolve(file)


def test_hub_id_is_downloaded_without_pickles(tmp_path, monkeypatch):
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    asked = {}

    def fake_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(source, "snapshot_download", fake_download)
    assert resolve("Qwen/Qwen3-0.6B", revision="main", token="t").path == tmp_path
    assert (asked["repo_id"], asked["revision"], asked["token"]) == ("Qwen/Qwen3-0.6B", "main", "t")
    wanted = ["config.json", "model-1.safetensors", "tokenizer.json", "merges.txt"]
    offered = [*wanted, "pytorch_model.bin", "model.pt"]
    kept = huggingface_hub.utils.filter_repo_objects(offered, allow_patterns=asked["allow_patterns"])
    assert list(kept) == wanted


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("not cached"), OfflineModeIsEnabled("offline")])
def test_hub_id_that_cannot_be_had(monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(source, "snapshot_download", fail)
    with pytest.raises(ValueError, match=ACCEPTED + "could not be had from the hub"):
        resolve("Qwen/Qwen3-0.6B")


def test_generation_config_is_optional(tmp_path):
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert load_generation_config(resolve(tmp_path)) is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert load_generation_config(resolve(tmp_path)).eos_token_id == [3, 5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", r"config\.json: could not be read: JSONDecodeError"),
        ("config.json", "5", r"config\.json: could not be read: ValueError: expected a JSON object, got int"),
        ("config.json", '{"architectures": "LlamaForCausalLM"}', "architectures: expected one of .*, got Llama"),
        ("config.json", '{"architectures": [[]]}', r"architectures: expected one of .*, got \[\]"),
        ("generation_config.json", "{", r"generation_config\.json: could not be read: "),
        ("generation_config.json", "[[1, 2]]", r"generation_config\.json: .*: expected a JSON object, got list"),
        ("tokenizer.json", "{}", "could not be read: "),
    ],
)
def test_damaged_json_is_named(tmp_path, name, text, message):
    save_tiny(tmp_path, "LlamaForCausalLM")
    (tmp_path / name).write_text(text)
    found = resolve(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_hf_config(found)
        load_generation_config(found)
        source.load_tokenizer(found)
