"""Faults on demand, for tests: the variable NANOVLLM_FAULT=rank:when:what makes a worker fail.

when: start, prefill or decode (in the second such step, which the other ranks have begun); what: kill, stop (the
process), hang (its main thread only), raise or allocate.
"""

from __future__ import annotations

import os
import signal
import threading

import torch

VARIABLE = "NANOVLLM_FAULT"
WHENS = ("start", "prefill", "decode")
WHATS = ("kill", "stop", "hang", "raise", "allocate")
_STEP = {"start": 1, "prefill": 1, "decode": 2}
_ABSURD = 1 << 50  # bytes


class Fault:
    """What goes wrong, if anything, on this rank."""

    def __init__(self, when: str | None, what: str | None, device: torch.device) -> None:
        self._when, self._what, self._device = when, what, device
        self._seen = 0

    def at(self, when: str) -> None:
        """Called at the start, and before each step with its kind.

        Before, not within: a CUDA graph runs a step without this process. The other ranks wait in it all the same.
        """
        if when != self._when:
            return
        self._seen += 1
        if self._seen == _STEP[when]:
            self._fail()

    def _fail(self) -> None:
        if self._what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._what == "hang":
            threading.Event().wait()
        elif self._what == "allocate":
            torch.empty(_ABSURD, dtype=torch.uint8, device=self._device)
        else:
            raise ValueError(f"fault injected by {VARIABLE}")


def of_rank(rank: int, device: torch.device) -> Fault:
    """The fault that the environment asks of a rank.

    Raises:
        ValueError: the variable does not parse.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return Fault(None, None, device)
    chosen, _, rest = text.partition(":")
    when, _, what = rest.partition(":")
    if not chosen.isdecimal() or when not in WHENS or what not in WHATS:
        raise ValueError(f"{VARIABLE}: expected rank:({'|'.join(WHENS)}):({'|'.join(WHATS)}), got {text!r}")
    return Fault(when, what, device) if int(chosen) == rank else Fault(None, None, device)
