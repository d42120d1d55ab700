import torch
from torch import Tensor

_op = torch.ops.nanovllm.all_reduce.default
NUM_RANKS = (1, 2, 3, 4, 6, 8)
MAX_HIDDEN = 8192
EPOCHS = 3
SENTINEL = -0.0  # what an exchange buffer is full of, as bfloat16 or float16


def exchange_bytes(num_ranks: int, slot_bytes: int, shared_bytes: int) -> int:
    """Bytes of every rank's exchange buffer."""
    return EPOCHS * (num_ranks * slot_bytes + 2 * shared_bytes)


def all_reduce(
    out: Tensor,
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    peers: Tensor,
    state: Tensor,
    rank: int,
    slot_bytes: int,
    shared_bytes: int,
    two_shot: bool,
) -> None:
    """out = the sum of x over the ranks; or residual += that sum, out = rms_norm(residual) * weight, per row.

    All ranks of the host call it with the same shapes, in the same order; it may be part of a CUDA graph. The sum is
    fp32 inside, in the order of ranks, and has the same bits on all of them. It is rounded once, after the residual is
    added (with two_shot before that, too). CUDA only.

    Args:
        out: [rows, hidden] like x, written; may be x without a residual.
        residual: [rows, hidden] like x, updated in place; None: no norm.
        x: [rows, hidden] bfloat16 or float16, contiguous; hidden a multiple of 8, at most MAX_HIDDEN.
        weight: [hidden] of the norm; None without a residual.
        peers: [num_ranks + 1] int64, addresses in this process: of every rank's exchange buffer, exchange_bytes of
            SENTINEL at first, and of two int32 in pinned host memory: a waiting call goes on with garbage when the
            first is not 0, as do all later ones, and stores 1 + the rank that it waited for in the second.
        state: [5] int32, 0 at first, of this rank.
        slot_bytes: the largest message of one shot, a multiple of 16.
        shared_bytes: the largest message of two shots (about: rows go to ranks evenly), a multiple of 16 num_ranks.
        two_shot: each row is summed by one rank: fewer bytes between more than two ranks, one more exchange.
    Raises:
        RuntimeError: a shape, dtype, size or number of ranks does not fit; the text names it.
    """
    _op(out, residual, x, weight, eps, peers, state, rank, slot_bytes, shared_bytes, two_shot)
