"""What a step sends to the device, all of its host arrays in one buffer; and host memory that the device writes."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 64
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _host_buffers(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Two buffers that take turns, pinned for CUDA: with one step in flight the copy of the step before may still be
    under way when the next one is filled."""
    return [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]


class _Memory:
    """What torch.as_tensor takes for a tensor at an address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def device_view(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The memory of a contiguous tensor, on the device or pinned on the host, as a tensor on the device; not owned.

    A kernel reads and writes pinned memory through the bus: for a few words, faster than a copy.
    """
    if device.type == "cpu":
        return tensor
    return torch.as_tensor(_Memory(tensor), device=device).view(tensor.dtype)


class StagingBuffer:
    """A host buffer (pinned for CUDA) and its twin on the device; on CPU the two are the same memory.

    Two pairs take turns. The copy runs on the current stream.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._host = _host_buffers(_aligned(num_bytes), device)
        self._device = [h if device.type == "cpu" else torch.empty_like(h, device=device) for h in self._host]
        # The whole buffers as each dtype: a view made once is cheaper than one for every array of every step.
        self._host_views = [{d: h.numpy().view(d) for d in _TORCH_DTYPES} for h in self._host]
        self._device_views = [{d: t.view(_TORCH_DTYPES[d]) for d in _TORCH_DTYPES} for t in self._device]
        self._turn = 0

    def send(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Device tensors with the contents, shapes and dtypes of `arrays`, valid until the second next call."""
        self._turn ^= 1
        host, device = self._host[self._turn], self._device[self._turn]
        host_views, device_views = self._host_views[self._turn], self._device_views[self._turn]
        offset = 0  # bytes
        tensors = {}
        for name, array in arrays.items():
            end = offset + array.nbytes
            assert end <= host.nbytes, f"staging buffer of {host.nbytes} bytes is full at {name} ({end})"
            start = offset // array.itemsize  # elements
            stop = start + array.size
            host_views[array.dtype][start:stop] = array.reshape(-1)
            tensor = device_views[array.dtype][start:stop]
            tensors[name] = tensor if array.ndim == 1 else tensor.view(array.shape)
            offset = _aligned(end)
        if device is not host:
            device[:offset].copy_(host[:offset], non_blocking=True)
        return tensors


class FixedInputs:
    """Host arrays of a step at fixed places on the device, where a CUDA graph reads them.

    Graphs share the memory, each with a layout of its own: only one of them runs at a time.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._host = _host_buffers(_aligned(num_bytes), device)
        self._device = torch.zeros(_aligned(num_bytes), dtype=torch.uint8, device=device)
        self._turn = 0

    def layout(self, **fields: tuple[int, type[np.generic]]) -> InputLayout:
        """Places for arrays, each (elements, dtype), one after the other from the start of the memory."""
        places = {}
        end = 0  # bytes
        for name, (count, kind) in fields.items():
            dtype = np.dtype(kind)
            places[name] = (end, end + count * dtype.itemsize, dtype)
            end = _aligned(end + count * dtype.itemsize)
        assert end <= self._device.nbytes, f"the inputs need {end} bytes, there are {self._device.nbytes}"
        arrays = tuple({name: h[a:b].numpy().view(dtype) for name, (a, b, dtype) in places.items()} for h in self._host)
        tensors = {name: self._device[a:b].view(_TORCH_DTYPES[dtype]) for name, (a, b, dtype) in places.items()}
        return InputLayout(self, tensors, arrays, tuple((self._device[:end], h[:end]) for h in self._host))

    def next_turn(self) -> int:
        self._turn ^= 1
        return self._turn


class InputLayout:
    """One graph's view of FixedInputs. tensors: on the device, by name."""

    def __init__(
        self,
        inputs: FixedInputs,
        tensors: dict[str, torch.Tensor],
        arrays: tuple[dict[str, np.ndarray], ...],
        copies: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    ) -> None:
        self.tensors = tensors
        self._inputs, self._arrays, self._copies = inputs, arrays, copies
        self._turn = 0

    def arrays(self) -> dict[str, np.ndarray]:
        """The host arrays to fill for the next step; they hold what they held two steps ago."""
        self._turn = self._inputs.next_turn()
        return self._arrays[self._turn]

    def send(self) -> None:
        """Copies the arrays to the device, on the current stream."""
        device, host = self._copies[self._turn]
        device.copy_(host, non_blocking=True)
