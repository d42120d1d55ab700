"""`nanovllm bench`: throughput and latency of an engine, and load on a server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from nanovllm.cli import bench_serve
from nanovllm.cli.flags import add_engine_flags, engine_config, make_llm

SUMMARY = "measure an engine on prompts of random token ids, or a running server"
_HEADS = {
    "seconds": "seconds",
    "time_to_first_token": "TTFT s",
    "prompt_tokens_per_second": "tok/s in",
    "output_tokens_per_second": "tok/s out",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    text = "many requests at once: tokens a second in and out"
    throughput = kinds.add_parser("throughput", help=text, description=text, allow_abbrev=False)
    throughput.add_argument("--num-requests", type=int, default=256, metavar="N", help="default: 256")
    for name in ("input", "output"):
        throughput.add_argument(
            f"--{name}-len",
            type=int,
            nargs=2,
            default=(100, 1024),
            metavar=("MIN", "MAX"),
            help=f"{name} tokens of a request, uniform in this range (default: 100 1024)",
        )
    text = "one request on an idle engine: time to first token, then tokens a second"
    latency = kinds.add_parser("latency", help=text, description=text, allow_abbrev=False)
    for name in ("input", "output"):
        latency.add_argument(
            f"--{name}-len", type=int, default=128, metavar="N", help=f"{name} tokens of the request (default: 128)"
        )
    latency.add_argument("--runs", type=int, default=3, metavar="N", help="the median of this many (default: 3)")
    text = bench_serve.SUMMARY
    serve = kinds.add_parser("serve", help=text, description=text, allow_abbrev=False)
    bench_serve.add_arguments(serve)
    for kind in (throughput, latency, serve):
        kind.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
        if kind is not serve:
            add_engine_flags(kind)
        kind.set_defaults(parser=kind)


def run(args: argparse.Namespace) -> int:
    if args.kind == "serve":
        return bench_serve.run(args)
    from nanovllm.bench import engine

    config = engine_config(args)
    with make_llm(config) as llm:
        result: engine.Throughput | engine.Latency
        if args.kind == "latency":
            result = engine.latency(llm, args.input_len, args.output_len, args.runs, config.seed)
        else:
            vocab_size = llm.engine.vocab_size or sys.maxsize
            lengths = (tuple(args.input_len), tuple(args.output_len))
            work = engine.Workload.random(args.num_requests, *lengths, vocab_size, config.seed)
            result = engine.throughput(llm, work, show_progress=sys.stderr.isatty())
    values = dataclasses.asdict(result)
    print(json.dumps(values) if args.json else table(values))
    return 0


def table(values: dict[str, int | float]) -> str:
    """Two aligned lines: heads and values."""
    cells = [
        (_HEADS.get(name, name.replace("_", " ")), f"{v:,}" if isinstance(v, int) else f"{v:,.3f}")
        for name, v in values.items()
    ]
    widths = [max(map(len, cell)) for cell in cells]
    return "\n".join("  ".join(c[row].rjust(w) for c, w in zip(cells, widths)) for row in (0, 1))
