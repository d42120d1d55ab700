"""Flags made from dataclass fields: EngineConfig and SamplingParams are their only source."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

Config = TypeVar("Config")
_SCALARS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_engine_flags(parser: argparse.ArgumentParser, model_is_optional: bool = False) -> None:
    """MODEL (None where it is optional and not given), a flag for every other field of EngineConfig, and --record."""
    add_config_flags(parser, "engine", EngineConfig, model_is_optional)
    text = "write what the engine does, step by step, to this file; `nanovllm inspect FILE` shows it"
    parser.add_argument("--record", metavar="FILE", type=writable, help=text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The validated engine options of a command line."""
    return config_from(args, EngineConfig)


def add_config_flags(parser: argparse.ArgumentParser, title: str, cls: type, model_is_optional: bool = False) -> None:
    """A flag for every field of a configuration class whose fields have their "help" as metadata."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(cls):
        text = field.metadata["help"].replace("%", "%%")
        if field.name == "model":
            parser.add_argument("model", metavar="MODEL", nargs="?" if model_is_optional else None, help=text)
            continue
        shown = "" if field.default in (None, ()) else f" (default: {field.default})"
        kind = str(field.type).split(" | ")[0]
        how: dict[str, Any]
        if kind == "bool":
            how = {"action": argparse.BooleanOptionalAction}
        elif kind.startswith("tuple"):
            how = {"action": "append", "metavar": field.name.split("_")[-1].upper()}
        else:
            how = {"type": _SCALARS[kind], "metavar": kind.upper()}
        group.add_argument(_flag(field.name), default=argparse.SUPPRESS, help=text + shown, **how)


def writable(text: str) -> Path:
    """A path in a folder that exists: said before a model is loaded, or a server measured."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def chart(text: str) -> Path:
    """A writable path with the name of a chart."""
    if not text.endswith((".svg", ".png", ".pdf")):
        raise argparse.ArgumentTypeError(f"expected a name in .svg, .png or .pdf, got {text!r}")
    return writable(text)


def config_from(args: argparse.Namespace, cls: type[Config]) -> Config:
    """The validated options of a command line for a class of add_config_flags."""
    given = vars(args)
    values = {f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given}  # type: ignore[arg-type]
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def make_llm(config: EngineConfig) -> LLM:
    """LLM(...) with these options."""
    from nanovllm.llm import LLM

    return LLM(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


def _logit_bias(text: str) -> dict[int, float]:
    try:
        return {int(token_id): float(bias) for token_id, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        wanted = 'a JSON object of token ids and numbers, such as {"5": -1.5}'
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None


def _structured_outputs(text: str) -> StructuredOutputsParams:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        wanted = 'a JSON object, such as {"regex": "[0-9]+"}'
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
    try:
        return StructuredOutputsParams(**fields)
    except (ValueError, TypeError) as e:
        raise argparse.ArgumentTypeError(str(e)) from None


# Fields whose flag is not one value. A flag for `seed` is the engine's: it makes a command's output repeatable.
_SPECIAL: dict[str, dict[str, Any]] = {
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"action": "append", "type": int, "metavar": "ID"},
    "logit_bias": {"type": _logit_bias, "metavar": "JSON"},
    "structured_outputs": {"type": _structured_outputs, "metavar": "JSON"},
}
_REPEATABLE = ("stop", "stop_token_ids")


def _sampling_fields() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(SamplingParams) if f.init and f.name != "seed"]


def _documented(cls: type) -> dict[str, str]:
    """Argument name to text, from the Args section of a docstring."""
    args = re.search(r"^ +Args:\n(.*?)^ +Raises:", cls.__doc__ or "", re.DOTALL | re.MULTILINE)
    entries = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", args[1], re.DOTALL | re.MULTILINE) if args else []
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """A flag for every field of SamplingParams; max_tokens: the command's own default for it."""
    group = parser.add_argument_group("sampling (defaults: the model's own, then those of SamplingParams)")
    texts = _documented(SamplingParams)
    for field in _sampling_fields():
        kind = str(field.type).split(" | ")[0]
        text = texts.get(field.name, "").replace("%", "%%")
        default: Any = argparse.SUPPRESS
        if field.name == "max_tokens" and max_tokens is not None:
            default, text = max_tokens, f"{text} (default: {max_tokens})"
        if field.name in _REPEATABLE:
            text += "; may be repeated"
        if field.name in _SPECIAL:
            how = _SPECIAL[field.name]
        elif kind == "bool":
            how = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": _SCALARS[kind], "metavar": kind.upper()}
        group.add_argument(_flag(field.name), default=default, help=text, **how)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The SamplingParams fields that a command line gives, validated; those of the model fill the others later."""
    given = vars(args)
    values = {f.name: given[f.name] for f in _sampling_fields() if f.name in given}
    SamplingParams(**values)
    return values
