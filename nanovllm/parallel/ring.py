"""The control channel on one host: a ring in anonymous shared memory, written by rank 0 and read by every worker.

The memory has no name: it is passed to the workers as a file descriptor, and is gone when the last of them is. Bytes
0..3 are the word that readers wait for, bytes 8..15 the bytes written so far; rank r's line at 64 r has the bytes that
it has read. The ring follows. A message is one frame or several: there is no limit to its length.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable

from nanovllm.parallel import frames
from nanovllm.parallel.futex import Futex

_LINE = 64  # bytes: each rank's counter has a cache line of its own
_RING_BYTES = 1 << 20
_MAX_PIECE = _RING_BYTES // 4
_WRAP = b"\xff" * 4  # in place of a frame's length: the next frame is at the start of the ring
SHORT_SPIN, LONG_SPIN = 50e-6, 20e-3  # seconds: where ranks share cores, and where each GPU has some of its own
_FULL_SECONDS = 100e-6  # between looks at a full ring
_TORN_READS = 1000  # retries of a checksum before a frame counts as damaged: memory may become visible out of order


def anonymous_file(label: str) -> int:
    """File descriptor of an empty file without a name, of which nothing can be left behind; the caller closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def create_memory(num_ranks: int) -> int:
    """File descriptor of memory for a channel; the caller closes it."""
    fd = anonymous_file("nanovllm-channel")
    os.ftruncate(fd, num_ranks * _LINE + _RING_BYTES)
    return fd


class _Ring:
    def __init__(self, fd: int, num_ranks: int) -> None:
        self._memory = mmap.mmap(fd, num_ranks * _LINE + _RING_BYTES)
        self._counters = memoryview(self._memory)[: num_ranks * _LINE].cast("Q")
        self._ring = memoryview(self._memory)[num_ranks * _LINE :]
        self._futex = Futex(self._memory, 0)
        self._sequence = 0

    @staticmethod
    def _aligned(size: int) -> int:
        return -(-size // 8) * 8


class RingSender(_Ring):
    """Rank 0's end. `check` is called while the ring is full; it raises when the readers will not empty it."""

    def __init__(self, fd: int, num_ranks: int, check: Callable[[], None]) -> None:
        super().__init__(fd, num_ranks)
        self._tails = [rank * _LINE // 8 for rank in range(1, num_ranks)]
        self._written = 0
        self._check = check

    def send(self, message: bytes) -> None:
        """Hands the message to every worker; returns without waiting for them unless the ring is full."""
        view = memoryview(message)
        for first in range(0, max(len(view), 1), _MAX_PIECE):
            self._send_piece(view[first : first + _MAX_PIECE], first + _MAX_PIECE < len(view))

    def _send_piece(self, piece: memoryview, more: bool) -> None:
        size = self._aligned(frames.HEADER_BYTES + len(piece))
        place = self._written % _RING_BYTES
        skipped = _RING_BYTES - place if place + size > _RING_BYTES else 0
        self._wait_for_space(skipped + size)
        if skipped:
            self._ring[place : place + 4] = _WRAP
            place = 0
        payload = place + frames.HEADER_BYTES
        self._ring[payload : payload + len(piece)] = piece
        self._ring[place:payload] = frames.header(piece, self._sequence, more)
        self._sequence += 1
        self._written += skipped + size
        self._counters[1] = self._written
        self._futex.value += 1
        self._futex.wake()

    def _wait_for_space(self, size: int) -> None:
        while self._written + size - min(self._counters[i] for i in self._tails) > _RING_BYTES:
            self._check()
            time.sleep(_FULL_SECONDS)


class RingReceiver(_Ring):
    """A worker's end.

    Args:
        spin: seconds for which it looks again and again before it sleeps, where the last message came that soon.
    """

    def __init__(self, fd: int, num_ranks: int, rank: int, spin: float = SHORT_SPIN) -> None:
        super().__init__(fd, num_ranks)
        self._tail = rank * _LINE // 8
        self._read = 0
        self._spin_ns, self._spins = int(spin * 1e9), False

    def receive(self) -> bytes:
        """The next message, when it is there.

        Raises:
            FrameError: it is damaged.
        """
        piece, more = self._receive_piece()
        if not more:
            return piece
        pieces = [piece]
        while more:
            piece, more = self._receive_piece()
            pieces.append(piece)
        return b"".join(pieces)

    def _receive_piece(self) -> tuple[bytes, bool]:
        self._wait()
        place = self._read % _RING_BYTES
        for _ in range(_TORN_READS):
            if _RING_BYTES - place < frames.HEADER_BYTES or self._ring[place : place + 4] == _WRAP:
                self._read += _RING_BYTES - place
                place = 0
            length, more, checksum, sequence = frames.parse_header(self._ring[place:])
            payload = place + frames.HEADER_BYTES
            piece = bytes(self._ring[payload : payload + min(length, _MAX_PIECE)])
            if sequence == self._sequence and frames.is_intact(piece, checksum, sequence):
                break
        else:
            raise frames.FrameError(
                f"control channel: expected frame {self._sequence} with checksum {checksum:#x}, got frame {sequence} "
                f"of {length} bytes"
            )
        self._sequence += 1
        self._read += self._aligned(frames.HEADER_BYTES + length)
        self._counters[self._tail] = self._read
        return piece, more

    def _wait(self) -> None:
        """Until something is there. Spins first where that would have sufficed the last time, else sleeps at once."""
        start = time.perf_counter_ns()
        while self._spins and self._counters[1] == self._read and time.perf_counter_ns() - start < self._spin_ns:
            os.sched_yield()
        while True:
            seen = self._futex.value
            if self._counters[1] != self._read:
                break
            self._futex.wait(seen)
        self._spins = time.perf_counter_ns() - start < self._spin_ns
