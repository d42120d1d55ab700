"""Load on a server: arrivals, latencies of every request, and what they come to."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nanovllm.bench.http_stream import Endpoint, HttpError

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend"
)
PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True, frozen=True)
class Load:
    """How requests arrive.

    Args:
        request_rate: requests per second, with exponential gaps (a Poisson process); inf: all at once.
        max_concurrency: requests that run at the same time at most; later ones wait, and their wait is not counted.
        timeout: seconds for one request.
    Raises:
        ValueError: a value is not positive.
    """

    request_rate: float = math.inf
    max_concurrency: int | None = None
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("request_rate", "max_concurrency", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")


@dataclass(slots=True)
class Record:
    """What happened to one request; times in seconds.

    ttft, e2e: from its start to the first and the last piece of its answer; itl: gaps between pieces, each of which may
    have several tokens; the token counts are the server's own where it tells them.
    """

    start: float  # since the first one
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def random_bodies(
    num_prompts: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int
) -> list[dict[str, Any]]:
    """Prompts of random words, about a token each, with lengths uniform in the closed ranges.

    Raises:
        ValueError: num_prompts or a range is not positive, or a range is empty.
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts: expected at least 1, got {num_prompts}")
    for name, (low, high) in (("input_len", input_len), ("output_len", output_len)):
        if not 1 <= low <= high:
            raise ValueError(f"{name}: expected 1 <= MIN <= MAX, got {low} {high}")
    rng, words = random.Random(seed), _WORDS.split()
    return [
        {"prompt": " ".join(rng.choices(words, k=rng.randint(*input_len))), "max_tokens": rng.randint(*output_len)}
        for _ in range(num_prompts)
    ]


def bodies_from_lines(lines: Sequence[str], num_prompts: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests of a file: a line is a prompt, or a JSON object with "prompt" or "messages" and any other fields. They
    repeat until there are num_prompts.

    Raises:
        ValueError: no lines, or an object with neither.
    """
    bodies = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        body = json.loads(line) if line.lstrip().startswith("{") else {"prompt": line.strip()}
        if not ("prompt" in body or "messages" in body):
            raise ValueError(f'prompts: expected "prompt" or "messages" in line {number}, got {", ".join(body)}')
        bodies.append({"max_tokens": max_tokens} | body)
    if not bodies:
        raise ValueError("prompts: expected at least one line, got none")
    return [bodies[i % len(bodies)] for i in range(num_prompts)]


def as_request(body: dict[str, Any], kind: str, common: dict[str, Any]) -> dict[str, Any]:
    """A streamed request of PATHS[kind]."""
    body = common | body | {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat" and "messages" not in body:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    if kind == "completions" and "prompt" not in body:
        raise ValueError('prompts: expected "prompt" for completions, got "messages"')
    return body


async def run(
    endpoint: Endpoint,
    path: str,
    bodies: list[dict[str, Any]],
    load: Load,
    on_done: Callable[[Record], None] = lambda record: None,
) -> tuple[list[Record], float]:
    """Sends all requests as `load` says; their records, and the seconds from the first start to the last end."""
    rng = random.Random(load.seed)
    slots = asyncio.Semaphore(load.max_concurrency or len(bodies))
    begin = time.perf_counter()

    async def one(body: dict[str, Any]) -> Record:
        async with slots:
            record = Record(time.perf_counter() - begin)
            try:
                await asyncio.wait_for(_measure(endpoint, path, body, record), load.timeout)
            except asyncio.TimeoutError:
                record.error = f"no end within {load.timeout:g} seconds"
            except (HttpError, OSError, ValueError, LookupError, TypeError) as e:  # also of events of another form
                record.error = f"{type(e).__name__}: {e}"
        on_done(record)
        return record

    tasks = []
    due = begin
    for body in bodies:
        if math.isfinite(load.request_rate):
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            due += rng.expovariate(load.request_rate)
        tasks.append(asyncio.create_task(one(body)))
    records = list(await asyncio.gather(*tasks))
    return records, time.perf_counter() - begin


async def _measure(endpoint: Endpoint, path: str, body: dict[str, Any], record: Record) -> None:
    start = time.perf_counter()
    times: list[float] = []  # of pieces of the answer
    is_done = False
    async for now, events in endpoint.events(path, body):
        for data in events:
            if data == b"[DONE]":
                is_done = True
                continue
            if b'"error"' in data[:12]:
                raise HttpError(200, data.decode(errors="replace")[:500])
            if b'"usage":{' in data or b'"usage": {' in data:
                usage = json.loads(data)["usage"]
                record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            elif not (b'"role"' in data and (b'"content":""' in data or b'"content": ""' in data)):
                times.append(now)
    if not times:
        raise ValueError("the answer has no token")
    if not is_done:
        raise ConnectionError("the stream ended without [DONE]")
    record.output_tokens = record.output_tokens or len(times)
    record.ttft, record.e2e = times[0] - start, times[-1] - start
    record.itl = [b - a for a, b in itertools.pairwise(times)]


def percentile(values: Sequence[float], share: float) -> float:
    """The share-th percentile, between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, in milliseconds."""
    if not values:
        return {}
    ms = [1e3 * v for v in values]
    return {"mean": statistics.fmean(ms)} | {f"p{p}": percentile(ms, p) for p in PERCENTILES}


def summary(records: list[Record], seconds: float, slo_ms: dict[str, float]) -> dict[str, Any]:
    """What a run comes to: throughput, latencies in ms, and goodput: requests per second that met every SLO.

    Args:
        slo_ms: limits in ms of ttft, tpot, itl (a request's mean) and e2e.
    Raises:
        RuntimeError: no request succeeded; the text has the first error.
    """
    good = [r for r in records if r.error is None]
    if not good:
        raise RuntimeError(f"all {len(records)} requests failed, the first with: {records[0].error}")
    measures: dict[str, Callable[[Record], float]] = {
        "ttft": lambda r: r.ttft,
        "tpot": lambda r: r.tpot,
        "itl": lambda r: statistics.fmean(r.itl) if r.itl else 0.0,
        "e2e": lambda r: r.e2e,
    }
    within = [r for r in good if all(1e3 * measures[name](r) <= limit for name, limit in slo_ms.items())]
    output_tokens = sum(r.output_tokens for r in good)
    result: dict[str, Any] = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds,
        "ttft_ms": spread([r.ttft for r in good]),
        "tpot_ms": spread([r.tpot for r in good if r.output_tokens > 1]),
        "itl_ms": spread([gap for r in good for gap in r.itl]),
        "e2e_ms": spread([r.e2e for r in good]),
    }
    if slo_ms:
        result |= {"slo_ms": slo_ms, "goodput": len(within) / seconds, "slo_attainment": len(within) / len(records)}
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error[:200]] = errors.get(record.error[:200], 0) + 1
    return result | ({"errors": errors} if errors else {})


def parse_slo(texts: Sequence[str]) -> dict[str, float]:
    """["ttft=200", "itl=50"] to limits in ms.

    Raises:
        ValueError: another name, or no positive number.
    """
    limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in ("ttft", "tpot", "itl", "e2e") or not limits[name] > 0:
            raise ValueError(f"slo: expected ttft=MS, tpot=MS, itl=MS or e2e=MS, got {text!r}")
    return limits


def full_record(result: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    """The summary, and every request."""
    return result | {"records": [asdict(r) for r in records]}
