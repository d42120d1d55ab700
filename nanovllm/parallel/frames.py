"""Framing of the control channel: length, sequence number and checksum before every piece of a message."""

from __future__ import annotations

import struct
import zlib

_HEADER = struct.Struct("<IIQ")  # payload bytes, with the top bit for "more pieces follow"; checksum; sequence number
HEADER_BYTES = _HEADER.size
_MORE = 1 << 31


class FrameError(RuntimeError):
    """A frame that was damaged, lost or repeated."""


def header(payload: bytes | memoryview, sequence: int, more: bool) -> bytes:
    """The header of a frame with `payload`, which has less than 2 GiB."""
    length = len(payload) | (_MORE if more else 0)
    return _HEADER.pack(length, zlib.crc32(payload, sequence & 0xFFFFFFFF), sequence)


def parse_header(data: bytes | memoryview) -> tuple[int, bool, int, int]:
    """(payload bytes, more pieces follow, checksum, sequence number)"""
    length, checksum, sequence = _HEADER.unpack(data[:HEADER_BYTES])
    return length & ~_MORE, bool(length & _MORE), checksum, sequence


def is_intact(payload: bytes, checksum: int, sequence: int) -> bool:
    return zlib.crc32(payload, sequence & 0xFFFFFFFF) == checksum
