"""The typed Python face of `torch.ops.nanovllm.*`: one module an operator. Importing it loads the libraries."""

from nanovllm.ops._library import HAS_CUDA, has_cuda_kernel, operator_names, without_cuda_kernel
from nanovllm.ops.add_rms_norm import add_rms_norm
from nanovllm.ops.all_reduce import all_reduce
from nanovllm.ops.decode_linear import (
    decode_linear,
    decode_linear_runs_on,
    decode_linear_workspace_numel,
    decode_squares_shape,
)
from nanovllm.ops.decode_linear_add import decode_linear_add
from nanovllm.ops.decode_plan import decode_plan, decode_plan_numel
from nanovllm.ops.decoder_step import decoder_step, decoder_step_max_hidden, decoder_step_workspace_numel
from nanovllm.ops.embed_rms_norm import embed_rms_norm
from nanovllm.ops.paged_attention_decode import decode_workspace_numel, paged_attention_decode
from nanovllm.ops.paged_attention_prefill import paged_attention_prefill
from nanovllm.ops.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.ops.rms_norm import rms_norm
from nanovllm.ops.rope_attention_decode import rope_attention_decode, rope_attention_decode_takes
from nanovllm.ops.rotary_embedding import rotary_embedding
from nanovllm.ops.sample import sample
from nanovllm.ops.silu_and_mul import silu_and_mul
from nanovllm.ops.skinny_linear import skinny_linear
from nanovllm.ops.skinny_linear_gguf import skinny_linear_gguf
from nanovllm.ops.slot_mapping import slot_mapping
from nanovllm.ops.store_kv_cache import store_kv_cache

__all__ = [
    "HAS_CUDA",
    "add_rms_norm",
    "all_reduce",
    "decode_linear",
    "decode_linear_add",
    "decode_linear_runs_on",
    "decode_linear_workspace_numel",
    "decode_plan",
    "decode_plan_numel",
    "decode_squares_shape",
    "decode_workspace_numel",
    "decoder_step",
    "decoder_step_max_hidden",
    "decoder_step_workspace_numel",
    "embed_rms_norm",
    "has_cuda_kernel",
    "operator_names",
    "paged_attention_decode",
    "paged_attention_prefill",
    "qk_norm_rope_store",
    "rms_norm",
    "rope_attention_decode",
    "rope_attention_decode_takes",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "skinny_linear",
    "skinny_linear_gguf",
    "slot_mapping",
    "store_kv_cache",
    "without_cuda_kernel",
]
