"""Faults on demand, for tests: the variable NANOVLLM_FAULT=rank:when:what makes a worker fail.

when: start, prefill or decode (inside the forward of the second such step); what: kill, stop, raise or allocate.
"""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor

from nanovllm.parallel.group import Group

VARIABLE = "NANOVLLM_FAULT"
WHENS = ("start", "prefill", "decode")
WHATS = ("kill", "stop", "raise", "allocate")
_STEP = {"start": 1, "prefill": 1, "decode": 2}
_ABSURD = 1 << 50  # bytes


class Fault:
    """What goes wrong, if anything, on this rank."""

    def __init__(self, when: str | None, what: str | None, group: Group) -> None:
        self._when, self._what, self._group = when, what, group
        self._seen = 0

    def at(self, when: str) -> None:
        """Called at the start, and before each step with its kind."""
        if when != self._when:
            return
        self._seen += 1
        if self._seen != _STEP[when]:
            return
        if when == "start" or self._group.size == 1:
            self._fail()
            return
        reduce = self._group.all_reduce

        def fail_first(x: Tensor) -> Tensor:
            self._fail()
            return reduce(x)

        self._group.all_reduce = fail_first  # type: ignore[method-assign]

    def _fail(self) -> None:
        if self._what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._what == "allocate":
            torch.empty(_ABSURD, dtype=torch.uint8)
        else:
            raise ValueError(f"fault injected by {VARIABLE}")


def of_rank(rank: int, group: Group) -> Fault:
    """The fault that the environment asks of a rank.

    Raises:
        ValueError: the variable does not parse.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return Fault(None, None, group)
    chosen, _, rest = text.partition(":")
    when, _, what = rest.partition(":")
    if not chosen.isdecimal() or when not in WHENS or what not in WHATS:
        raise ValueError(f"{VARIABLE}: expected rank:({'|'.join(WHENS)}):({'|'.join(WHATS)}), got {text!r}")
    return Fault(when, what, group) if int(chosen) == rank else Fault(None, None, group)
