"""A worker: the rank of one device, which repeats rank 0's steps as the control channel tells."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from nanovllm.parallel.lifeline import Lifeline
from nanovllm.parallel.progress import CollectiveError, Progress

if TYPE_CHECKING:
    import torch.distributed as dist

    from nanovllm.config import EngineConfig
    from nanovllm.loader.source import ModelSource
    from nanovllm.models.config import ModelConfig
    from nanovllm.parallel.group import Group
    from nanovllm.parallel.rendezvous import Meeting

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that a rank is made of. config and model_config are final: nothing is left to choose."""

    rank: int
    size: int
    device: str
    config: EngineConfig
    model_config: ModelConfig
    source: ModelSource
    is_local: bool  # all ranks are on one host


@dataclass(frozen=True, slots=True)
class Start:
    """What rank 0 sends to a process that it started."""

    spec: RankSpec
    meeting: Meeting
    channel_fd: int
    num_threads: int  # of torch, on the CPU


def process_main(connection_fd: int, parent: int, dies_with_parent: bool) -> None:
    """Entry point of a process that rank 0 started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if dies_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    connection = Connection(connection_fd)
    start = connection.recv_bytes()
    lifeline = Lifeline(connection, lambda: progress_of(), parent)

    def progress_of() -> Any:
        return None if progress is None else progress.as_tuple()

    progress = None

    def work() -> None:
        nonlocal progress
        import torch

        from nanovllm.parallel.ring import LONG_SPIN, SHORT_SPIN, RingReceiver

        progress = Progress()
        args: Start = pickle.loads(start)
        spec = args.spec
        if spec.device == "cpu":
            torch.set_num_threads(args.num_threads)
        spin = SHORT_SPIN if spec.device == "cpu" else LONG_SPIN
        receiver = RingReceiver(args.channel_fd, spec.size, spec.rank, spin)
        timeout = spec.config.distributed_timeout
        run_rank(spec, lambda: args.meeting.join(timeout), receiver.receive, lifeline, progress)

    status = guarded(work, lifeline)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without the interpreter's end, in which a broken device could wait for ever


def guarded(work: Callable[[], None], lifeline: Lifeline) -> int:
    """Runs a worker's work; what it raises goes to rank 0. Returns the exit status."""
    try:
        work()
    except BaseException as e:
        text = f"{type(e).__name__}: {e}"
        lifeline.report("error", isinstance(e, CollectiveError), text, traceback.format_exc())
        return 1
    return 0


def make_group(spec: RankSpec, progress: Progress) -> Group:
    """The group of the rank's device, not connected yet."""
    timeout = spec.config.distributed_timeout
    if spec.device == "cpu":
        from nanovllm.parallel.gloo import GlooGroup

        # Twice: rank 0's watcher, which knows who is stuck, ends a collective first.
        return GlooGroup(spec.rank, spec.size, progress, spec.is_local, 2 * timeout)
    from nanovllm.parallel.nccl import NcclGroup

    return NcclGroup(spec.rank, spec.size, progress, spec.is_local, spec.device)


def run_rank(
    spec: RankSpec,
    join: Callable[[], dist.Store],
    receive: Callable[[], bytes],
    lifeline: Lifeline,
    progress: Progress,
) -> None:
    """Loads this rank's part of the model, then repeats every step of rank 0 until that says EXIT.

    Args:
        join: gives the store where the ranks meet.
        receive: waits for the next message of rank 0.
    """
    import torch

    from nanovllm.engine.build import load_model
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.parallel import faults, messages
    from nanovllm.parallel.agreement import report_step
    from nanovllm.parallel.shards import rank_config

    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = make_group(spec, progress)
    fault = faults.of_rank(spec.rank, device)
    fault.at("start")
    progress.doing = "loading weights"
    model = load_model(spec.config, spec.model_config, spec.source, device, group)
    lifeline.report("loaded")
    progress.doing = "waiting for the other ranks"
    assert receive() == messages.GO
    group.connect(join())  # type: ignore[attr-defined]
    progress.doing = "warming up"
    local = rank_config(spec.model_config, spec.rank, spec.size)
    runner = ModelRunner(spec.config, local, model, device, spec.model_config.dtype, group)
    lifeline.report("ready")
    decoder = messages.StepDecoder()
    in_flight: deque[Any] = deque()
    while True:
        progress.doing = "waiting for a step"
        message = receive()
        if message == messages.EXIT:
            lifeline.end()
            return
        batch = decoder.decode(message)
        progress.step += 1
        progress.doing = "launching"
        fault.at("prefill" if batch.chunks else "decode")
        in_flight.append(runner.launch(batch))
        if spec.config.check_agreement:
            report_step(runner, batch, progress.step)
        if len(in_flight) > 1:  # as rank 0 does: a buffer may be used again when the step before is done
            progress.doing = "finishing a step"
            runner.collect(in_flight.popleft())
