"""What a request asks of the sampler. Names and ranges are those of vLLM."""

from __future__ import annotations

import json as json_module  # `json` is a field
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any

_MAX_LOGPROBS = 20
_MAX_STOP_STRINGS = 64


def _number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    bad = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad or not low <= value <= high or (low_open and value == low):  # NaN is not in any range
        bounds = f"{'(' if low_open else '['}{low}, {high}]"
        raise ValueError(f"SamplingParams.{name}: expected a number in {bounds}, got {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"SamplingParams.{name}: expected an integer {allowed}, got {value!r}")


_MAX_CHOICES = 4096
_MAX_FORM_BYTES = 256 * 1024


@dataclass(slots=True, frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output must have: exactly one of these, of at most 256 KiB.

    Args:
        json: a JSON schema, as an object or its text.
        json_object: True for any JSON object.
        regex: the whole output matches it.
        choice: the output is one of these strings, at most 4,096.
        grammar: a grammar in Lark's notation.
    Raises:
        ValueError: none or several are given, or a value is of the wrong kind or too large. Whether a schema, regex
        or grammar makes sense is seen when a request is added.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        names = [f.name for f in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"StructuredOutputsParams: expected one of {', '.join(names)}, got {got}")
        if not isinstance(self.json_object, (bool, NoneType)):
            raise ValueError(f"StructuredOutputsParams.json_object: expected True, got {self.json_object!r}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, NoneType)):
                raise ValueError(f"StructuredOutputsParams.{name}: expected a string, got {getattr(self, name)!r}")
        if self.choice is not None:
            is_list = isinstance(self.choice, (list, tuple)) and len(self.choice) > 0
            if not is_list or not all(isinstance(c, str) and c for c in self.choice):
                raise ValueError(f"StructuredOutputsParams.choice: expected non-empty strings, got {self.choice!r}")
            if len(self.choice) > _MAX_CHOICES:
                raise ValueError(
                    f"StructuredOutputsParams.choice: expected at most {_MAX_CHOICES} strings, got {len(self.choice)}"
                )
        if self.json is not None:
            try:
                schema = json_module.loads(self.json) if isinstance(self.json, str) else self.json
                json_module.dumps(schema)
            except (TypeError, ValueError) as e:
                raise ValueError(f"StructuredOutputsParams.json: expected a JSON schema: {e}") from None
            except RecursionError:
                raise ValueError(
                    "StructuredOutputsParams.json: expected a JSON schema, got one nested too deeply"
                ) from None
            if not isinstance(schema, (dict, bool)):
                raise ValueError(f"StructuredOutputsParams.json: expected a JSON schema, got {self.json!r}")
        self._check_size(given[0])

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        text = value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)
        if (size := len(text.encode(errors="surrogatepass"))) > _MAX_FORM_BYTES:
            raise ValueError(f"StructuredOutputsParams.{name}: expected at most {_MAX_FORM_BYTES} bytes, got {size}")


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; validated when made.

    Args:
        temperature: divides the logits; 0 is exact greedy (the lowest id on ties).
        top_k: keep the k largest logits; -1 or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p, after min_p and top_k.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        max_tokens: tokens to generate at most; a model's or the pool's limit may end the request earlier.
        min_tokens: EOS and stop tokens cannot be sampled before this many tokens.
        ignore_eos: do not stop at the model's EOS tokens.
        stop: strings that end the output; the text ends before the first of them.
        stop_token_ids: ids that end the output, beside the model's EOS ids.
        seed: same seed, same prompt, same tokens, alone or in any batch; None: derived from the engine's seed.
        n: number of independent completions.
        logprobs: number of most likely tokens to report at each position (0: only the sampled one), at most 20.
            They are of the raw logits, before temperature, penalties and bias.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (CTRL).
        presence_penalty: subtracted from the logits of tokens present in the output.
        frequency_penalty: times the token's count in the output, subtracted.
        logit_bias: token id to a value added to its logit.
        skip_special_tokens: leave special tokens out of the text (they stay in token_ids).
        structured_outputs: the form that the output must have, by a grammar that masks the logits.
    Raises:
        ValueError: a value is out of range; the text names field, value and range. TypeError: an unknown keyword.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False)  # `stop`, always a tuple

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 1e4)
        _integer("top_k", self.top_k, -1)
        _number("top_p", self.top_p, 0, 1, low_open=True)
        _number("min_p", self.min_p, 0, 1)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("n", self.n, 1, 1024)
        _number("repetition_penalty", self.repetition_penalty, 0, 1e4, low_open=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"SamplingParams.{name}: expected True or False, got {getattr(self, name)!r}")
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, NoneType)):
            got = repr(self.structured_outputs)
            raise ValueError(f"SamplingParams.structured_outputs: expected StructuredOutputsParams, got {got}")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, _MAX_LOGPROBS)
        if not isinstance(self.stop_token_ids, (list, tuple, NoneType)):
            raise ValueError(f"SamplingParams.stop_token_ids: expected a list of ids, got {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids or ():
            _integer("stop_token_ids", token_id, 0)
        if not isinstance(self.logit_bias, (dict, NoneType)):
            raise ValueError(f"SamplingParams.logit_bias: expected a dict of id to bias, got {self.logit_bias!r}")
        for token_id, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token_id, 0)
            _number("logit_bias", bias, -1e4, 1e4)
        given = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        is_list = isinstance(given, (list, tuple))
        if not is_list or len(given) > _MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in given):
            raise ValueError(
                f"SamplingParams.stop: expected up to {_MAX_STOP_STRINGS} non-empty strings, got {self.stop!r}"
            )
        object.__setattr__(self, "stop_strings", tuple(given))

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
