"""The engine: requests in, steps, outputs. LLM and AsyncLLM are its two fronts."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import Batch
from nanovllm.engine.chat import check_text
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.grammar import CompiledForm, Grammars
from nanovllm.engine.observer import Observer
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams

Prompt = str | list[int]


class Runner(Protocol):
    """What the engine needs of a model runner."""

    num_kvcache_blocks: int

    def launch(self, batch: Batch) -> Any: ...

    def collect(self, handle: Any) -> tuple[list[int], dict[int, dict[int, Logprob]]]: ...

    def check_health(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Request:
    """One prompt and its n sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    sequences: list[Sequence] = field(default_factory=list)
    first_token_time: float | None = None
    finish_time: float | None = None
    error: BaseException | None = None  # of the step that ended it

    @property
    def is_finished(self) -> bool:
        return all(s.is_finished for s in self.sequences)


@dataclass(slots=True)
class SequenceData:
    """What the engine keeps of a sequence, beside what the scheduler needs."""

    request: Request
    index: int
    detokenizer: Detokenizer | None
    logprobs: list[dict[int, Logprob]] | None


class CheckedPrompt(list[int]):
    """Token ids of a request that can run, and the form of its output where it has one."""

    __slots__ = ("form",)

    def __init__(self, token_ids: list[int], form: CompiledForm | None) -> None:
        super().__init__(token_ids)
        self.form = form


