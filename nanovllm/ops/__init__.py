"""The typed Python face of `torch.ops.nanovllm.*`: one module an operator.

Importing this package loads the compiled libraries: `_C` (schemas and CPU operators, any torch from 2.11) and, where
torch is a CUDA build and it was built, `_C_cuda`.
"""

import importlib
import importlib.util

import torch

importlib.import_module("nanovllm._C")
HAS_CUDA = torch.version.cuda is not None and importlib.util.find_spec("nanovllm._C_cuda") is not None
if HAS_CUDA:
    importlib.import_module("nanovllm._C_cuda")

from nanovllm.ops.rms_norm import rms_norm  # noqa: E402

__all__ = ["HAS_CUDA", "rms_norm"]
