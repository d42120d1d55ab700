"""Numbers for Prometheus. What is counted for every token is kept in plain lists, and put into form when asked for."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from nanovllm.async_llm import AsyncLLM

if TYPE_CHECKING:
    from nanovllm.server.generation import Generation

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts of values by bucket; observing one takes well under a microsecond."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self.name, self.text, self._buckets = name, text, buckets
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._buckets, value)] += count
        self._sum += value * count

    def collect(self, label: str) -> HistogramMetricFamily:
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._buckets), "+Inf"), self._counts):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(f"nanovllm:{self.name}", self.text, labels=["model_name"])
        family.add_metric([label], buckets, self._sum)
        return family


class Metrics(Collector):
    """All metrics of one server; the names are vLLM's, with another prefix."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm, self._label = llm, model_name
        self.time_to_first_token = Histogram("time_to_first_token_seconds", "From arrival to the first token", _LATENCY)
        self.inter_token = Histogram("inter_token_latency_seconds", "Between tokens of a request", _LATENCY)
        self.e2e = Histogram("e2e_request_latency_seconds", "From arrival to the last token", _LATENCY)
        self.prompt_length = Histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.output_length = Histogram("request_generation_tokens", "Generated tokens of a request", _TOKENS)
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.refused = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[_Family]:
        return iter(())

    def collect(self) -> Iterator[_Family]:
        for histogram in (self.time_to_first_token, self.inter_token, self.e2e, self.prompt_length, self.output_length):
            yield histogram.collect(self._label)
        scheduler = self._llm.engine.scheduler
        pool = scheduler.block_manager
        num_blocks = len(pool.blocks)
        gauges = (
            ("num_requests_running", "Sequences that run", len(scheduler.running)),
            ("num_requests_waiting", "Sequences in the queue", len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1", len(pool.used_block_ids) / num_blocks),
            ("kv_cache_blocks", "KV-cache blocks in the pool", num_blocks),
            ("prefix_cache_hit_rate", "Share of prompt tokens found in the prefix cache, 0 to 1", self._hit_rate),
            ("engine_up", "1 while the engine can serve requests", float(self._llm.is_running)),
        )
        counters = (
            ("num_preemptions", "Sequences that lost their blocks to others", scheduler.num_preemptions),
            ("prompt_tokens", "Prompt tokens of all requests", self.prompt_tokens),
            ("generation_tokens", "Generated tokens", self.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", self.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", self.cached_tokens),
            ("requests_refused", "Requests refused because the queue was full", self.refused),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"nanovllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._label], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"nanovllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._label], value)
            yield counter
        success = CounterMetricFamily(
            "nanovllm:request_success", "Finished requests", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([self._label, reason], count)
        yield success

    @property
    def _hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class RequestTimer:
    """What Metrics wants to know of one request."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._start = self._last = arrival  # of time.perf_counter()
        self._has_token = self._is_over = False

    def tokens(self, count: int, num_sequences: int) -> None:
        """`count` tokens of num_sequences of the request's completions have come."""
        now = time.perf_counter()
        m = self._metrics
        m.generation_tokens += count
        if self._has_token:
            m.inter_token.observe((now - self._last) * num_sequences / count, count)
        else:
            m.time_to_first_token.observe(now - self._start)
            self._has_token = True
        self._last = now

    def end(self, generation: Generation) -> None:
        """The request is over, whole or not."""
        if self._is_over:
            return
        self._is_over = True
        m, stream = self._metrics, generation.stream
        reasons = generation.finish_reasons
        reason = "abort" if not reasons or None in reasons else reasons[0] or "abort"
        m.finished["error" if stream.error is not None else reason] += 1
        num_prompt = sum(len(r.prompt_token_ids) for r in stream.requests)
        m.prompt_tokens += num_prompt
        m.cached_tokens += stream.num_cached_tokens
        m.prompt_length.observe(num_prompt)
        m.output_length.observe(generation.num_tokens)
        if reason in ("stop", "length"):
            m.e2e.observe(time.perf_counter() - self._start)
