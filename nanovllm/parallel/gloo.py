"""Collectives on the CPU, by gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.parallel.group import Group
from nanovllm.parallel.progress import CollectiveError, Progress


class GlooGroup(Group):
    """A group of its own: it neither needs nor touches torch.distributed's default one.

    Args:
        is_local: all ranks are on this host, which then talks to itself only.
        timeout: seconds after which a collective gives up by itself.
    """

    def __init__(self, rank: int, size: int, progress: Progress, is_local: bool, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._progress, self._is_local, self._timeout = progress, is_local, timeout
        self._pg: Any = None

    def connect(self, store: dist.Store) -> None:
        """Meets the other ranks. The layers may hold the group before that, but not use it."""
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if self._is_local:
            device = gloo.create_device(hostname="127.0.0.1")
        elif interface:
            device = gloo.create_device(interface=interface)
        else:
            device = gloo.create_default_device()
        options._devices = [device]
        self._store = store  # the group keeps no reference to a store that is written in Python
        self._pg = self._run("connect", lambda: gloo(store, self.rank, self.size, options))

    def _run(self, name: str, call: Callable[[], Any]) -> Any:
        self._progress.collectives += 1
        self._progress.doing = name
        try:
            work = call()
            if hasattr(work, "wait"):
                work.wait()
        except RuntimeError as e:
            raise CollectiveError(f"{name} ({self._progress}) failed on rank {self.rank}: {e}") from e
        return work

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel():
            self._run("all_reduce", lambda: self._pg.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(x.shape[0], self.size * x.shape[1])
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._run("gather", lambda: self._pg.gather([parts] if parts else [], [x], options))
        return torch.cat(parts, dim=1) if parts else x

    def broadcast(self, x: Tensor) -> None:
        if x.numel():
            self._run("broadcast", lambda: self._pg.broadcast(x, 0))

    def min(self, value: int) -> int:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        x = torch.tensor([value])
        self._run("min", lambda: self._pg.allreduce([x], options))
        return int(x)

    def abort(self) -> None:
        if self._pg is not None:
            with contextlib.suppress(RuntimeError):  # of a connection that is broken already
                self._pg.abort()

    def close(self) -> None:
        self.abort()
        self._pg = None
