"""Rank 0's side of tensor parallelism: starts the other ranks, leads them through every step, and ends them."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from multiprocessing.spawn import get_executable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nanovllm.engine.batch import Batch
from nanovllm.outputs import Logprob
from nanovllm.parallel import frames, messages, rendezvous
from nanovllm.parallel.agreement import report_step
from nanovllm.parallel.lifeline import Lifeline
from nanovllm.parallel.progress import Progress, WorkerError
from nanovllm.parallel.ring import RingSender, create_memory
from nanovllm.parallel.watcher import Watcher
from nanovllm.parallel.worker import RankSpec, Start, guarded, make_group, run_rank

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.loader.source import ModelSource
    from nanovllm.models.config import ModelConfig

_ADDRESS_KEY = "nanovllm-address"
_GREETING_SECONDS = 2  # that one who connects has to say who it is; the others wait
_LATE_SECONDS = 60.0  # beside the timeout, that a launcher's ranks may come one after the other


class Team:
    """All ranks of an engine, seen from rank 0.

    Use: make it, load rank 0's part of the model for `group`, connect(), make the ModelRunner within watched(), and
    wrap it in a ParallelRunner. close() ends the workers; so do the collection of this object, the end of the
    interpreter and that of the process itself.

    Args:
        specs: what each rank is made of, in the order of ranks.
        is_external: the other ranks were started by a launcher such as torchrun, and come to its store.
    """

    def __init__(self, specs: list[RankSpec], is_external: bool) -> None:
        config = specs[0].config
        self.progress = Progress()
        self.group = make_group(specs[0], self.progress)
        start = _accept_ranks if is_external else _start_ranks
        watchers: list[Watcher] = []  # what ends the workers must not keep this alive
        self._store, meeting_over, sender, reports, processes = start(specs, lambda: watchers[0].check())
        self._meeting_over = meeting_over
        self.send = sender
        group, pid = self.group, os.getpid()
        self.watcher = Watcher(reports, processes, self.progress, config.distributed_timeout, group)
        watchers.append(watcher := self.watcher)

        def end() -> None:
            if os.getpid() == pid:  # not in a process forked from this one
                watcher.close(lambda: sender(messages.EXIT))
                group.close()
                meeting_over()

        self.close = weakref.finalize(self, end)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While rank 0 loads its weights: nobody waits for it, and what it raises is its own."""
        self.progress.doing = "loading weights"
        yield
        self.watcher.check()

    def connect(self) -> None:
        """When rank 0 has its weights: waits for the others, and joins with them."""
        self.progress.doing = "waiting for the other ranks' weights"
        self.watcher.wait_for("loaded")
        self.send(messages.GO)
        with self.watcher.watched():
            self.group.connect(self._store)  # type: ignore[attr-defined]
        self._meeting_over()


def rank_specs(
    config: EngineConfig, model_config: ModelConfig, source: ModelSource, device: torch.device, is_external: bool
) -> list[RankSpec]:
    """What every rank is made of. On CUDA, rank r has the r-th device from rank 0's on or, where a launcher started the
    ranks, each the device of its LOCAL_RANK."""
    size = config.tensor_parallel_size
    is_local = not is_external or os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    devices = ["cpu"] * size
    if device.type == "cuda":
        count = torch.cuda.device_count()
        first = int(os.environ["LOCAL_RANK"]) - int(os.environ["RANK"]) if is_external else device.index or 0
        devices = [f"cuda:{(first + rank) % count}" for rank in range(size)]
    return [RankSpec(r, size, devices[r], config, model_config, source, is_local) for r in range(size)]


Parts = tuple[
    dist.Store,
    Callable[[], None],
    Callable[[bytes], None],
    dict[int, Connection],
    dict[int, "subprocess.Popen[bytes]"],
]


