"""The engine's step graphs on CPU: replaying one runs its step again, on the same inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.engine import step_graphs
from nanovllm.engine.staging import FixedInputs


@dataclass
class RepeatedStep:
    """What stands for torch.cuda.CUDAGraph."""

    step: Callable[[], Tensor]
    logits: Tensor
    num_replays: int = field(default=-1, init=False)  # the first one, of the capture, does not count

    def replay(self) -> None:
        self.num_replays += 1
        self.logits.copy_(self.step())


def capture(step: Callable[[], Tensor], pool: Any) -> tuple[RepeatedStep, Tensor]:
    logits = step().clone()
    return RepeatedStep(step, logits), logits


def use_graphs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[Any, int]]:
    """Makes llm, on CPU, run its steps as it would from CUDA graphs; returns how often each bucket was replayed, which
    is filled as the engine runs."""
    runner = llm.engine.runner
    monkeypatch.setattr(step_graphs, "capture", capture)
    runner.inputs = FixedInputs(1 << 17, torch.device("cpu"))
    runner.graphs = [step_graphs.DecodeGraphs(runner, None), step_graphs.MixedGraphs(runner, None)]
    replays: dict[str, dict[Any, int]] = {}
    for graphs in runner.graphs:
        graphs.capture()
        counts = replays[type(graphs).__name__] = dict.fromkeys(graphs.buckets, 0)
        monkeypatch.setattr(graphs, "launch", _counted(graphs.launch, counts))
    return replays


def _counted(launch: Callable, counts: dict[Any, int]) -> Callable:
    def call(bucket: Any, *args: Any) -> Any:
        counts[bucket] += 1
        return launch(bucket, *args)

    return call
