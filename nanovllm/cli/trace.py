"""`nanovllm trace`: the worked example of nanovllm.trace."""

from __future__ import annotations

import argparse

SUMMARY = "show block tables, slots and packed inputs of prompts that share a block, step by step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    from nanovllm.trace import Trace

    del args
    Trace().run()
    return 0