def _start_ranks(specs: list[RankSpec], check: Callable[[], None]) -> Parts:
    """Starts ranks 1.. on this host. Returns the store, what to call when all have met, how to send them a message,
    and their report connections and processes."""
    config = specs[0].config
    size = len(specs)
    host = rendezvous.Host(config.distributed_init_method, size, config.distributed_timeout)
    channel_fd = create_memory(size)
    reports: dict[int, Connection] = {}
    processes: dict[int, subprocess.Popen[bytes]] = {}
    threads = max(1, torch.get_num_threads() // size)
    try:
        sender = RingSender(channel_fd, size, check)
        for spec in specs[1:]:
            reports[spec.rank], theirs = Pipe()
            processes[spec.rank] = _start_process(theirs.fileno(), (channel_fd, *host.fds))
            theirs.close()
        for spec in specs[1:]:
            start = Start(spec, host.meeting, channel_fd, threads)
            with contextlib.suppress(OSError):  # it died: the watcher says how
                reports[spec.rank].send_bytes(pickle.dumps(start))
    except BaseException:
        for process in processes.values():
            process.kill()
            process.wait()
        host.close()
        raise
    finally:
        os.close(channel_fd)
    return host.store, host.close, sender.send, reports, processes


def _start_process(connection_fd: int, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """A new interpreter in worker.process_main. The user's script is not run again, so it needs no main guard."""
    is_main = threading.current_thread() is threading.main_thread()  # the death signal is that of the starting thread
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from nanovllm.parallel.worker import process_main; "
        f"process_main({connection_fd}, {os.getpid()}, {is_main})"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C must not hit its start
    try:
        command = [os.fsdecode(get_executable()), "-c", code]
        return subprocess.Popen(command, pass_fds=(connection_fd, *fds), stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _accept_ranks(specs: list[RankSpec], check: Callable[[], None]) -> Parts:
    """As _start_ranks, for ranks that a launcher started: each connects twice, for messages and for its reports.

    Raises:
        WorkerError: some have not come in time.
    """
    del check
    seconds = specs[0].config.distributed_timeout + _LATE_SECONDS
    store = rendezvous.external_store(seconds)
    key = secrets.token_hex(16)
    commands: dict[int, Connection] = {}
    reports: dict[int, Connection] = {}
    deadline = time.monotonic() + seconds
    with socket.create_server((os.environ["MASTER_ADDR"], 0), backlog=2 * len(specs)) as server:
        host, port = server.getsockname()
        store.set(_ADDRESS_KEY, f"{host} {port} {key}")
        while missing := [spec.rank for spec in specs[1:] if not (spec.rank in commands and spec.rank in reports)]:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                names = " and ".join(f"rank {rank}" for rank in missing)
                raise WorkerError(f"{names} did not come to {host}:{port} within {seconds:g} s") from None
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step's message waits for no acknowledgement
            _limit_reads(peer.fileno(), _GREETING_SECONDS)
            connection = Connection(peer.detach())
            with contextlib.suppress(AuthenticationError, EOFError, OSError):  # somebody else's, or one that died
                deliver_challenge(connection, key.encode())
                answer_challenge(connection, key.encode())
                rank, purpose = connection.recv()
                _limit_reads(connection.fileno(), 0)
                (commands if purpose == "commands" else reports)[rank] = connection
    sequence = 0

    def send(message: bytes) -> None:
        nonlocal sequence
        frame = frames.header(message, sequence, False) + message
        sequence += 1
        for connection in commands.values():
            with contextlib.suppress(OSError):  # the watcher sees why
                connection.send_bytes(frame)

    return store, lambda: None, send, reports, {}


def _limit_reads(fd: int, seconds: int) -> None:
    """Reads of a socket that wait longer raise BlockingIOError; 0: they wait without end."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def serve_external_rank(spec: RankSpec) -> int:
    """The life of a rank above 0 that a launcher started; returns the exit status."""
    # Beside rank 0, which gets the same signals and ends this rank when it has finished. Only main threads can say so.
    if os.environ.get("LOCAL_RANK") == str(spec.rank) and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    seconds = spec.config.distributed_timeout + _LATE_SECONDS
    store = rendezvous.external_store(seconds)
    try:
        host, port, key = store.get(_ADDRESS_KEY).decode().split()
    except dist.DistStoreError as e:
        raise WorkerError(f"rank 0 did not come within {seconds:g} s") from e

    def connect(purpose: str) -> Connection:
        connection = Client((host, int(port)), authkey=key.encode())
        connection.send((spec.rank, purpose))
        return connection

    commands, reports = connect("commands"), connect("reports")
    progress = Progress()
    lifeline = Lifeline(reports, progress.as_tuple, None)
    sequence = 0

    def receive() -> bytes:
        nonlocal sequence
        try:
            frame = commands.recv_bytes()
        except EOFError:
            os._exit(1)  # rank 0 is gone
        _, _, checksum, number = frames.parse_header(frame)
        message = frame[frames.HEADER_BYTES :]
        if number != sequence or not frames.is_intact(message, checksum, number):
            raise frames.FrameError(f"control channel: expected frame {sequence}, got {number} or a wrong checksum")
        sequence += 1
        return message

    return guarded(lambda: run_rank(spec, lambda: store, receive, lifeline, progress), lifeline)


class ParallelRunner:
    """nanovllm.engine.llm_engine.Runner of several ranks: tells the workers of each step before rank 0 runs it.

    What else is asked of it, by benchmarks and observers, is rank 0's own.
    """

    def __init__(self, runner: ModelRunner, team: Team) -> None:
        self.runner, self._team = runner, team
        self.num_kvcache_blocks = runner.num_kvcache_blocks

    def launch(self, batch: Batch) -> Any:
        self._team.watcher.check()
        message = messages.encode_step(batch)
        progress = self._team.progress
        progress.step += 1
        with self._team.watcher.watched():
            self._team.send(message)
            progress.doing = "launching"
            handle = self.runner.launch(batch)
            if self.runner.config.check_agreement:
                report_step(self.runner, batch, progress.step)
        return handle

    def collect(self, handle: Any) -> tuple[list[int], dict[int, dict[int, Logprob]]]:
        self._team.progress.doing = "finishing a step"
        with self._team.watcher.watched():
            return self.runner.collect(handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["runner"], name)

    @property
    def times_steps(self) -> bool:
        """Whether rank 0's steps are timed on the device."""
        return self.runner.times_steps

    @times_steps.setter
    def times_steps(self, value: bool) -> None:
        self.runner.times_steps = value

    def check_health(self) -> None:
        """Raises the WorkerError of an engine that has ended."""
        self._team.watcher.check()

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        self.runner.close()
        self._team.close()


@contextlib.contextmanager
def closed_on_error(team: Team) -> Iterator[Team]:
    """A half-built engine leaves no process behind."""
    try:
        yield team
    except BaseException:
        team.close()
        raise
