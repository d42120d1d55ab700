"""Where a rank is: which step, and which collective of it. Read by the thread that tells the others."""

from __future__ import annotations

from dataclasses import dataclass


class CollectiveError(RuntimeError):
    """A collective failed; most often because another rank did, which then says why."""


class WorkerError(RuntimeError):
    """A worker raised, died or hangs: the engine has ended. The text names the rank; `__cause__` has its traceback."""


@dataclass(slots=True)
class Progress:
    """Counts what a rank has begun since it started, so that ranks can be compared."""

    step: int = 0
    collectives: int = 0
    doing: str = "starting"

    def __str__(self) -> str:
        return f"step {self.step}, {self.doing}, {self.collectives} collectives begun"

    def as_tuple(self) -> tuple[int, int, str]:
        return self.step, self.collectives, self.doing
