import torch
from torch import Tensor

_op = torch.ops.nanovllm.decode_plan.default


def decode_plan(plan: Tensor, context_lens: Tensor, num_kv_heads: int, block_size: int) -> None:
    """Split one decode step over the contexts; `paged_attention_decode` reads the plan in every layer.

    On CUDA every thread block of the decode kernel gets an equal number of 64-token tiles, across the borders of heads
    and sequences; the plan is where each begins, so its size depends on the GPU alone.

    On CPU, plan[b] is the first work item of sequence b and plan[batch] the number of items: a sequence is one item,
    or one for each of its 256-token tiles when it alone is a large share of the batch. Results do not depend on it.

    Args:
        plan: [>= decode_plan_numel(batch, device)] int32, contiguous, written.
        context_lens: [batch] int32, contiguous, in tokens; 0 marks a padding row.
        num_kv_heads: of the attention layers on this device.
        block_size: tokens in a cache block.
    Raises:
        RuntimeError: a shape, dtype or device does not fit; the text names it.
    """
    _op(plan, context_lens, num_kv_heads, block_size)


def decode_plan_numel(max_num_seqs: int, device: torch.device | str) -> int:
    """int32 elements of a plan for batches up to `max_num_seqs`."""
    if torch.device(device).type == "cpu":
        return max_num_seqs + 1
    return 4 * (1 + decode_grid(device))


def decode_grid(device: torch.device | str) -> int:
    """Thread blocks of the CUDA decode kernel; kBlocksPerSm of csrc/kernels/decode_split.cuh an SM."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
