import torch
from torch import Tensor

_op = torch.ops.nanovllm.slot_mapping.default


def slot_mapping(
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    start_pos: Tensor,
    block_size: int,
) -> None:
    """Position and cache slot of every scheduled token; token i of sequence b has position start_pos[b] + i.

    slot = block_tables[b, position // block_size] * block_size + position % block_size

    Args:
        positions: [num_tokens] int64, contiguous, written; 0 in rows from cu_seqlens_q[-1] on (padding).
        slots: [num_tokens] int64, contiguous, written; -1 in padding rows and where the table entry is
            negative.
        block_tables: [num_seqs, table_width] int32 block ids, last dimension contiguous, row stride free;
            entries past a sequence's last position are not read.
        cu_seqlens_q: [num_seqs + 1] int32, contiguous: sequence b owns tokens cu_seqlens_q[b] up to [b + 1].
        start_pos: [num_seqs] int32, contiguous: position of each sequence's first scheduled token; -1: a padding
            row, whose tokens get position 0 and slot -1.
        block_size: tokens a block, a power of two.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit, or block_size is no power of two; on CPU
            also offsets that do not rise from 0 to at most num_tokens, and a position past its table. CUDA
            would have
            to wait for the device to see those values: there a position past its table gets slot -1.
    Source: `slot_mapping` of vLLM and nano-vLLM, computed on the device here.
    """
    _op(positions, slots, block_tables, cu_seqlens_q, start_pos, block_size)
