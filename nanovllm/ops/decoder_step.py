import torch
from torch import Tensor

MAX_ROWS = 8  # kDecoderStepMaxRows of csrc/kernels/decoder_step.h
MAX_HIDDEN = 4096  # kDecoderStepMaxHidden
MAX_GROUP = 8  # kDecoderStepMaxGroup
MAX_LAYERS = 128  # kDecoderStepMaxLayers
HEAD_DIMS = (64, 128)
POINTERS = (
    "input_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "o",
    "o_bias",
    "post_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
)
"""What a row of `layers` holds, in order: DecoderStepLayer of csrc/kernels/decoder_step.h."""

_op = torch.ops.nanovllm.decoder_step.default


def decoder_step(
    logits: Tensor,
    workspace: Tensor,
    kv_cache: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    layers: Tensor,
    embedding: Tensor,
    norm: Tensor,
    lm_head: Tensor,
    cos_sin: Tensor,
    num_q_heads: int,
    intermediate_size: int,
    eps: float,
) -> None:
    """logits = decoder(token_ids) for up to 8 rows of one token each, with their keys and values stored: one launch.

    Computes what the operators of the layers compute one after the other, rounded to bfloat16 at the same places, but
    for norms, which are rounded before their scale; sums are in another order. The same call gives the same bits.
    Hopper only (built for sm_90a); bfloat16 only. A launch takes every multiprocessor, and two launches must not share
    a workspace at the same time.

    Args:
        logits: [rows, vocab_size] bfloat16, contiguous, written.
        workspace: [>= decoder_step_workspace_numel(...)] int32, contiguous, all -1 before the first call; every call
            leaves it ready for the next.
        kv_cache: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim] bfloat16, keys then values, written at
            the position of each row's token; head_dim 64 or 128 and contiguous, other strides free but aligned to 16
            bytes; block_size a power of two. Unwritten slots may hold anything, NaN included.
        token_ids: [rows] int64, contiguous; rows 0..8. Taken to the nearest of [0, vocab_size).
        block_tables: [rows, max_blocks] int32, last dimension contiguous; position p is in block
            block_tables[row, p // block_size], slot p % block_size. Entries past the context are never read; where the
            newest position's is negative nothing is stored.
        context_lens: [rows] int32, contiguous, in tokens, this step's included: the token's position is one less. 0: a
            padding row, which stores nothing and whose logits mean nothing.
        layers: [num_layers, 12] int64, contiguous: a layer's weights by address, in the order of POINTERS, 0 where a
            layer has none (biases, q_norm, k_norm). All contiguous bfloat16, aligned to 16 bytes, on the device of
            logits; weights [out_features, in_features]; qkv is q, k, v one below the other and gate_up is gate, then
            up. The caller keeps them alive and answers for their sizes.
        embedding, lm_head: [vocab_size, hidden_size] bfloat16, contiguous; may be the same.
        norm: [hidden_size] bfloat16, of the last norm.
        cos_sin: [max_pos, rotary_dim] float32, contiguous, as in `qk_norm_rope_store`.
        num_q_heads: a multiple of num_kv_heads, at most 8 times as many.
        intermediate_size: a multiple of 8; so hidden_size, which is at most 4,096.
        eps: of every norm.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; the text names it.
    Source: the persistent decode kernels of Hazy Research's "no bubbles" (2025); exchange by data that is its own
        signal after NCCL's low-latency protocol.
    """
    _op(
        logits,
        workspace,
        kv_cache,
        token_ids,
        block_tables,
        context_lens,
        layers,
        embedding,
        norm,
        lm_head,
        cos_sin,
        num_q_heads,
        intermediate_size,
        eps,
    )


def decoder_step_max_hidden(
    intermediate_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, num_sms: int
) -> int:
    """The largest hidden size of a model that is else like this: a block a multiprocessor, or fewer where a matrix has
    not a tile for each, and each block holds up to 64 elements of the residual stream."""
    qkv_tiles = (num_q_heads + 2 * num_kv_heads) * head_dim // 16
    return min(MAX_HIDDEN, 64 * min(num_sms, qkv_tiles, intermediate_size // 8, -(-vocab_size // 16)))


def decoder_step_workspace_numel(
    hidden_size: int,
    intermediate_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> int:
    """int32 elements of a workspace: two sets of what blocks exchange in a layer, and the last residual stream."""
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    widths = (2 * num_q_heads + 2 * num_kv_heads) * head_dim + 2 * hidden_size + intermediate_size
    items = blocks + MAX_ROWS * num_kv_heads
    partials = items * (num_q_heads // num_kv_heads) * (head_dim + 4)
    return 2 * (MAX_ROWS // 2 * widths + partials) + MAX_ROWS // 2 * hidden_size
