"""The typed Python face of `torch.ops.nanovllm.*`: one module an operator.

Importing this package loads the compiled libraries: `_C` (schemas and CPU operators, any torch from 2.11)
and, where torch is a CUDA build and it was built, `_C_cuda`.
"""

import importlib
import importlib.util

import torch

importlib.import_module("nanovllm._C")
HAS_CUDA = torch.version.cuda is not None and importlib.util.find_spec("nanovllm._C_cuda") is not None
if HAS_CUDA:
    importlib.import_module("nanovllm._C_cuda")

from nanovllm.ops.add_rms_norm import add_rms_norm  # noqa: E402
from nanovllm.ops.qk_norm_rope_store import qk_norm_rope_store  # noqa: E402
from nanovllm.ops.rms_norm import rms_norm  # noqa: E402
from nanovllm.ops.rotary_embedding import rotary_embedding  # noqa: E402
from nanovllm.ops.silu_and_mul import silu_and_mul  # noqa: E402
from nanovllm.ops.slot_mapping import slot_mapping  # noqa: E402
from nanovllm.ops.store_kv_cache import store_kv_cache  # noqa: E402

__all__ = [
    "HAS_CUDA",
    "add_rms_norm",
    "qk_norm_rope_store",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "slot_mapping",
    "store_kv_cache",
]
