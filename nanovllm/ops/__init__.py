"""The typed Python face of `torch.ops.nanovllm.*`: one module an operator. Importing it loads the libraries."""

from nanovllm.ops._library import HAS_CUDA, operator_names, without_cuda_kernel
from nanovllm.ops.add_rms_norm import add_rms_norm
from nanovllm.ops.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.ops.rms_norm import rms_norm
from nanovllm.ops.rotary_embedding import rotary_embedding
from nanovllm.ops.silu_and_mul import silu_and_mul
from nanovllm.ops.slot_mapping import slot_mapping
from nanovllm.ops.store_kv_cache import store_kv_cache

__all__ = [
    "HAS_CUDA",
    "add_rms_norm",
    "operator_names",
    "qk_norm_rope_store",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "slot_mapping",
    "store_kv_cache",
    "without_cuda_kernel",
]
