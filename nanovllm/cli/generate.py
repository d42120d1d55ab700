"""`nanovllm generate`: complete prompts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
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
    config, values = engine_config(args), sampling_values(args)
    prompts = args.prompt or _from_stdin()
    with make_llm(config) as llm:
        params = dataclasses.replace(llm.default_sampling_params, **values)
        if len(prompts) == 1 and params.n == 1 and not args.json and sys.stdout.isatty():
            stream(llm, prompts[0], params)
            return 0
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    if args.json:
        for output in outputs:
            print(json.dumps(dataclasses.asdict(output), ensure_ascii=False))
    else:
        print("\n\n".join(completion.text for output in outputs for completion in output.outputs))
    return 0


def stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    """Prints a completion as it comes, and returns it. Ctrl-C ends it, not the program; a second one does."""
    from nanovllm.llm import deferred_interrupt

    parts = []
    with deferred_interrupt() as interrupted:
        increments = llm.stream(prompt, params)
        for increment in increments:
            print(increment.text, end="", flush=True)
            parts.append(increment.text)
            if interrupted:
                increments.close()
    print()
    return "".join(parts)


def _from_stdin() -> list[str]:
    if sys.stdin.isatty():
        raise ValueError("generate: expected --prompt TEXT, or the prompt on stdin, got neither")
    return [sys.stdin.read()]
