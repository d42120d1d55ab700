"""The offline front: prompts in, finished outputs out."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.build import build_engine
from nanovllm.engine.chat import render_chat
from nanovllm.engine.llm_engine import Prompt, Request
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Messages = list[dict[str, Any]]


class LLM:
    """A model ready to generate.

    Args:
        model: directory with config.json and safetensors, a .gguf file, or a Hugging Face hub id.
        **options: the fields of nanovllm.config.EngineConfig.
    Raises:
        TypeError: an unknown option. ValueError, NotImplementedError: a value or model that is not supported.

    >>> with LLM("models/SmolLM2-135M-Instruct.Q4_1.gguf") as llm:
    ...     print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text)
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_kwargs(model, **options)
        self.engine, self.default_sampling_params = build_engine(self.config)
        self.config = self.engine.config
        self._lock = threading.RLock()  # steps of calls from several threads take turns

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.exit()

    def exit(self) -> None:
        """Frees the model and the KV cache, and ends the other ranks; a second call does nothing. Calls of other
        threads end with an error after the step they are in."""
        engine = self.__dict__.pop("engine", None)
        if engine is None:
            return
        with self._lock:
            engine.close()
        del engine
        gc.collect()  # runner and graphs refer to each other: without this their memory waits for the collector
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise RuntimeError("LLM: this engine was ended by exit(); make a new LLM")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt; results are in prompt order.

        Args:
            prompts: one prompt or several, each text or a list of token ids.
            sampling_params: one for all, or one for each prompt; None: the model's own defaults.
            use_tqdm: show a progress bar.
        Raises:
            ValueError: a prompt can never run (empty, too long, ids out of range): the text has its index and the
            numbers, and nothing was run. TypeError: prompts or sampling_params of another kind; nothing was run.
            KeyboardInterrupt: after ending all requests; the engine stays usable.
        """
        if isinstance(prompts, (set, frozenset, dict, bytes)) or not isinstance(prompts, Iterable):
            raise TypeError(f"prompts: expected one prompt or a list of them, got {type(prompts).__name__}")
        if not isinstance(prompts, str):
            prompts = list(prompts)
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, np.integer))):
            prompts = [prompts]  # type: ignore[list-item]
        params = self._params_for(len(prompts), sampling_params)
        token_ids = []
        for i, (prompt, p) in enumerate(zip(prompts, params)):
            try:
                token_ids.append(self.engine.check_request(prompt, p))  # type: ignore[arg-type]
            except (TypeError, ValueError) as e:
                kind = TypeError if isinstance(e, TypeError) else ValueError  # a subclass may take other arguments
                raise kind(f"prompts[{i}]: {e}") from None
        requests: list[Request] = []
        with self._lock:
            engine = self.engine
            try:
                for prompt, ids, p in zip(prompts, token_ids, params):
                    with unbroken():
                        requests.append(engine.add_checked_request(prompt, ids, p, None, stream=False))  # type: ignore[arg-type]
                return self._run(requests, use_tqdm)
            finally:
                with unbroken():
                    for request in requests:
                        engine.abort(request.request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """generate() on conversations, rendered by the model's chat template.

        Args:
            messages: one conversation, [{"role": ..., "content": ...}, ...], or several.
            **template: enable_thinking, chat_template_kwargs, chat_template, add_generation_prompt, tools; see
                nanovllm.engine.chat.render_chat.
        """
        if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Iterable):
            kind = type(messages).__name__
            raise TypeError(f"messages: expected one conversation (a list of dicts) or a list of them, got {kind}")
        messages = list(messages)
        if not messages:
            raise ValueError("messages: expected at least one message, got none")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts = [render_chat(self.tokenizer, m, **template) for m in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yields what is new since the last yield: text and token_ids hold increments that add up to the whole.

        Closing the iterator early ends the request.
        """
        params = self._params_for(1, sampling_params)[0]
        request, seen = None, [(0, 0)] * params.n
        try:
            with self._lock, unbroken():
                request = self.engine.add_request(prompt, params, stream=True)
            while True:
                with self._lock:
                    if not request.is_finished:  # it may have ended in another call's steps since the last yield
                        with unbroken():
                            self.engine.step()
                    if (error := request.error) is not None:
                        raise RuntimeError(f"LLM: a step failed, and with it this request: {error!r}") from error
                    output = self.engine.output(request)
                done = [(len(c.text), len(c.token_ids)) for c in output.outputs]
                if done != seen or output.finished:
                    yield _increment(output, seen)
                    seen = done
                if output.finished:
                    return
        finally:
            with self._lock, unbroken():
                if request is not None and "engine" in self.__dict__:  # not after exit(), when it is collected
                    self.engine.abort(request.request_id)

    def _params_for(self, count: int, given: Any) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_sampling_params] * count
        wanted = f"sampling_params: expected one SamplingParams or {count} of them, got"
        if isinstance(given, (str, bytes, dict, type)) or not isinstance(given, Iterable):
            kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            raise TypeError(f"{wanted} {kind}")
        given = list(given)
        for i, params in enumerate(given):
            if not isinstance(params, SamplingParams):
                raise TypeError(f"{wanted} a list with {type(params).__name__} at [{i}]")
        if len(given) != count:
            raise ValueError(f"{wanted} {len(given)} items")
        return given

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        engine = self.engine
        pending = {r.request_id for r in requests}
        outputs: dict[str, RequestOutput] = {}
        num_in = num_out = 0
        with tqdm(
            total=len(requests),
            desc="Generating",
            unit="prompt",
            disable=not use_tqdm,
            dynamic_ncols=True,
        ) as bar:
            while pending and engine.has_work:
                with unbroken():
                    result = self.engine.step()  # not after exit()
                num_in += result.num_prefill_tokens
                num_out += len(result.updated)
                for seq in result.finished:
                    request = seq.data.request  # type: ignore[attr-defined]
                    if request.is_finished and request.request_id in pending:
                        pending.remove(request.request_id)
                        outputs[request.request_id] = engine.output(request)
                        bar.update()
                seconds = bar.format_dict["elapsed"]
                if use_tqdm and seconds:
                    rates = f"in {num_in / seconds:.0f} tok/s, out {num_out / seconds:.0f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
        return [outputs.get(r.request_id) or engine.output(r) for r in requests]


def _increment(output: RequestOutput, seen: list[tuple[int, int]]) -> RequestOutput:
    for completion, (num_chars, num_tokens) in zip(output.outputs, seen):
        completion.text = completion.text[num_chars:]
        completion.token_ids = completion.token_ids[num_tokens:]
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[num_tokens:]
    output.__post_init__()
    return output


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Ctrl-C fills the yielded list instead of raising inside a step; a second Ctrl-C raises at once. Where Ctrl-C
    would not run Python code (it is ignored, or this is not the main thread) nothing changes."""
    signals: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(previous):
        yield signals
        return

    def on_interrupt(number: int, frame: Any) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C inside comes at the end, to whoever handles it."""
    with deferred_interrupt() as signals:
        yield
    if signals:
        signal.raise_signal(signal.SIGINT)
