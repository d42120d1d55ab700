"""The engine's step graphs on CPU: replaying one runs its step again, on the same inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

    step: Callable[[], tuple[Tensor, Tensor]]
    token_ids: Tensor
    logits: Tensor
    num_replays: int = field(default=-1, init=False)  # the first one, of the capture, does not count

    def replay(self) -> None:
        self.num_replays += 1
        token_ids, logits = self.step()
        self.token_ids.copy_(token_ids)
        self.logits.copy_(logits)


def capture(step: Callable[[], tuple[Tensor, Tensor]], pool: Any) -> tuple[RepeatedStep, Tensor, Tensor]:
    token_ids, logits = (tensor.clone() for tensor in step())
    return RepeatedStep(step, token_ids, logits), token_ids, logits


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
        graph = launch(bucket, *args)
        # On CUDA the runner copies them to the host before the next replay.
        return replace(graph, token_ids=graph.token_ids.clone())

    return call
