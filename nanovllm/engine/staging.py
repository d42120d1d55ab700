"""One copy to the device a step: all host arrays of the step travel in one buffer."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 64
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class StagingBuffer:
    """A host buffer (pinned for CUDA) and its twin on the device; on CPU the two are the same memory.

    Two pairs take turns, because with one step in flight the copy of the step before may still be under way when the
    next one is filled. The copy runs on the current stream.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        pin = device.type == "cuda"
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
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
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        if device is not host:
            device[:offset].copy_(host[:offset], non_blocking=True)
        return tensors
