"""The `nanovllm` command. Nothing heavy is imported before a command runs, so that `--help` and errors are instant."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nanovllm import __version__

# Each module has SUMMARY, add_arguments(parser) and run(args) -> exit status.
_COMMANDS = ("generate", "chat", "serve", "bench", "inspect", "trace", "env")
# What the library raises for what the user gave: shown as one line. Anything else is a bug, shown with its traceback.
_EXPECTED = (ValueError, TypeError, NotImplementedError, RuntimeError, ImportError, OSError, MemoryError)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"nanovllm: error: {message} (try `{self.prog} --help`)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of every command; the tests read its flags."""
    parser = _Parser(prog="nanovllm", description="A small, readable LLM inference engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        module = importlib.import_module(f"nanovllm.cli.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for an error, 130 after Ctrl-C (2, a wrong flag, exits)."""
    args, unknown = make_parser().parse_known_args(argv)
    if unknown:  # argparse would point to the help of `nanovllm`, which does not have the command's flags
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):  # closed, or not a file
        # Bytes that are no text come through as surrogates, and the engine says where they are.
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # `nanovllm trace | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _EXPECTED as e:
        if args.debug:
            raise
        print(f"nanovllm: error: {' '.join(str(e).split()) or type(e).__name__}", file=sys.stderr)
        return 1
