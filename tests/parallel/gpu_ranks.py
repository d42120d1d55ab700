"""Ranks as processes with a GPU each, for tests and benchmarks of collectives."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from nanovllm.parallel.nccl import NcclGroup
from nanovllm.parallel.progress import Progress
from nanovllm.parallel.rendezvous import LogStore


def _rank_main(connection: Connection, path: str, rank: int, size: int, work: Callable[..., Any], args: tuple) -> None:
    try:
        torch.cuda.set_device(rank)
        group = NcclGroup(rank, size, Progress(), True, f"cuda:{rank}")
        group.connect(LogStore(os.open(path, os.O_RDWR)))
        with torch.inference_mode():
            result = work(group, *args)
        torch.cuda.synchronize()
        connection.send((True, result))
        connection.recv()  # until all ranks are done: nobody unmaps what another still writes to
        group.close()
    except BaseException:
        connection.send((False, traceback.format_exc()))
    os._exit(0)


def run_gpu_ranks(path: str, size: int, work: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
    """work(group, *args) on every rank; the results by rank. path: of a new file.

    Raises:
        RuntimeError: a rank failed, with its traceback, or does not end in `timeout` seconds.
    """
    open(path, "x").close()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_rank_main, args=(theirs, path, rank, size, work, args), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        results, deadline = [], time.monotonic() + timeout
        for rank, (mine, _) in enumerate(pipes):
            if not mine.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} has not ended within {timeout} s")
            ok, result = mine.recv()
            if not ok:
                raise RuntimeError(f"rank {rank}:\n{result}")
            results.append(result)
        for mine, _ in pipes:
            mine.send(None)
        for process in processes:
            process.join(30)
        return results
    finally:
        for process in processes:
            process.kill()
