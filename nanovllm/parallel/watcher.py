"""Rank 0's watch over its workers: a thread that reads their reports and ends all of them when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from nanovllm.parallel.group import Group
from nanovllm.parallel.lifeline import TICK_SECONDS
from nanovllm.parallel.progress import CollectiveError, Progress, WorkerError

STAGES = ("started", "loaded", "ready", "ended")
_GRACE_SECONDS = 1.0  # for the rank that caused the failure of a collective to say so
_EXIT_SECONDS = 2.0
_STARTING = 60.0 / TICK_SECONDS  # more ticks: while a process imports torch, its threads may be silent for long


class RemoteTraceback(Exception):
    """A traceback of another process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:  # a real-time signal but the first and the last
            name = f"SIGRTMIN+{-status - signal.SIGRTMIN}" if -status > signal.SIGRTMIN else "unknown"
        return f"died of signal {-status} ({name})"
    return f"exited with status {status}"


class Watcher:
    """Knows of every worker its stage, its progress and whether it lives.

    Args:
        reports: the connection of each worker's Lifeline, by rank.
        processes: the worker processes by rank, where rank 0 started them.
        progress: rank 0's own.
        timeout: seconds without a sign of life, or without any progress of a step, after which a rank is stuck.
        group: rank 0's, whose waiting collectives a failure ends.
    """

    def __init__(
        self,
        reports: dict[int, Connection],
        processes: dict[int, subprocess.Popen[bytes]],
        progress: Progress,
        timeout: float,
        group: Group,
    ) -> None:
        self.failure: WorkerError | None = None
        self._pid = os.getpid()
        self._reports, self._processes, self._group = dict(reports), processes, group
        self._progress = {0: progress.as_tuple()} | dict.fromkeys(reports, (0, 0, "starting"))
        self._own_progress = progress
        self._stage = dict.fromkeys(reports, 0)
        self._timeout = timeout
        # Counted, not timed: a stopped rank 0 must not blame the others.
        self._quiet_ticks = dict.fromkeys(reports, 0)
        self._stopped_ticks = dict.fromkeys(reports, 0)  # of those, the last ones with the process stopped
        self._more_ticks = dict.fromkeys(reports, _STARTING)  # what a rank has beside the timeout
        self._stuck_ticks = 0
        self._is_waiting = False
        self._is_failing = self._is_closing = self._is_over = False
        self._secondary: tuple[float, WorkerError] | None = None  # when to give up looking for a better one
        self._changed = threading.Condition(threading.RLock())
        self._wake, self._woken = Pipe()
        self._thread = threading.Thread(target=self._run, name="nanovllm-watcher", daemon=True)
        self._thread.start()

    # Rank 0's main thread

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if os.getpid() != self._pid:  # the thread and the ranks are not there
            raise WorkerError(f"the engine was made by process {self._pid}: make another one after a fork")
        if self._is_failing:  # a collective was ended: what it left is not a result
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None, 2 * _GRACE_SECONDS)
        if self.failure is not None:
            raise self.failure

    def wait_for(self, stage: str) -> None:
        """Until every worker has reached a stage; raises the failure."""
        wanted = STAGES.index(stage)
        with self._changed:
            while self.failure is None and min(self._stage.values()) < wanted:
                self._changed.wait()
        self.check()

    @contextlib.contextmanager
    def watched(self) -> Any:
        """A part of a step, in which rank 0 may wait for the others. When it fails the engine has ended: with the
        failure of the worker that caused it, or with what rank 0 itself raised."""
        self.check()
        self._stuck_ticks = 0
        self._is_waiting = True
        try:
            yield
        except BaseException as e:
            self._is_waiting = False
            if isinstance(e, CollectiveError):
                with self._changed:
                    self._changed.wait_for(lambda: self.failure is not None, 2 * _GRACE_SECONDS)
            text = str(e) if isinstance(e, RuntimeError) else f"{type(e).__name__}: {e}"
            self.fail(WorkerError(f"the engine has ended: rank 0 raised {text}"), e)
            failure = self.failure
            if failure is None or failure.__cause__ is e or not isinstance(e, RuntimeError):
                raise
            raise failure from failure.__cause__
        self._is_waiting = False
        self.check()

    def fail(self, error: WorkerError, cause: BaseException | None) -> None:
        """Records the first failure and ends all workers."""
        with self._changed:
            if self.failure is not None or self._is_closing:
                return
            error.__cause__ = cause
            self.failure = error
        try:
            for process in self._processes.values():
                process.kill()
            self._group.abort()
            for process in self._processes.values():
                process.wait()
        finally:
            with self._changed:
                self._changed.notify_all()

    def close(self, say_exit: Callable[[], None]) -> None:
        """Ends the workers: asks them, waits, then kills. A second call does nothing."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        if self.failure is None:
            with contextlib.suppress(Exception):
                say_exit()
        deadline = time.monotonic() + _EXIT_SECONDS
        is_busy = self._is_waiting or min(self._stage.values()) < STAGES.index("ready")
        if not is_busy and threading.current_thread() is not self._thread:
            with self._changed:
                ended = STAGES.index("ended")
                self._changed.wait_for(lambda: self.failure or min(self._stage.values()) == ended, _EXIT_SECONDS)
        for process in self._processes.values():
            if is_busy:  # it would not read the message
                process.kill()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._is_over = True
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._woken.close()
        for connection in self._reports.values():
            connection.close()

    # The thread

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as e:  # without this thread nobody would end what waits
            self.fail(WorkerError(f"the engine has ended: its watcher raised {type(e).__name__}: {e}"), e)

    def _watch(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while not self._is_over and self.failure is None:
            ranks = {id(c): rank for rank, c in self._reports.items()}
            for connection in wait([*self._reports.values(), self._woken], TICK_SECONDS):
                rank = ranks.get(id(connection))
                if rank is not None:
                    self._read(rank, self._reports[rank])
            now = time.monotonic()
            if self._secondary is not None and now > self._secondary[0]:
                self.fail(self._secondary[1], self._secondary[1].__cause__)
            elif now > next_tick:
                next_tick = now + TICK_SECONDS
                self._tick()

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            kind, *content = connection.recv()
        except (EOFError, OSError):
            self._lost(rank)
            return
        self._quiet_ticks[rank] = 0
        self._more_ticks[rank] = 0
        if kind == "alive" and content[0] is None:
            self._more_ticks[rank] = _STARTING
        elif kind == "alive":
            self._see_progress(rank, content[0])
        elif kind == "error":
            is_collective, text, trace = content
            error = WorkerError(f"rank {rank} raised {text}")
            error.__cause__ = RemoteTraceback(trace)
            if is_collective:  # the rank that caused it is about to be heard of
                self._secondary = self._secondary or (time.monotonic() + _GRACE_SECONDS, error)
            else:
                self.fail(error, error.__cause__)
        else:
            self._reach(rank, kind)

    def _reach(self, rank: int, stage: str) -> None:
        with self._changed:
            self._stage[rank] = STAGES.index(stage)
            self._changed.notify_all()

    def _see_progress(self, rank: int, progress: tuple[int, int, str]) -> None:
        if progress != self._progress[rank]:
            self._progress[rank] = progress
            self._stuck_ticks = 0

    def _lost(self, rank: int) -> None:
        self._reports.pop(rank).close()
        if self._is_closing:
            self._reach(rank, "ended")
            return
        status = None
        if rank in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._processes[rank].wait(_GRACE_SECONDS)
        if self._secondary is not None and status == 1:
            return  # it has said why, or another one will
        step, _, doing = self._progress[rank]
        text = f"rank {rank} {_how_it_ended(status)} in step {step}, while {doing}"
        self.fail(WorkerError(text), None)

    def _tick(self) -> None:
        self._see_progress(0, self._own_progress.as_tuple())
        limit = self._timeout / TICK_SECONDS
        for rank in self._quiet_ticks:
            self._quiet_ticks[rank] += 1
            is_stopped = self._quiet_ticks[rank] > 1 and _is_stopped(self._processes.get(rank))
            self._stopped_ticks[rank] = self._stopped_ticks[rank] + 1 if is_stopped else 0
            if self._quiet_ticks[rank] > limit + self._more_ticks[rank] or self._stopped_ticks[rank] > limit:
                self._fail_stuck(rank, "gives no sign of life", self._quiet_ticks[rank])
                return
        self._stuck_ticks += 1
        if self._is_waiting and min(self._stage.values()) > 0 and self._stuck_ticks > limit:
            rank = min(self._progress, key=lambda r: self._progress[r][:2])
            self._fail_stuck(rank, "is stuck", self._stuck_ticks)

    def _fail_stuck(self, rank: int, how: str, ticks: int) -> None:
        self._is_failing = True
        missing = self._group.missing_rank()
        rank = rank if missing is None else missing
        step, collectives, doing = self._progress[rank]
        state = ", its process is stopped (SIGSTOP)" if _is_stopped(self._processes.get(rank)) else ""
        text = (
            f"rank {rank} {how} since {ticks * TICK_SECONDS:.3g} s (distributed_timeout={self._timeout:g}), last seen "
            f"in step {step}, while {doing}, at collective {collectives}{state}; rank 0 is in step "
            f"{self._own_progress.step}, while {self._own_progress.doing}, at collective "
            f"{self._own_progress.collectives}"
        )
        self.fail(WorkerError(text), None)


def _is_stopped(process: subprocess.Popen[bytes] | None) -> bool:
    """Whether a process of this host is stopped, by SIGSTOP or a debugger."""
    if process is None:
        return False
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):  # it ends just now
        return False
