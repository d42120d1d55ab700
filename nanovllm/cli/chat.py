"""`nanovllm chat`: a conversation with a model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import add_engine_flags, add_sampling_flags, engine_config, make_llm, sampling_values
from nanovllm.cli.generate import stream

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

SUMMARY = "talk to a model; answers stream"
_HELP = "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D ends"
_MAX_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", metavar="QUESTION", help="answer one question and exit")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the chat template's own)")
    parser.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="passed to the chat template of models that have the switch",
    )
    add_engine_flags(parser)
    add_sampling_flags(parser, max_tokens=_MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    config, values = engine_config(args), sampling_values(args)
    if values.get("n", 1) != 1:
        raise ValueError(f"chat: expected --n 1, got {values['n']}")
    with make_llm(config) as llm:
        params = dataclasses.replace(llm.default_sampling_params, **values)
        conversation = Conversation(llm, params, args.system, args.enable_thinking)
        if args.once is not None:
            conversation.ask(args.once)
        else:
            _talk(conversation)
    return 0


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, enable_thinking: bool | None) -> None:
        self.llm, self.params, self.enable_thinking = llm, params, enable_thinking
        self.system = [{"role": "system", "content": system}] if system is not None else []
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.system)

    def ask(self, question: str) -> None:
        """Streams the answer to stdout; an answer that fails or cannot start leaves the conversation as it was."""
        from nanovllm.engine.chat import render_chat

        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = render_chat(self.llm.tokenizer, messages, enable_thinking=self.enable_thinking)
        answer = stream(self.llm, prompt, self.params)
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _talk(conversation: Conversation) -> None:
    """Reads questions until /exit or the end of input; without a terminal, one a line, and prints the answers only."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() line editing and history

        print(_HELP)
    while True:
        try:
            question = input("> " if interactive else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        if question == "/exit":
            return
        if question == "/reset":
            conversation.reset()
        elif question.startswith("/"):
            print(f"{question.split()[0]} is not a command: {_HELP}", file=sys.stderr)
        elif question:
            try:
                conversation.ask(question)
            except ValueError as e:  # too long for the context, or refused by the template
                if not interactive:
                    raise
                print(f"nanovllm: error: {e} (/reset starts over)", file=sys.stderr)
    if interactive:
        print()
