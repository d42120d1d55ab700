"""Where a model comes from: directory, GGUF file or hub id; and its configs and tokenizer.

transformers takes longer to import than all else that starts an engine, so it is imported where it is needed only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from nanovllm.loader.gguf import GgufCheckpoint
from nanovllm.loader.gguf_tokenizer import load_gguf_tokenizer
from nanovllm.loader.readable import readable
from nanovllm.models.config import needs_defaults
from nanovllm.models.registry import check_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ACCEPTED = "a directory with config.json, a .gguf file, or a Hugging Face hub id like org/name"
_DOWNLOADED = [
    "*.json",
    "*.safetensors",
    "*.model",
    "*.txt",
    "*.jinja",
]  # config, weights, tokenizer, chat template

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: "hf", a directory of config.json and safetensors, or "gguf", one file."""

    kind: Literal["hf", "gguf"]
    path: Path


def resolve(model: str | Path, revision: str | None = None, token: str | None = None) -> ModelSource:
    """Find a model, and download it when it is a hub id that the local hub cache lacks.

    Args:
        model: a directory with config.json, a .gguf file, or a hub id `org/name`.
        revision: branch, tag or commit of a hub id.
        token: access token of a gated or private hub id; None takes the one that `hf auth login` stored.
    Raises:
        ValueError: nothing usable is there; the text says what is accepted.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model: expected {_ACCEPTED}, got the file {path}")
        return ModelSource("gguf", path)
    if not path.is_dir():
        path = _download(str(model), revision, token)
    if not (path / "config.json").is_file():
        raise ValueError(f"model: expected {_ACCEPTED}, got {path}, which has no config.json")
    return ModelSource("hf", path)


def _download(model: str, revision: str | None, token: str | None) -> Path:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.endswith(".gguf"):
        raise ValueError(f"model: expected {_ACCEPTED}, got {model!r}, which does not exist")
    try:
        return Path(snapshot_download(model, revision=revision, token=token, allow_patterns=_DOWNLOADED))
    except (HfHubHTTPError, LocalEntryNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"model: expected {_ACCEPTED}, got {model!r}, which is no local path and could not be had from "
            f"the hub: {error}"
        ) from error


def load_hf_config(source: ModelSource) -> Any:
    """The config of a model, for ModelConfig.from_hf: config.json as it is, or, where it leaves out what matters, the
    transformers config with the defaults of its architecture.

    Raises:
        ValueError: the architecture is not supported; told before transformers or weights are asked.
    """
    if source.kind == "gguf":
        return GgufCheckpoint(source.path).hf_config()
    path = source.path / "config.json"
    fields = _read_json(path)
    check_architecture(fields.get("architectures"))
    if not needs_defaults(fields):
        return SimpleNamespace(**fields)
    from transformers import AutoConfig

    with readable(path):
        return AutoConfig.from_pretrained(source.path)


def _read_json(path: Path) -> dict[str, Any]:
    with readable(path):
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict):
            raise ValueError(f"expected a JSON object, got {type(fields).__name__}")
        return fields


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer with its chat template, which a GGUF file carries inside; None for a directory that has
    no tokenizer files (transformers would make an empty one)."""
    if source.kind == "gguf":
        with readable(source.path):
            return load_gguf_tokenizer(source.path)
    if not any((source.path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    with readable(source.path):
        return AutoTokenizer.from_pretrained(source.path)


def load_generation_config(source: ModelSource) -> SimpleNamespace | None:
    """End-of-sequence ids and sampling defaults, those that the file gives; None for a directory without
    generation_config.json."""
    if source.kind == "gguf":
        return SimpleNamespace(eos_token_id=GgufCheckpoint(source.path).eos_token_ids())
    path = source.path / "generation_config.json"
    return SimpleNamespace(**_read_json(path)) if path.is_file() else None
