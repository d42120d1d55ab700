"""Collectives on CUDA: our all-reduce over peer memory for small messages, NCCL for the rest, on the current stream.

NCCL is called directly, not through torch.distributed: nothing runs on a stream of its own, CUDA graphs capture the
calls as they are, and a communicator can be aborted from another thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm import ops
from nanovllm.ops.all_reduce import NUM_RANKS
from nanovllm.parallel.group import Group
from nanovllm.parallel.peer_memory import PeerMemory
from nanovllm.parallel.progress import CollectiveError, Progress

_ID_BYTES = 128
_DTYPES = {torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SUM, _MIN = 0, 3
_ABORT_SECONDS = 5.0
_CALL_SECONDS = 0.5


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


class _Nccl:
    """The C API; a call that fails raises CollectiveError with NCCL's text."""

    def __init__(self) -> None:
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast can put GPUs that others share out of service
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *args: Any) -> None:
        result = getattr(self._library, name)(*args)
        if result != 0:
            raise CollectiveError(f"{name}: {self._library.ncclGetErrorString(result).decode()}")


class NcclGroup(Group):
    """The ranks of several GPUs, on one host or more.

    Args:
        device: "cuda:N", this rank's.
        is_local: all ranks are on this host, so that they may reach each other's memory.
    """

    def __init__(self, rank: int, size: int, progress: Progress, is_local: bool, device: str) -> None:
        self.rank, self.size = rank, size
        self._progress, self._is_local, self._device = progress, is_local, torch.device(device)
        self._nccl = _Nccl()
        self._communicator = ctypes.c_void_p()
        self._is_aborted = threading.Event()
        self._calling = threading.Lock()  # held during a call of NCCL, which may wait for other ranks
        self.peers: PeerMemory | None = None

    def connect(self, store: dist.Store) -> None:
        """Meets the other ranks. The layers may hold the group before that, but not use it.

        Raises:
            CollectiveError: NCCL failed, or the group was aborted meanwhile.
        """
        self._progress.doing = "connecting"
        unique = _UniqueId()
        if self.rank == 0:
            self._nccl("ncclGetUniqueId", ctypes.byref(unique))
            store.set("nccl", bytes(unique))
        else:
            unique = _UniqueId.from_buffer_copy(store.get("nccl"))
        errors: list[BaseException] = []
        communicator = ctypes.c_void_p()

        def connect() -> None:
            try:
                with torch.cuda.device(self._device):
                    self._nccl("ncclCommInitRank", ctypes.byref(communicator), self.size, unique, self.rank)
            except BaseException as e:
                errors.append(e)

        # NCCL waits for all ranks and cannot be told to stop: in a thread of its own it may wait alone.
        thread = threading.Thread(target=connect, name="nanovllm-nccl", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            if self._is_aborted.is_set():
                raise CollectiveError("ncclCommInitRank: another rank failed")
        if errors:
            raise errors[0]
        self._communicator = communicator
        self.peers = self._connect_peers(store)

    def _connect_peers(self, store: dist.Store) -> PeerMemory | None:
        """The exchange buffers of all ranks; None on all of them where one cannot reach another."""
        peers = None
        if self._is_local and self.size in NUM_RANKS:
            with contextlib.suppress(RuntimeError):
                peers = PeerMemory(store, self.rank, self.size, self._device)
        if self.min(int(peers is not None)):
            return peers
        if peers is not None:
            peers.close()
        return None

    def _call(self, name: str, *args: Any) -> None:
        self._call_together([(name, *args)])

    def _call_together(self, calls: list[tuple[Any, ...]]) -> None:
        """(name, arguments but for communicator and stream) of each; NCCL begins them when all have been made."""
        name = calls[0][0]
        with self._calling:
            if self._is_aborted.is_set():
                raise CollectiveError(f"{name}: the group has ended")
            self._progress.collectives += 1
            self._progress.doing = name
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            if len(calls) == 1:
                self._nccl(*calls[0], self._communicator, stream)
                return
            try:
                self._nccl("ncclGroupStart")
                for call in calls:
                    self._nccl(*call, self._communicator, stream)
            finally:  # an open group would swallow all later calls of this thread, those of the next engine too
                self._nccl("ncclGroupEnd")

    def nccl_all_reduce(self, x: Tensor, operation: int = _SUM) -> None:
        """In place, whatever the size of x."""
        data, count = ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.numel())
        self._call("ncclAllReduce", data, data, count, _DTYPES[x.dtype], operation)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel():
            if self.peers is not None and self.peers.fits(x):
                self.peers.all_reduce(x, None, x, None, 0.0)
            else:
                self.nccl_all_reduce(x)
        return x

    def add_rms_norm(self, out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        if self.peers is not None and x.numel() and self.peers.fits(x):
            self.peers.all_reduce(out, residual, x, weight, eps)
        else:
            ops.add_rms_norm(out, residual, self.all_reduce(x), weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(x.shape[0], self.size * x.shape[1])
        x = x.contiguous()
        kind, count = _DTYPES[x.dtype], ctypes.c_size_t(x.numel())
        if self.rank != 0:
            self._call("ncclSend", ctypes.c_void_p(x.data_ptr()), count, kind, 0)
            return x
        parts = x.new_empty(self.size, *x.shape)
        parts[0] = x
        places = [ctypes.c_void_p(part.data_ptr()) for part in parts]
        self._call_together([("ncclRecv", places[rank], count, kind, rank) for rank in range(1, self.size)])
        return parts.transpose(0, 1).reshape(x.shape[0], -1)

    def broadcast(self, x: Tensor) -> None:
        if x.numel():
            data, count = ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.numel())
            self._call("ncclBroadcast", data, data, count, _DTYPES[x.dtype], 0)

    def min(self, value: int) -> int:
        x = torch.tensor([value], device=self._device)
        self.nccl_all_reduce(x, _MIN)
        return int(x)

    def missing_rank(self) -> int | None:
        """The rank that our all-reduce waits for, which ends with that."""
        return None if self.peers is None else self.peers.missing_rank()

    def abort(self) -> None:
        if self._is_aborted.is_set():
            return
        self._is_aborted.set()
        if self.peers is not None:
            self.peers.abort()
        if self._calling.acquire(timeout=_CALL_SECONDS):  # a call that waits for nobody must not lose its communicator
            self._calling.release()
        if self._communicator.value is not None:
            # In a thread: with a broken device this may wait for ever, and nobody needs its end.
            abort = threading.Thread(
                target=lambda: self._nccl("ncclCommAbort", self._communicator), name="nanovllm-nccl", daemon=True
            )
            abort.start()
            abort.join(_ABORT_SECONDS)

    def close(self) -> None:
        self.abort()
        peers, self.peers = self.peers, None
        if peers is not None:
            with contextlib.suppress(RuntimeError):  # a broken device keeps its memory until the process ends
                peers.close()
