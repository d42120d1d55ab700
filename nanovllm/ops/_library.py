"""Loads the compiled libraries: `_C` (schemas and CPU operators, any torch from 2.11) and, where torch is a CUDA build
and it was built, `_C_cuda`. Imported before the first operator is looked up."""

import importlib
import importlib.util
import re

import torch

importlib.import_module("nanovllm._C")
HAS_CUDA = torch.version.cuda is not None and importlib.util.find_spec("nanovllm._C_cuda") is not None
if HAS_CUDA:
    importlib.import_module("nanovllm._C_cuda")

CPU_ONLY = {"skinny_linear_gguf"}
"""Operators that the engine needs on the CPU only: there, weights stay quantised beside the dense ones for decode."""

OPTIONAL_ON_CUDA = {"decoder_step"}
"""Operators that the engine does without where this build has no kernel of them."""


def operator_names() -> list[str]:
    """Every operator that has a schema."""
    schemas = (s.name for s in torch._C._jit_get_all_schemas())
    return sorted(m[1] for m in map(re.compile(r"nanovllm::(\w+)$").match, schemas) if m)


def has_cuda_kernel(name: str) -> bool:
    """Whether this build has a CUDA implementation of the operator."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"nanovllm::{name}", "CUDA")


def without_cuda_kernel() -> list[str]:
    """Operators that a GPU needs and that have no CUDA implementation in this build."""
    return [n for n in operator_names() if n not in CPU_ONLY | OPTIONAL_ON_CUDA and not has_cuda_kernel(n)]
