"""`nanovllm chat`: a conversation with a model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import add_engine_flags, add_sampling_flags, engine_config, make_llm, sampling_values
from nanovllm.cli.generate import Streamed, show_plainly, stream

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

SUMMARY = "talk to a model; answers stream"
_MAX_TOKENS = 1024
_HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends"
_HELP = '''\
/help         this list
/reset        forget the conversation; the system prompt stays
/system TEXT  a new system prompt from the next question on; without TEXT, show it
/quit         end, as Ctrl-D does
"""           begins and ends a message of several lines; a line that ends with \\ goes on, too
Ctrl-C        stops an answer; arrow keys edit the line and find earlier ones'''
COMMANDS = ("/help", "/reset", "/system", "/quit", "/exit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", metavar="QUESTION", help="answer one question and exit")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the chat template's own)")
    parser.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="passed to the chat template of models that have the switch",
    )
    parser.add_argument(
        "--markdown",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="render answers as Markdown on a terminal (default: yes; never in a pipe)",
    )
    add_engine_flags(parser)
    add_sampling_flags(parser, max_tokens=_MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    from nanovllm.inspector.record import recording

    config, values = engine_config(args), sampling_values(args)
    if values.get("n", 1) != 1:
        raise ValueError(f"chat: expected --n 1, got {values['n']}")
    with make_llm(config) as llm, recording(llm, args.record):
        params = dataclasses.replace(llm.default_sampling_params, **values)
        conversation = Conversation(llm, params, args.system, args.enable_thinking)
        conversation.is_rich = args.markdown and sys.stdout.isatty()
        if args.once is None:
            return 0 if talk(conversation) else 1
        conversation.ask(args.once)
    return 0


class Conversation:
    """The messages so far, and the model that answers them; is_rich: answers are rendered as Markdown."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, enable_thinking: bool | None) -> None:
        self.llm, self.params, self.enable_thinking = llm, params, enable_thinking
        self.system = system
        self.is_rich = False
        self.messages: list[dict[str, Any]] = []  # questions and answers

    def reset(self) -> None:
        self.messages = []

    def ask(self, question: str) -> Streamed:
        """Streams the answer to stdout; an answer that fails or never begins leaves the conversation as it was.

        Raises:
            ValueError: the conversation is too long, or the chat template refused it. KeyboardInterrupt: a second
            Ctrl-C.
        """
        from nanovllm.engine.chat import render_chat

        messages = [*self.messages, {"role": "user", "content": question}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = render_chat(self.llm.tokenizer, system + messages, enable_thinking=self.enable_thinking)
        with self._printer() as show:
            answer = stream(self.llm, prompt, self.params, show)
        if answer.text or not answer.is_interrupted:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    @contextlib.contextmanager
    def _printer(self) -> Iterator[Callable[[str], None]]:
        if not self.is_rich:
            try:
                yield show_plainly
            finally:
                print()
            return
        from nanovllm.cli.terminal import MarkdownPrinter

        with MarkdownPrinter() as printer:
            yield printer.show


def talk(conversation: Conversation) -> bool:
    """Reads questions until /quit or the end of input; without a terminal, prints the answers only.

    A question that is refused ends nothing. Returns False where that happened and no person saw it.
    """
    from nanovllm.cli import terminal

    interactive = terminal.is_interactive()
    if interactive:
        terminal.use_line_editing(COMMANDS)
        print(_HINT)
    prompts = ("> ", ". ") if interactive else ("", "")
    number, all_answered = 0, True
    while True:
        try:
            message = terminal.read_message(*prompts)
        except EOFError:
            if interactive:
                print()
            return interactive or all_answered
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D or /quit ends)")
            continue
        command = re.fullmatch(r"(/[a-z?]+)(?:\s+(.*))?", message, re.DOTALL)
        if command is not None:
            if command[1] in ("/quit", "/exit"):
                return interactive or all_answered
            _obey(conversation, command[1], command[2])
        elif message and interactive:
            _answer(conversation, message)
        elif message:
            number += 1
            try:
                conversation.ask(message)
            except ValueError as e:
                print(f"nanovllm: error: question {number}: {e}", file=sys.stderr)
                all_answered = False


def _obey(conversation: Conversation, command: str, text: str | None) -> None:
    if command == "/reset":
        conversation.reset()
    elif command == "/system" and text is not None:
        conversation.system = text
    elif command == "/system":
        print(conversation.system if conversation.system is not None else "(the chat template's own)", file=sys.stderr)
    elif command in ("/help", "/?"):
        print(_HELP, file=sys.stderr)
    else:
        print(f"{command} is not a command; /help lists them", file=sys.stderr)


def _answer(conversation: Conversation, question: str) -> None:
    """One answer on a terminal, and its rate; errors and interrupts do not end the conversation."""
    try:
        answer = conversation.ask(question)
    except ValueError as e:  # too long for the context, or refused by the template
        print(f"nanovllm: error: {e} (/reset starts over)", file=sys.stderr)
    except KeyboardInterrupt:
        print("\n(interrupted, and forgotten)")
    else:
        print(_dim(_rate(answer)))


def _rate(answer: Streamed) -> str:
    parts = [f"{answer.num_tokens} token{'' if answer.num_tokens == 1 else 's'}"]
    if answer.first_token is not None and answer.num_tokens > 1 and answer.seconds > answer.first_token:
        parts.append(f"{(answer.num_tokens - 1) / (answer.seconds - answer.first_token):.1f} tokens/s")
    if answer.first_token is not None:
        parts.append(f"first after {answer.first_token:.2f} s")
    return f"({'interrupted, ' if answer.is_interrupted else ''}{', '.join(parts)})"


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m"
