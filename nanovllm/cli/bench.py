"""`nanovllm bench`: throughput, latency and time to first token of an engine, and load on a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nanovllm.cli import bench_serve
from nanovllm.cli.flags import add_engine_flags, chart, engine_config, make_llm, writable

if TYPE_CHECKING:
    from nanovllm.bench.engine import Result
    from nanovllm.bench.roofline import Machine
    from nanovllm.config import EngineConfig
    from nanovllm.llm import LLM

SUMMARY = "measure an engine on prompts of random token ids, or a running server"


def _length(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected 0 or more, and less than 1, got {text}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    text = "many requests at once: tokens a second in and out (the defaults are nano-vLLM's workload)"
    throughput = kinds.add_parser("throughput", help=text, description=text, allow_abbrev=False)
    throughput.add_argument("--num-requests", type=_length, default=256, metavar="N", help="default: 256")
    for name in ("input", "output"):
        throughput.add_argument(
            f"--{name}-len",
            type=_length,
            nargs=2,
            default=(100, 1024),
            metavar=("MIN", "MAX"),
            help=f"{name} tokens of a request, uniform in this range (default: 100 1024)",
        )
    text = "few requests at once on an idle engine: time to first token, time a token, tokens a second"
    latency = kinds.add_parser("latency", help=text, description=text, allow_abbrev=False)
    latency.add_argument(
        "--num-requests", type=_length, nargs="+", default=[1], metavar="N", help="a row for each number (default: 1)"
    )
    for name in ("input", "output"):
        latency.add_argument(
            f"--{name}-len", type=_length, default=128, metavar="N", help=f"{name} tokens of a request (default: 128)"
        )
    text = "one prompt on an idle engine: time to first token, cold and with most of it in the prefix cache"
    prefill = kinds.add_parser("prefill", help=text, description=text, allow_abbrev=False)
    prefill.add_argument(
        "--input-len",
        type=_length,
        nargs="+",
        metavar="N",
        help="prompt tokens, two rows for each number (default: 128 8192 32768, as far as the model goes)",
    )
    prefill.add_argument(
        "--prefix-hit",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="of the prompt, cached (default: 0.9; 0: no row)",
    )
    for kind in (throughput, latency):
        kind.add_argument(
            "--temperature", type=float, default=0.6, metavar="FLOAT", help="of the sampler (default: 0.6; 0: greedy)"
        )
    for kind in (latency, prefill):
        kind.add_argument("--runs", type=_length, default=3, metavar="N", help="the median of this many (default: 3)")
    for kind in (throughput, latency, prefill):
        kind.add_argument("--profile", action="store_true", help="where the time of the steps went, by phase")
        kind.add_argument(
            "--json", type=writable, metavar="FILE", help="write everything to this file; - prints only that"
        )
        kind.add_argument(
            "--plot", type=chart, metavar="FILE", help="draw a chart (.svg, .png, .pdf; needs matplotlib)"
        )
        kind.add_argument("--bandwidth", type=_rate, metavar="TB/s", help="of the roofline (default: measured first)")
        kind.add_argument("--compute", type=_rate, metavar="TFLOP/s", help="of the roofline (default: measured first)")
        kind.add_argument(
            "--hf-config",
            metavar="NAME",
            help="instead of MODEL, with --load-format dummy: qwen3-0.6b, qwen3-8b, qwen3-32b, llama-3.2-1b, or the "
            "path of a config.json",
        )
        add_engine_flags(kind, model_is_optional=True)
    text = bench_serve.SUMMARY
    serve = kinds.add_parser("serve", help=text, description=text, allow_abbrev=False)
    bench_serve.add_arguments(serve)
    serve.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    for kind in (throughput, latency, prefill, serve):
        kind.set_defaults(parser=kind)


def run(args: argparse.Namespace) -> int:
    if args.kind == "serve":
        return bench_serve.run(args)
    from nanovllm.bench import report
    from nanovllm.bench.roofline import Cost
    from nanovllm.inspector.record import recording

    only_json = args.json is not None and str(args.json) == "-"

    def show(text: str) -> None:
        if not only_json:
            print(text, flush=True)

    results, rows = [], []
    with ExitStack() as stack:
        _choose_model(args, stack)
        _make_room(args)
        config = engine_config(args)
        machine = _machine(config, args)  # while the memory is free
        llm = stack.enter_context(make_llm(config))
        cost, facts = Cost.of(llm), report.facts(llm)
        title = f"{facts['model']} in {facts['dtype']}, {facts['device']}, torch {facts['torch']}, {facts['date']}"
        show(title)
        with recording(llm, args.record):
            for result in _measure(llm, args):
                row = report.result_row(result, cost, machine)
                if not rows:
                    show(report.head_line(row))
                show(report.row_line(row))
                results.append(result)
                rows.append(row)
    if args.profile:
        for result in results:
            show(f"\n{report.profile_table(result)}")
    show(report.roofline_line(results, cost, machine))
    if args.plot:
        report.plot(args.plot, rows, results, title)
    if args.json:
        text = json.dumps(report.report(facts, rows, results, machine, args.profile), indent=1)
        print(text) if only_json else args.json.write_text(text + "\n")
    return 0


def _machine(config: EngineConfig, args: argparse.Namespace) -> Machine:
    """The rates of the device that the engine will run on."""
    from nanovllm.bench.roofline import Machine
    from nanovllm.engine.build import examine
    from nanovllm.parallel.rendezvous import external_rank

    if external_rank(config.distributed_init_method, config.tensor_parallel_size):
        return Machine(1.0, 1.0)  # a rank above 0 has no results
    device, _, _, model = examine(config)
    given = (args.bandwidth and 1e12 * args.bandwidth, args.compute and 1e12 * args.compute)
    return Machine.measure(device, model.dtype, *given)


def _choose_model(args: argparse.Namespace, stack: ExitStack) -> None:
    """MODEL, or a folder with the config of --hf-config."""
    from nanovllm.bench.hf_configs import config_folder

    if (args.model is None) == (args.hf_config is None):
        got = "neither" if args.model is None else f"{args.model} and {args.hf_config}"
        raise ValueError(f"bench: expected MODEL or --hf-config NAME, got {got}")
    if args.hf_config is not None:
        if vars(args).get("load_format") != "dummy":
            raise ValueError("bench: --hf-config has no weights, it needs --load-format dummy")
        args.model = stack.enter_context(config_folder(args.hf_config))


def _make_room(args: argparse.Namespace) -> None:
    """Limits that were not given are large enough for the longest request, and for a prompt in one step."""
    from nanovllm.bench.engine import PREFILL_LENGTHS
    from nanovllm.config import EngineConfig

    defaults = {f: EngineConfig.__dataclass_fields__[f].default for f in ("max_model_len", "max_num_batched_tokens")}
    if args.kind == "prefill":
        longest = max(args.input_len or PREFILL_LENGTHS)
        needed = {"max_model_len": longest + 1, "max_num_batched_tokens": longest}
    else:
        lengths = (args.input_len, args.output_len)
        longest = sum(max(n) if isinstance(n, (tuple, list)) else n for n in lengths)
        needed = {"max_model_len": longest}
    for name, least in needed.items():
        if name not in vars(args):
            setattr(args, name, max(least, defaults[name]))


def _measure(llm: LLM, args: argparse.Namespace) -> Iterator[Result]:
    """The results, each when it is there."""
    from nanovllm.bench import engine

    seed = llm.config.seed
    if args.kind == "throughput":
        vocab_size = llm.engine.vocab_size or sys.maxsize
        work = engine.Workload.random(
            args.num_requests, tuple(args.input_len), tuple(args.output_len), vocab_size, seed
        )
        show = sys.stderr.isatty()
        yield engine.throughput(llm, work, args.temperature, args.profile, show)
    elif args.kind == "latency":
        options: dict[str, Any] = {"runs": args.runs, "temperature": args.temperature, "profile": args.profile}
        for count in args.num_requests:
            yield engine.latency(llm, count, args.input_len, args.output_len, seed=seed, **options)
    else:
        lengths = args.input_len or [n for n in engine.PREFILL_LENGTHS if n < llm.config.max_model_len]
        shares = [0.0, args.prefix_hit] if args.prefix_hit and llm.config.enable_prefix_caching else [0.0]
        for length in lengths:
            for share in shares:
                yield engine.prefill(llm, length, share, args.runs, seed, args.profile)
