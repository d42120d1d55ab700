import torch
from torch import Tensor

_op = torch.ops.nanovllm.sample.default


def sample(
    token_ids: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    copies: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """token_ids[b] = a token drawn with probability p from those that min-p, top-k and top-p leave.

    x = (logit - greatest logit of the row) * (1 / temperature), in float32, and p = softmax(x). In this order:
        min_p keeps p >= min_p * greatest p;
        top_k keeps x >= the k-th greatest x (ties kept);
        top_p keeps the smallest set of the greatest values that holds >= top_p of what is left, ties at its border
            and at least one token included.
    The draw is an exponential race of groups of 8 tokens, with words of Philox4x32-10 that depend on seed, position
    and group alone: csrc/common/philox.h defines it. So a token depends on its row's arguments, not on the batch; equal
    times go to the lowest group. A filter that is off changes no bit.

    temperature 0 (or too small for 1 / temperature) is exact argmax, the lowest id on ties. Logits of -inf are never
    sampled, NaN counts as -inf; a row with nothing else gives 0, a row with +inf its first +inf.

    Args:
        token_ids: [batch] int64, contiguous, written where positions is not negative.
        logits: [batch, vocab] float32 or bfloat16; last dimension contiguous, row stride free.
        temperature: [batch] float32, contiguous; >= 0.
        top_k: [batch] int32, contiguous; <= 0 or >= vocab is off.
        top_p: [batch] float32, contiguous; >= 1 is off.
        min_p: [batch] float32, contiguous; 0 is off.
        seeds: [batch] int64, contiguous; all 64 bits count.
        positions: [batch] int64, contiguous; of the token to sample. Negative: the row is left out, its logits may
            be anything.
        copies, copy: [num_copies, batch] int64, last dimension contiguous, and [1] int32: row copy[0] of copies is
            written like token_ids. It may be host memory that the GPU writes to. None: no copy.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit, the vocabulary is empty, or (CPU) copies has no row
            copy[0], where CUDA makes no copy; the text names it.
    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir (2006), for the exponential race; Salmon
        et al., Parallel random numbers: as easy as 1, 2, 3 (2011), for Philox.
    """
    _op(token_ids, logits, temperature, top_k, top_p, min_p, seeds, positions, copies, copy)
