"""Where the ranks of a group first meet: a torch.distributed store, with neither a fixed port nor a fixed name."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from nanovllm.parallel.ring import anonymous_file

_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def external_rank(method: str, num_ranks: int) -> int | None:
    """This process's rank where a launcher such as torchrun started all of them; None: the engine starts the others.

    Raises:
        ValueError: env:// without the launcher's variables, or a launcher with another number of processes.
    """
    missing = [name for name in _ENV if name not in os.environ]
    if method == "env://" and missing:
        raise ValueError(
            f"distributed_init_method: env:// expects the variables {', '.join(_ENV)}, got no {missing[0]}"
        )
    if method not in ("auto", "env://") or missing:
        return None
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != num_ranks:
        if method == "auto" and world_size == 1:
            return None
        raise ValueError(f"tensor_parallel_size: expected {world_size}, the launcher's WORLD_SIZE, got {num_ranks}")
    return int(os.environ["RANK"])


class LogStore(dist.Store):
    """A store in an open file, which may have no name: records of key and value, one after the other.

    torch's own FileStore needs the path of a file until its destructor has run, and leaves the file behind.
    """

    _LENGTHS = struct.Struct("<II")  # bytes of key and value

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def set(self, key: str, value: str | bytes) -> None:
        record = [part.encode() if isinstance(part, str) else bytes(part) for part in (key, value)]
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            end = os.fstat(self._fd).st_size
            os.pwrite(self._fd, self._LENGTHS.pack(*map(len, record)) + b"".join(record), end)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _records(self) -> dict[str, bytes]:
        data, place, records = os.pread(self._fd, os.fstat(self._fd).st_size, 0), 0, {}
        while place + self._LENGTHS.size <= len(data):
            key, value = self._LENGTHS.unpack_from(data, place)
            middle = place + self._LENGTHS.size + key
            place = middle + value
            if place <= len(data):
                records[data[middle - key : middle].decode()] = data[middle:place]
        return records

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._records()[key]

    def check(self, keys: list[str]) -> bool:
        return self._records().keys() >= set(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises RuntimeError when the keys are not all there in time."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"rendezvous: timed out, missing {', '.join(set(keys) - self._records().keys())}")
            time.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Meeting:
    """How a worker process reaches the store: a LogStore in the inherited file `fd`, or a TCPStore at host and port."""

    num_ranks: int
    fd: int | None = None
    host: str = ""
    port: int = 0

    def join(self, timeout: float) -> dist.Store:
        if self.fd is not None:
            return LogStore(self.fd)
        return dist.TCPStore(self.host, self.port, self.num_ranks, False, timedelta(seconds=timeout))


class Host:
    """Rank 0's end: makes the store and says how to reach it. `fds` must be passed on to the workers."""

    def __init__(self, method: str, num_ranks: int, timeout: float) -> None:
        self.fds: tuple[int, ...] = ()
        self._file: Path | None = None
        if method.startswith("tcp:"):
            url = urlsplit(method)
            host, wait = url.hostname or "", timedelta(seconds=timeout)
            store = dist.TCPStore(host, url.port or 0, num_ranks, True, wait, wait_for_workers=False)
            self.store, self.meeting = store, Meeting(num_ranks, host=host, port=store.port)
            return
        if method.startswith("file:"):
            self._file = Path(urlsplit(method).path)
            fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        else:
            fd = anonymous_file("nanovllm-store")
        self.fds = (fd,)
        self.store, self.meeting = LogStore(fd), Meeting(num_ranks, fd=fd)

    def close(self) -> None:
        """When all ranks have met, or never will."""
        for fd in self.fds:
            os.close(fd)
        self.fds = ()
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def external_store(timeout: float) -> dist.Store:
    """The store of the launcher that started this process."""
    return next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))[0]
