"""`nanovllm serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse

from nanovllm.cli.flags import add_config_flags, add_engine_flags, config_from, engine_config
from nanovllm.server.config import ServerConfig

SUMMARY = "serve a model over HTTP, compatible with OpenAI's API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, "server", ServerConfig)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    engine, server = engine_config(args), config_from(args, ServerConfig)
    try:
        from nanovllm.server.run import serve
    except ModuleNotFoundError as e:
        raise ImportError(f"serve: {e.name} is not installed: pip install 'nanovllm[server]'") from e
    serve(engine, server, args.record)
    return 0
