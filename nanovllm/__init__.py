"""nanovllm: a small, readable LLM inference engine. Importing it needs no GPU and no compiled extension."""

import importlib
from typing import TYPE_CHECKING, Any

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_LAZY = {"LLM": "nanovllm.llm", "AsyncLLM": "nanovllm.async_llm"}


def __getattr__(name: str) -> Any:  # these load torch and the operators: only when they are used
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
