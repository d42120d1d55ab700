"""The exchange buffers of ops.all_reduce: one on every GPU of the host, mapped by all ranks through CUDA IPC."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm import ops
from nanovllm.ops.all_reduce import MAX_HIDDEN, SENTINEL, exchange_bytes

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_DEVICE_TO_DEVICE = 3
_LOOK_SECONDS = 0.25  # a waiting kernel looks at the abort word every 10 ms or so
# Largest messages in bytes. Two ranks never gain from two shots: they move the same bytes.
_SLOT_BYTES = {2: 8 << 20}
_SLOT_BYTES_OF_MORE = 256 << 10
_SHARED_BYTES_OF_MORE = 8 << 20


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * _HANDLE_BYTES)]


class _Runtime:
    """The CUDA runtime that torch has loaded; a call that fails raises RuntimeError."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").split(".")[0]
        self._library = ctypes.CDLL(f"libcudart.so.{major}")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *args: Any) -> None:
        result = getattr(self._library, name)(*args)
        if result != 0:
            self._library.cudaGetLastError()  # forget it: it is reported here
            raise RuntimeError(f"{name}: {self._library.cudaGetErrorString(result).decode()}")


class PeerMemory:
    """This rank's exchange buffer and its views of the others'.

    Raises:
        RuntimeError: some rank cannot reach the memory of another. Every rank has exchanged its handle by then, so none
        waits for it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.slot_bytes = _SLOT_BYTES.get(size, _SLOT_BYTES_OF_MORE)
        self.shared_bytes = 0 if size in _SLOT_BYTES else _SHARED_BYTES_OF_MORE // (16 * size) * (16 * size)
        self._device = device
        self._runtime = _Runtime()
        self._own = ctypes.c_void_p()
        self._opened: list[ctypes.c_void_p] = []
        with torch.cuda.device(device):
            handle = self._allocate(exchange_bytes(size, self.slot_bytes, self.shared_bytes))
            store.set(f"exchange{rank}", handle)
            handles = [bytes(store.get(f"exchange{r}")) for r in range(size)]
            if not all(handles):
                raise RuntimeError("another rank has no exchange buffer")
            addresses = [self._own.value if r == rank else self._open(handles[r]) for r in range(size)]
        self._abort = torch.zeros(2, dtype=torch.int32, pin_memory=True)  # read by the device where it is
        self._addresses = torch.tensor([*addresses, self._abort.data_ptr()], dtype=torch.int64, device=device)
        self._state = torch.zeros(5, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)

    def _allocate(self, num_bytes: int) -> bytes:
        """The handle of a new buffer full of sentinels; empty when there is none."""
        try:
            self._runtime("cudaMalloc", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
            handle = _IpcHandle()
            self._runtime("cudaIpcGetMemHandle", ctypes.byref(handle), self._own)
        except RuntimeError:
            return b""
        sentinels = torch.full((num_bytes // 2,), SENTINEL, dtype=torch.bfloat16, device=self._device)
        source, count = ctypes.c_void_p(sentinels.data_ptr()), ctypes.c_size_t(num_bytes)
        torch.cuda.current_stream(self._device).synchronize()
        self._runtime("cudaMemcpy", self._own, source, count, _DEVICE_TO_DEVICE)
        torch.cuda.synchronize(self._device)
        return bytes(handle)

    def _open(self, handle: bytes) -> int:
        pointer = ctypes.c_void_p()
        self._runtime(
            "cudaIpcOpenMemHandle", ctypes.byref(pointer), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        self._opened.append(pointer)
        assert pointer.value is not None
        return pointer.value

    def fits(self, x: Tensor) -> bool:
        """Whether x [rows, hidden] is a message for all_reduce."""
        if x.dim() != 2 or x.shape[1] > MAX_HIDDEN or x.shape[1] % 8 or x.dtype == torch.float32:
            return False
        if not x.is_contiguous() or x.data_ptr() % 16:
            return False
        row_bytes = x.shape[1] * x.element_size()
        if x.shape[0] * row_bytes <= self.slot_bytes:
            return True
        return -(-x.shape[0] // self.size) * row_bytes <= self.shared_bytes // self.size

    def all_reduce(
        self,
        out: Tensor,
        residual: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        two_shot: bool | None = None,
    ) -> None:
        """ops.all_reduce with the buffers of this group. two_shot None: by the size of x."""
        if two_shot is None:
            two_shot = x.numel() * x.element_size() > self.slot_bytes
        ops.all_reduce(
            out,
            residual,
            x,
            weight,
            eps,
            self._addresses,
            self._state,
            self.rank,
            self.slot_bytes,
            self.shared_bytes,
            two_shot,
        )

    def abort(self) -> None:
        """Ends every all-reduce that waits on this device; what it computes from then on is garbage."""
        self._abort[0] = 1

    def missing_rank(self) -> int | None:
        """Ends an all-reduce that waits; the rank that it waited for."""
        self.abort()
        deadline = time.monotonic() + _LOOK_SECONDS
        while not self._abort[1] and time.monotonic() < deadline:
            time.sleep(0.001)
        rank = int(self._abort[1]) - 1
        return None if rank < 0 else rank

    def close(self) -> None:
        """Unmaps the other ranks' buffers and frees this one."""
        opened, self._opened = self._opened, []
        for pointer in opened:
            self._runtime("cudaIpcCloseMemHandle", pointer)
        if self._own.value is not None:
            own, self._own = self._own, ctypes.c_void_p()
            self._runtime("cudaFree", own)
