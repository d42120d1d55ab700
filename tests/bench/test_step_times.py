"""Steps as they are written down, and the tables made of them."""

from types import SimpleNamespace

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.bench.engine import Throughput
from nanovllm.bench.report import profile_table
from nanovllm.bench.step_times import Step, StepTimes, breakdown, idle_share, record_steps
from nanovllm.engine.batch import Batch
from nanovllm.engine.observer import observe, unobserve
from tests.bench.small import small_llm  # noqa: F401


def test_steps_of_an_engine(small_llm: LLM) -> None:  # noqa: F811
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    with record_steps(small_llm.engine, device=True) as steps:
        small_llm.generate([[5] * 20, [6] * 33], params, use_tqdm=False)
    assert [s.kind for s in steps] == ["prefill"] + ["decode"] * 4
    assert steps[0].chunks == [(0, 20), (0, 33)] and steps[0].num_sampled == 2 and steps[0].num_tokens == 53
    assert [sorted(s.decode_ends) for s in steps[1:]] == [[21, 34], [22, 35], [36], [37]]
    for step in steps:
        assert min(step.schedule, step.launch, step.wait, step.collect) > 0
        assert step.device is None and step.idle is None, "no GPU"
    ends = [s.end for s in steps]
    assert ends == sorted(ends) and small_llm.engine.observer is None
    assert sum(s.schedule + s.launch + s.wait + s.collect for s in steps) <= ends[-1]


def test_an_observer_that_was_there_still_sees_every_step(small_llm: LLM) -> None:  # noqa: F811
    events: list[dict] = []
    sink = events.append
    observe(small_llm.engine, sink)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with record_steps(small_llm.engine, device=False) as steps:
        small_llm.generate([[5] * 20], params, use_tqdm=False)
    unobserve(small_llm.engine, sink)
    assert len([e for e in events if e["kind"] == "step"]) == len(steps) == 3
    assert small_llm.engine.observer is None


def test_device_times_with_a_step_in_flight() -> None:
    """Events of a made-up device: steps of 5, 7 and 4 ms that begin at 0, 5 and 15: idle for 3 ms before the third."""

    class Start:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def elapsed_time(self, other: "Start") -> float:
            return other.ms - self.ms

    def handle(start: float, ms: float) -> SimpleNamespace:
        return SimpleNamespace(start=Start(start), device_seconds=lambda: ms * 1e-3)

    times, handles = StepTimes(), [handle(0, 5), handle(5, 7), handle(15, 4)]
    batch = Batch(decodes=[None], decode_ends=[9])  # type: ignore[list-item]
    for launched, collected in ((True, None), (True, 0), (True, 1), (False, 2)):
        times.step_begins()
        times.scheduled(batch if launched else Batch())
        times.launched()
        if collected is not None:
            times.collected(batch, handles[collected])
        times.step_ends([])
    assert [s.device for s in times.steps] == [0.005, 0.007, 0.004]
    assert [s.idle for s in times.steps] == [None, 0.0, pytest.approx(0.003)]
    assert idle_share(times.steps) == pytest.approx(3 / 19)
    text = profile_table(Throughput(1, 1, 3, 1.0, 1.0, 3.0, times.steps))
    heads, decode, total, last = text.splitlines()[1:]
    assert heads.split() == ["kind", "steps", "tokens", "schedule", "launch", "wait", "collect", "device", "idle"]
    assert decode.split()[:3] == ["decode", "3", "1"] and decode.split()[-2:] == ["5,333", "1,000"]
    assert total.split()[1:] == decode.split()[1:] and last == "GPU idle: 15.8%"


def test_breakdown_by_kind() -> None:
    prefill = Step([], [(0, 10), (4, 8)], 1, launch=2e-3)
    mixed = Step([5, 6], [(0, 3)], 3, launch=4e-3)
    decodes = [Step([7], [], 1, launch=ms * 1e-3) for ms in (1, 3)]
    rows = {row["kind"]: row for row in breakdown([prefill, mixed, *decodes])}
    assert [(k, r["steps"], r["tokens"]) for k, r in rows.items()] == [
        ("prefill", 1, 14),
        ("mixed", 1, 5),
        ("decode", 2, 1),
        ("all", 4, 5.25),
    ]
    assert rows["decode"]["launch"] == pytest.approx(2000) and rows["all"]["launch"] == pytest.approx(2500)
    assert "device" not in rows["all"] and idle_share(decodes) is None