@dataclass(slots=True)
class StepResult:
    """What one step() did: sequences that got a token, that ended, and the tokens computed in it."""

    updated: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class LLMEngine:
    """Schedules requests over one runner.

    add_request queues, step launches the next step and takes in an earlier one; with overlap one step stays in flight
    between two calls. An exception of a step ends every request and leaves a usable engine.

    Args:
        tokenizer: a transformers tokenizer, or None for token ids only.
        eos_token_ids: ids that end a sequence (of the generation config).
        vocab_size: bound of token ids in requests.
        overlap: keep one step in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Any = None,
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
        overlap: bool = False,
    ) -> None:
        self.config, self.runner, self.tokenizer = config, runner, tokenizer
        self.vocab_size = vocab_size
        self.startup_seconds: dict[str, float] = {}  # by phase, from whoever built the engine
        # Some checkpoints name ids that the model cannot produce; min_tokens would write their logits.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if vocab_size is None or 0 <= t < vocab_size)
        self.scheduler = Scheduler(config, runner.num_kvcache_blocks)
        self.grammars = Grammars(tokenizer, vocab_size, self.eos_token_ids)
        self.requests: dict[str, Request] = {}
        self.num_requests = 0
        self._max_in_flight = 1 if overlap else 0
        self._in_flight: deque[tuple[Batch, Any]] = deque()  # launched, not collected; oldest first
        self.observer: Observer | None = None  # while somebody watches: see observe() in engine/observer.py

    # Requests

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids are taken as they are, text is encoded with the model's special tokens.

        Raises:
            TypeError, ValueError: not text or ids, ids out of the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, because the model has no tokenizer, got text")
            check_text("prompt", prompt)
            token_ids = self.tokenizer.encode(prompt)
            self._check_ids("prompt: the tokenizer does not fit the model", token_ids)
            return token_ids
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"prompt: expected a string or a list of token ids, got {type(prompt).__name__}")
        if set(map(type, prompt)) - {int}:
            for i, t in enumerate(prompt):
                if type(t) is not int and not isinstance(t, np.integer):
                    got = f"a list with {type(t).__name__} at [{i}]"
                    raise TypeError(f"prompt: expected a string or a list of token ids, got {got}")
            prompt = [int(t) for t in prompt]
        self._check_ids("prompt", prompt)
        return list(prompt)

    def _check_ids(self, what: str, token_ids: Any) -> None:
        limit = self.vocab_size
        if token_ids and (min(token_ids) < 0 or (limit is not None and max(token_ids) >= limit)):
            wrong = next(t for t in token_ids if t < 0 or (limit is not None and t >= limit))
            raise ValueError(f"{what}: expected token ids in [0, {limit}), got {wrong}")

    def check_request(self, prompt: Prompt, params: SamplingParams) -> CheckedPrompt:
        """Token ids of a request that can run; raises ValueError or TypeError for one that never can.

        Compiles its form, which may take seconds: servers call this in another thread than the engine's.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
        token_ids = self.tokenize(prompt)
        self.scheduler.check_fits(len(token_ids))
        self._check_ids("SamplingParams.stop_token_ids", params.stop_token_ids or ())
        self._check_ids("SamplingParams.logit_bias", params.logit_bias or ())
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"SamplingParams.stop: the model has no tokenizer, got {params.stop!r}")
        form = params.structured_outputs
        return CheckedPrompt(token_ids, None if form is None else self.grammars.compile(form))

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, stream: bool = False
    ) -> Request:
        """Queues a request. stream: keep its text up to date at every step (else only where a stop string needs it).

        Raises:
            ValueError, TypeError: it can never run, or its id is in use; nothing is queued.
        """
        return self.add_checked_request(prompt, self.check_request(prompt, params), params, request_id, stream)

    def add_checked_request(
        self,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        stream: bool,
    ) -> Request:
        """Queues a request whose token_ids come from check_request (any list will do for one without a form)."""
        if request_id in self.requests:
            raise ValueError(f"request_id: expected one not in use, got {request_id!r}")
        form = token_ids.form if isinstance(token_ids, CheckedPrompt) else None
        if (form is None) != (params.structured_outputs is None):
            raise ValueError("token_ids: expected those of check_request with the same structured_outputs")
        number = self.num_requests
        self.num_requests += 1
        if request_id is None:
            request_id = str(number)
            while request_id in self.requests:  # a caller chose this one
                request_id += "-"
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, text, list(token_ids), params, time.perf_counter())
        for index in range(params.n):
            seq = Sequence(
                token_ids,
                self.config.kvcache_block_size,
                params,
                self.eos_token_ids,
                self.config.max_model_len,
                self._seed(params, number, index),
                None if form is None else form.start(),
            )
            watched = self.tokenizer is not None and (stream or params.stop_strings)
            detokenizer = self._detokenizer(params) if watched else None
            seq.data = SequenceData(request, index, detokenizer, None if params.logprobs is None else [])
            request.sequences.append(seq)
        for seq in request.sequences:
            self.scheduler.add(seq)
        self.requests[request_id] = request
        if self.observer is not None:
            self.observer.added(request.sequences)
        return request

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(self.tokenizer, params.stop_strings, params.skip_special_tokens, params.min_tokens)

    def _seed(self, params: SamplingParams, number: int, index: int) -> int:
        """The sampler's key: of the request's seed, or of the engine's seed and the request's number."""
        parts = ("request", params.seed) if params.seed is not None else ("engine", self.config.seed, number)
        unsigned = xxhash.xxh3_64_intdigest(repr((*parts, index)).encode())
        return unsigned - 2**63

    def abort(self, request_id: str) -> None:
        """Ends a request with reason "abort"; an unknown or finished one is left alone."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        for seq in request.sequences:
            self.scheduler.finish(seq, "abort")
        request.finish_time = time.perf_counter()
        if self.observer is not None:
            self.observer.flush()

    def stop_sequence(self, seq: Sequence) -> None:
        """Ends one completion of a request with reason "stop": its reader has found a stop string."""
        self.scheduler.finish(seq, "stop")
        request: Request = seq.data.request  # type: ignore[attr-defined]
        if request.is_finished and self.requests.pop(request.request_id, None):
            request.finish_time = time.perf_counter()
        if self.observer is not None:
            self.observer.flush()

    # Steps

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> StepResult:
        """Launches the next step if there is work, and takes in the oldest one that is due."""
        result = StepResult()
        observer = self.observer
        try:
            if observer is not None:
                observer.step_begins()
            batch = self.scheduler.schedule()
            if observer is not None:
                observer.scheduled(batch)
            if batch:
                self._in_flight.append((batch, self.runner.launch(batch)))
                self.scheduler.prepare_collect(batch)
            if observer is not None:
                observer.launched()
            for seq in batch.finished:
                self._watch_end(seq)
            result.finished += batch.finished
            if len(self._in_flight) > (self._max_in_flight if batch else 0):
                self._collect(result)
        except BaseException as e:
            self._recover(e)
            raise
        now = time.perf_counter() if result.finished else 0.0
        for seq in result.finished:
            request: Request = seq.data.request  # type: ignore[attr-defined]
            if request.is_finished and self.requests.pop(request.request_id, None):
                request.finish_time = now
        if observer is not None:
            observer.step_ends(result.updated)
        return result

    def _collect(self, result: StepResult) -> None:
        batch, handle = self._in_flight[0]
        token_ids, logprobs = self.runner.collect(handle)
        self._in_flight.popleft()
        if self.observer is not None:
            self.observer.collected(batch, handle)
        sampled = batch.sampled if logprobs else []
        for i, entry in logprobs.items():
            seq = sampled[i]
            if not seq.is_finished:
                seq.data.logprobs.append(entry)  # type: ignore[attr-defined]
        updated, finished = self.scheduler.postprocess(batch, token_ids)
        result.updated += updated
        result.finished += finished
        result.num_decode_tokens += len(batch.decodes)
        result.num_prefill_tokens += batch.num_tokens - len(batch.decodes)
        now = time.perf_counter()
        for seq in updated:
            data: SequenceData = seq.data  # type: ignore[assignment]
            if data.request.first_token_time is None:
                data.request.first_token_time = now
            if data.detokenizer is not None and self._watch(seq, data.detokenizer):
                result.finished.append(seq)

    def _watch(self, seq: Sequence, detokenizer: Detokenizer) -> bool:
        """Updates seq's text with its newest token; True when that ended it here."""
        if not detokenizer.update(seq.token_ids[-1:]):
            if seq.is_finished:
                self._watch_end(seq)
            return False
        was_running = not seq.is_finished
        if was_running:
            self.scheduler.finish(seq, "stop")
        seq.finish_reason, seq.stop_reason = "stop", detokenizer.stop_reason
        return was_running

    def _watch_end(self, seq: Sequence) -> None:
        """Completes the text of an ended sequence; what was held back may hold a stop string."""
        data: SequenceData = seq.data  # type: ignore[assignment]
        if data.detokenizer is not None and data.detokenizer.finish():
            seq.finish_reason, seq.stop_reason = "stop", data.detokenizer.stop_reason

    def _recover(self, error: BaseException) -> None:
        """After a failed step: every request ends, the steps in flight are dropped, and the pool starts empty.

        A step may fail anywhere, so no bookkeeping of it is trusted: a new scheduler takes over.
        """
        self._in_flight.clear()
        for request in self.requests.values():
            request.finish_time, request.error = time.perf_counter(), error
            for seq in request.sequences:
                seq.finish_reason = seq.finish_reason or "abort"
        self.requests.clear()
        self.scheduler = Scheduler(self.config, self.runner.num_kvcache_blocks)
        if self.observer is not None:
            self.observer.restart()

    def check_health(self) -> None:
        """Raises RuntimeError where the engine has ended because another rank failed."""
        self.runner.check_health()

    def close(self) -> None:
        """Ends what the runner has outside this process; the engine cannot be used after it."""
        self.runner.close()

    # Outputs

    def output(self, request: Request) -> RequestOutput:
        """The request's output so far."""
        first = request.sequences[0]
        since = request.arrival
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(seq) for seq in request.sequences],
            finished=request.is_finished,
            num_cached_tokens=max(first.num_prefix_tokens, 0),
            time_to_first_token=None if request.first_token_time is None else request.first_token_time - since,
            latency=None if request.finish_time is None else request.finish_time - since,
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        data: SequenceData = seq.data  # type: ignore[assignment]
        token_ids = seq.completion_token_ids
        if data.detokenizer is not None:
            text = data.detokenizer.stable_text(seq.is_finished)
        elif self.tokenizer is not None:
            detokenizer = self._detokenizer(seq.params)
            detokenizer.update(token_ids)
            detokenizer.finish()
            text = detokenizer.text
        else:
            text = ""
        logprobs = None if data.logprobs is None else data.logprobs[: len(token_ids)]
        return CompletionOutput(data.index, text, token_ids, seq.finish_reason, seq.stop_reason, logprobs)
