"""The supported architectures, by `architectures[0]` of config.json. Importing this loads no model code."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.models.decoder import DecoderForCausalLM

_MODULES = {
    "Qwen3ForCausalLM": "nanovllm.models.qwen3",
    "Qwen2ForCausalLM": "nanovllm.models.qwen2",
    "LlamaForCausalLM": "nanovllm.models.llama",
    "MistralForCausalLM": "nanovllm.models.llama",
}


def check_architecture(architectures: list[str] | None) -> str:
    """The architecture to build: the first entry of config.json's `architectures`.

    Raises:
        ValueError: it is missing or not supported; the text lists what is.
    """
    supported = ", ".join(_MODULES)
    if not architectures:
        raise ValueError(f"architectures: expected one of {supported}, got none: config.json does not name one")
    first = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architectures, list) or first not in list(_MODULES):
        raise ValueError(f"architectures: expected one of {supported}, got {first}")
    return architectures[0]


def model_class(architecture: str) -> "type[DecoderForCausalLM]":
    """The class of a supported architecture; imports its module, and with it the compiled operators."""
    return getattr(importlib.import_module(_MODULES[architecture]), architecture)
