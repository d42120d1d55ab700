"""`nanovllm bench serve`: load on a running server."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

from nanovllm.cli.flags import chart, writable

SUMMARY = "load a running OpenAI-compatible server: latencies, throughput, goodput under an SLO"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("server")
    where.add_argument("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="default: %(default)s")
    where.add_argument("--model", metavar="NAME", help="model to ask for (default: the server's first)")
    where.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    where.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="default: %(default)s")
    what = parser.add_argument_group("requests")
    what.add_argument("--num-prompts", type=int, default=200, metavar="N", help="requests to send (default: 200)")
    for name, low, high in (("input", 100, 500), ("output", 50, 200)):
        what.add_argument(
            f"--{name}-len",
            type=int,
            nargs=2,
            default=(low, high),
            metavar=("MIN", "MAX"),
            help=f"{name} tokens of a request, uniform in this range, of random words (default: {low} {high})",
        )
    what.add_argument(
        "--prompts", metavar="FILE", help="prompts in place of random ones: text or JSON, a line each; repeated"
    )
    what.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="vLLM's field, so that every answer has its length; --no-ignore-eos for servers without it",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="requests per second, Poisson (default: inf)"
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests that run at the same time at most")
    load.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="requests before, not counted (default: 1)"
    )
    load.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (default: 600)"
    )
    load.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME=MS",
        help="ttft, tpot, itl or e2e limit in ms, for goodput; may be repeated",
    )
    out.add_argument("--output", type=writable, metavar="FILE", help="write the summary and every request as JSON")
    text = "draw the distributions (.svg, .png, .pdf; needs matplotlib)"
    out.add_argument("--plot", type=chart, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    from nanovllm.bench import serving

    slo = serving.parse_slo(args.slo)
    load = serving.Load(args.request_rate, args.max_concurrency, args.timeout, args.seed)
    if args.prompts is None:
        lengths = (tuple(args.input_len), tuple(args.output_len))
        bodies = serving.random_bodies(args.num_prompts, *lengths, args.seed)
    else:
        lines = Path(args.prompts).read_text().splitlines()
        bodies = serving.bodies_from_lines(lines, args.num_prompts, args.output_len[1])
    records, seconds = asyncio.run(_run(args, bodies, load))
    result = serving.summary(records, seconds, slo)
    if args.output is not None:
        args.output.write_text(json.dumps(serving.full_record(result, records)))
    if args.plot is not None:
        from nanovllm.bench.serving_plot import plot

        rate = "all at once" if math.isinf(load.request_rate) else f"{load.request_rate:g} requests/s"
        plot(records, args.plot, f"{args.base_url}: {len(records)} requests, {rate}")
    print(json.dumps(result) if args.json else table(result))
    return 0


async def _run(args: argparse.Namespace, bodies: list[dict[str, Any]], load: Any) -> tuple[list[Any], float]:
    from tqdm import tqdm

    from nanovllm.bench import serving
    from nanovllm.bench.http_stream import Endpoint, HttpError

    endpoint = Endpoint(args.base_url, args.api_key)
    model = args.model
    if model is None:
        try:
            model = (await asyncio.wait_for(endpoint.get_json("/models"), args.timeout))["data"][0]["id"]
        except asyncio.TimeoutError:
            raise OSError(f"bench serve: no models from {args.base_url} within {args.timeout:g} seconds") from None
        except (HttpError, LookupError, TypeError, ValueError) as e:
            raise RuntimeError(f"bench serve: the server does not say its models, set --model: {e}") from None
        except OSError as e:
            raise OSError(f"bench serve: no server at {args.base_url}: {e}") from None
    common: dict[str, Any] = {"model": model, "temperature": args.temperature}
    if args.ignore_eos:
        common["ignore_eos"] = True
    path = serving.PATHS[args.endpoint]
    requests = [serving.as_request(body, args.endpoint, common) for body in bodies]
    if args.num_warmups:
        warmups = [requests[i % len(requests)] for i in range(args.num_warmups)]
        serving.summary(*await serving.run(endpoint, path, warmups, serving.Load(timeout=load.timeout)), {})
    counts = {"failed": 0, "tokens": 0}
    with tqdm(total=len(requests), unit="request", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:

        def on_done(record: serving.Record) -> None:
            counts["failed"] += record.error is not None
            counts["tokens"] += record.output_tokens
            bar.update()
            elapsed = bar.format_dict["elapsed"] or 1e-9
            bar.set_postfix_str(f"{counts['tokens'] / elapsed:,.0f} tok/s, {counts['failed']} failed", refresh=False)

        return await serving.run(endpoint, path, requests, load, on_done)


def table(result: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [
        f"{result['requests']} requests, {result['failed']} failed, in {result['seconds']:.2f} s: "
        f"{result['requests_per_second']:.2f} requests/s, {result['output_tokens_per_second']:,.1f} output tokens/s "
        f"({result['prompt_tokens']:,} in, {result['output_tokens']:,} out)"
    ]
    heads = ("mean", "p50", "p90", "p95", "p99")
    lines.append(f"{'ms':<22}" + "".join(f"{head:>10}" for head in heads))
    names = {
        "ttft_ms": "time to first token",
        "tpot_ms": "per output token",
        "itl_ms": "between pieces",
        "e2e_ms": "end to end",
    }
    for key, name in names.items():
        if result[key]:
            lines.append(f"{name:<22}" + "".join(f"{result[key][head]:>10.2f}" for head in heads))
    if "goodput" in result:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in result["slo_ms"].items())
        share = 100 * result["slo_attainment"]
        lines.append(f"goodput {result['goodput']:.2f} requests/s: {share:.1f} % within {limits}")
    lines += [f"{count} x {error}" for error, count in result.get("errors", {}).items()]
    return "\n".join(lines)
