"""Reads the header of a GGUF file: metadata and where each tensor lies.

The gguf package's own reader makes an object of every string of the vocabulary: seconds and hundreds of
megabytes for 150,000 tokens. The engine needs none of them (the tokenizer is built by transformers), so this
one steps over them.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

_NUMBERS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_VERSIONS = (2, 3)
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    shape: tuple[int, ...]  # torch order: rows first
    quant: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """`metadata`: key -> number, bool, string, or numeric numpy array (arrays of strings are left out);
    `tensors`: name -> GgufTensor.

    Raises:
        ValueError: not a little-endian GGUF file of version 2 or 3, an unknown tensor type, or a truncated
            file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        size = path.stat().st_size
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._parse(_Cursor(data))
        except (struct.error, ValueError) as error:
            raise ValueError(f"{path}: expected a GGUF file, got {size} bytes that do not parse: {error}") from error
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if end > size:
            raise ValueError(f"{path}: expected at least {end} bytes, got {size}: the file is truncated")

    def _parse(self, cursor: "_Cursor") -> None:
        magic, version, num_tensors, num_keys = cursor.unpack("<4sIQQ")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ValueError(f"expected magic GGUF and version 2 or 3, little-endian, got {magic!r} and {version}")
        for _ in range(num_keys):
            key = cursor.string()
            value = cursor.value(GGUFValueType(cursor.unpack("<I")[0]))
            if value is not None:
                self.metadata[key] = value
        infos = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment: expected an integer above 0, got {alignment}")
        start = -(-cursor.position // alignment) * alignment
        for name, shape, quant, offset in infos:
            block, block_bytes = GGML_QUANT_SIZES[quant]
            if shape[-1] < 1 or shape[-1] % block:
                raise ValueError(f"{name}: expected rows of a multiple of {block} values, got shape {list(shape)}")
            num_bytes = math.prod(shape) // block * block_bytes
            self.tensors[name] = GgufTensor(shape, quant, start + offset, num_bytes)

    @staticmethod
    def _tensor_info(cursor: "_Cursor") -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        (num_dims,) = cursor.unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"{name}: expected 1 to {_MAX_DIMS} dimensions, got {num_dims}")
        shape = cursor.unpack(f"<{num_dims}Q")[::-1]  # stored with the contiguous dimension first
        quant, offset = cursor.unpack("<IQ")
        return name, shape, GGMLQuantizationType(quant), offset


class _Cursor:
    """A read position in the mapped header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def skip_string(self) -> None:
        (length,) = struct.unpack_from("<Q", self.data, self.position)
        self.position += 8 + length
        if self.position > len(self.data):
            raise ValueError(f"a string of {length} bytes ends behind the file")

    def string(self) -> str:
        start = self.position + 8
        self.skip_string()
        return self.data[start : self.position].decode()

    def value(self, kind: GGUFValueType) -> Any:
        """The value at the cursor; None, and stepped over, for an array of strings."""
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            item, length = self.unpack("<IQ")
            return self.array(GGUFValueType(item), length)
        return self.array(kind, 1)[0].item()

    def array(self, kind: GGUFValueType, length: int) -> np.ndarray | None:
        if kind in _NUMBERS:
            dtype = _NUMBERS[kind]
            end = self.position + length * dtype.itemsize
            if end > len(self.data):
                raise ValueError(f"an array of {length} numbers ends behind the file")
            raw, self.position = self.data[self.position : end], end
            return np.frombuffer(raw, dtype, length)
        for _ in range(length):
            if kind != GGUFValueType.STRING:  # nobody writes arrays of arrays, which could nest without end
                raise ValueError(f"expected an array of numbers or strings, got one of {kind.name}")
            self.skip_string()
        return None
