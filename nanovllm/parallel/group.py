"""The ranks that share a model, and what they do together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from nanovllm import ops


class Group:
    """One rank alone: every collective is the identity. The base of the groups of several ranks.

    All ranks call the same collectives in the same order, with the same shapes.
    """

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on all; x may be overwritten."""
        return x

    def add_rms_norm(self, out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        """residual += the sum of x over the ranks; out = rms_norm(residual). x may be overwritten."""
        ops.add_rms_norm(out, residual, self.all_reduce(x), weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        """[rows, n] of each rank -> on rank 0 [rows, size * n], side by side in the order of ranks; elsewhere x."""
        return x

    def broadcast(self, x: Tensor) -> None:
        """x becomes what it is on rank 0."""

    def min(self, value: int) -> int:
        """The smallest value of all ranks."""
        return value

    def abort(self) -> None:
        """From any thread: ends collectives that wait, on every rank of this process; none may follow."""

    def missing_rank(self) -> int | None:
        """From any thread: the rank that a collective waits for, where that is known. None may follow that one."""
        return None

    def close(self) -> None:
        """Frees what the group holds; a second call does nothing."""


_local = threading.local()
_ALONE = Group()


def current_group() -> Group:
    """The group that layers made now belong to."""
    return getattr(_local, "group", _ALONE)


@contextmanager
def use_group(group: Group) -> Iterator[None]:
    """Make `group` the one of the layers that are built within the block, by this thread."""
    before = current_group()
    _local.group = group
    try:
        yield
    finally:
        _local.group = before
