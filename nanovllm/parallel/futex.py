"""Waiting for a word of shared memory to change, without polling."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_SYSCALL = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 0, 1
_POLL_SECONDS = 50e-6  # where there is no futex
_EVERYBODY = 2**31 - 1


class Futex:
    """The 32-bit word at `offset` of a shared mapping; processes that map it wait for it and wake each other."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._call = ctypes.CDLL(None, use_errno=True).syscall if _SYSCALL is not None else None

    @property
    def value(self) -> int:
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value & 0xFFFFFFFF

    def wake(self) -> None:
        """Wakes every process that waits."""
        if self._call is not None:
            self._call(_SYSCALL, self._address, _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seen: int) -> None:
        """Returns at once when the word is not `seen`, else when it is woken, or before that for no reason."""
        if self._call is not None:
            self._call(_SYSCALL, self._address, _WAIT, ctypes.c_uint32(seen), None, None, 0)
        else:
            time.sleep(_POLL_SECONDS)
