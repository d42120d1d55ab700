"""`nanovllm generate`: complete prompts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.cli.flags import add_engine_flags, add_sampling_flags, engine_config, make_llm, sampling_values

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

SUMMARY = "complete prompts; one prompt on a terminal streams"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", "-p", action="append", metavar="TEXT", help="may be repeated; without it, stdin is the prompt"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each prompt, token ids included")
    add_engine_flags(parser)
    add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    from nanovllm.inspector.record import recording

    config, values = engine_config(args), sampling_values(args)
    prompts = args.prompt or _from_stdin()
    with make_llm(config) as llm, recording(llm, args.record):
        params = dataclasses.replace(llm.default_sampling_params, **values)
        if len(prompts) == 1 and params.n == 1 and not args.json and sys.stdout.isatty():
            stream(llm, prompts[0], params, show_plainly)
            print()
            return 0
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        if args.json:  # within: a recording that fails must not cost the text
            for output in outputs:
                print(json.dumps(dataclasses.asdict(output), ensure_ascii=False))
        else:
            print("\n\n".join(completion.text for output in outputs for completion in output.outputs))
    return 0


@dataclasses.dataclass(slots=True)
class Streamed:
    """What stream() got; first_token and seconds: from its call, in seconds (first_token None: none came)."""

    text: str = ""
    num_tokens: int = 0
    is_interrupted: bool = False
    first_token: float | None = None
    seconds: float = 0.0


def stream(llm: LLM, prompt: str | list[int], params: SamplingParams, show: Callable[[str], None]) -> Streamed:
    """Gives a completion to show() as it comes. Ctrl-C ends it, not the program; a second one raises at once."""
    from nanovllm.llm import deferred_interrupt

    result, start = Streamed(), time.perf_counter()
    with deferred_interrupt() as interrupted:
        increments = llm.stream(prompt, params)
        for increment in increments:
            result.text += increment.text
            result.num_tokens += len(increment.token_ids)
            result.seconds = time.perf_counter() - start
            if result.first_token is None and increment.token_ids:
                result.first_token = result.seconds
            show(increment.text)
            if interrupted:
                result.is_interrupted = True
                increments.close()
    return result


def show_plainly(text: str) -> None:
    print(text, end="", flush=True)


def _from_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():  # None: closed
        raise ValueError("generate: expected --prompt TEXT, or the prompt on stdin, got neither")
    return [sys.stdin.read()]
