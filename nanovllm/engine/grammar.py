"""Outputs of a given form: JSON schemas, regular expressions and grammars as masks over the next token (llguidance)."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy as np

from nanovllm.sampling_params import StructuredOutputsParams

logger = logging.getLogger("nanovllm")
_MAX_COMPILED = 64
_LEXER_FUEL = 400_000  # less than llguidance's default, with which the worst forms build their lexer for seconds
_MAX_MESSAGE = 1000  # characters
_INTERNALS = re.compile(r"\n\s*<?(stack )?backtrace\b|\n\s*0: |\n?<(state|non-verbose)\b", re.IGNORECASE)
# One blank after separators, as json.dumps has it: where any white space may come, small models write nothing else.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, sorted(eos_token_ids)
        self._num_consumed = 0

    def allowed(self, completion_token_ids: list[int], vocab_size: int) -> np.ndarray:
        """Which tokens may follow: [vocab_size] bool. Once the form is complete, or cannot go on, only EOS."""
        matcher = self._matcher
        for token_id in completion_token_ids[self._num_consumed :]:
            if not matcher.is_stopped():
                matcher.consume_token(token_id)
        self._num_consumed = len(completion_token_ids)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(vocab_size, bool)
        unpacked = np.unpackbits(bits, bitorder="little")[:vocab_size]
        allowed[: len(unpacked)] = unpacked
        if matcher.is_error() or not allowed.any():
            logger.warning("a grammar ended early: %s", matcher.get_error() or "no token can follow")
            allowed[:] = False
            allowed[self._eos] = True
        return allowed


class CompiledForm:
    """A form that is ready: start() takes well under a millisecond, so the engine's thread may call it."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos_token_ids

    def start(self) -> Grammar:
        """A grammar at its beginning."""
        return Grammar(self._matcher.deep_copy(), self._eos)


class Grammars:
    """Compiles the forms that requests ask for, and keeps the latest of them; safe to call from several threads.

    A compile takes up to seconds. Only those who ask for the same form wait for it, so the engine's thread never asks:
    it gets a CompiledForm with each request.

    Args:
        tokenizer: a fast transformers tokenizer, or None. vocab_size: of the model's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, eos_token_ids
        self._lock = threading.Lock()  # of the forms below; never held during a compile
        self._compiled: OrderedDict[tuple[str, str], Future[CompiledForm]] = OrderedDict()
        self._tokenizer_lock = threading.Lock()
        self._compiler_tokenizer: Any = None

    def compile(self, form: StructuredOutputsParams) -> CompiledForm:
        """The form, ready to start.

        Raises:
            ValueError: the form does not make sense, is too complex, or the model cannot have one; the text says why.
            ImportError: llguidance is not installed.
        """
        key = _source(form)
        with self._lock:
            future = self._compiled.get(key)
            is_new = future is None
            if future is None:
                future = self._compiled[key] = Future()
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
        if is_new:
            try:
                future.set_result(CompiledForm(self._compile(*key), self._eos))
            except BaseException as e:
                with self._lock:
                    if self._compiled.get(key) is future:
                        del self._compiled[key]
                future.set_exception(e)
        return future.result()

    def _compile(self, kind: str, text: str) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise ImportError("structured_outputs needs llguidance: pip install 'nanovllm[server]'") from None
        with self._tokenizer_lock:
            tokenizer = self._for_compiler()
        try:
            if kind == "json":
                source = LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
            else:
                source = LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
            limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
            problem = matcher.get_error() or _problem_of_first_steps(matcher)
        except ValueError as e:
            problem = str(e)
        if problem:
            raise ValueError(f"structured_outputs.{kind}: {_shortened(problem)}")
        return matcher

    def _for_compiler(self) -> Any:
        if self._compiler_tokenizer is None:
            from llguidance.hf import from_tokenizer

            if self._tokenizer is None or not getattr(self._tokenizer, "is_fast", False):
                raise ValueError("structured_outputs: expected a model with a fast tokenizer")
            if not self._eos:
                raise ValueError("structured_outputs: expected a model with an end-of-sequence token")
            size = len(self._tokenizer) if self._vocab_size is None else self._vocab_size
            if size < len(self._tokenizer):
                raise ValueError(
                    f"structured_outputs: expected a tokenizer of at most {size} tokens, as the model has, "
                    f"got {len(self._tokenizer)}"
                )
            self._compiler_tokenizer = from_tokenizer(self._tokenizer, size, sorted(self._eos))
        return self._compiler_tokenizer


def _source(form: StructuredOutputsParams) -> tuple[str, str]:
    """What to compile: ("json" | "regex" | "grammar", text)."""
    if form.json is not None:
        return "json", form.json if isinstance(form.json, str) else json.dumps(form.json)
    if form.json_object:
        return "json", '{"type": "object"}'
    if form.regex is not None:
        return "regex", form.regex
    if form.choice is not None:
        return "grammar", f"start: {' | '.join(map(json.dumps, form.choice))}"
    assert form.grammar is not None
    return "grammar", form.grammar


def _problem_of_first_steps(matcher: Any) -> str:
    """Why the form cannot begin, "" where it can.

    llguidance builds much of its lexer with the first mask, and keeps it for the copies of the matcher; a limit that
    this reaches shows only when the first token is taken in.
    """
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    if not len(allowed):
        return matcher.get_error() or "no token can begin it"
    probe = matcher.deep_copy()
    probe.consume_token(int(allowed[0]))
    if not probe.is_stopped():
        probe.compute_bitmask()
    return probe.get_error() if probe.is_error() else ""


def _shortened(problem: str) -> str:
    """An error of llguidance in one line, without the backtrace of a panic or the state of its parser."""
    text = " ".join(_INTERNALS.split(problem, maxsplit=1)[0].split())
    text = text.replace("NoExtensionBias", "nothing can match it")
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
