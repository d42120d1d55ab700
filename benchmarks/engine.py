"""The engine on a GPU, dummy weights of Qwen3-0.6B's shape in bfloat16: every workload that others are compared on.

    python benchmarks/engine.py --json benchmarks/results/engine_h200.json

Wall time of generate() with token-id prompts, prefill included, no detokenising, after one short warm-up; output
tokens over that time. Time to first token: prompts of one step, one output token. EOS is ignored, seed 0. All is as
`nanovllm bench` measures it. "gpu idle" is 1 - the time in which a kernel ran over the wall time of a steady decode,
from the profiler's trace. Parts are independent: --only takes some of them; engine flags go to all.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.bench import engine, report, roofline
from nanovllm.bench.hf_configs import config_folder
from nanovllm.cli.flags import add_engine_flags
from nanovllm.config import EngineConfig

Row = dict[str, Any]
SHORT = {"max_model_len": 4096, "max_num_seqs": 256, "enable_prefix_caching": True}
LONG = {"max_model_len": 32769, "max_num_batched_tokens": 32768, "max_num_seqs": 16}


def rows_of(llm: LLM, results: list[engine.Result], machine: roofline.Machine) -> list[Row]:
    cost = roofline.Cost.of(llm)
    return [report.result_row(r, cost, machine) for r in results]


def throughput(llm: LLM, machine: roofline.Machine) -> list[Row]:
    """nano-vLLM's bench.py; and other prompts of these lengths (the first are cached now) with the steps timed."""
    works = [engine.Workload.random(256, (100, 1024), (100, 1024), llm.engine.vocab_size, seed) for seed in (0, 1)]
    results = [engine.throughput(llm, work, profile=timed) for timed, work in enumerate(works)]
    print(report.profile_table(results[1]), flush=True)
    return rows_of(llm, results[:1], machine)


def latency(llm: LLM, machine: roofline.Machine) -> list[Row]:
    cases = [(1, 128, 512), (8, 512, 256), (64, 512, 256)]
    return rows_of(llm, [engine.latency(llm, *case, temperature=0.0) for case in cases], machine)


def prefill(llm: LLM, machine: roofline.Machine) -> list[Row]:
    cases = [(128, 0.0), (8192, 0.0), (8192, 0.9), (32768, 0.0)]
    return rows_of(llm, [engine.prefill(llm, *case, runs=5) for case in cases], machine)


def idle(llm: LLM, machine: roofline.Machine) -> list[Row]:
    """Steady decode of some batch sizes under the profiler."""
    rows = []
    for batch in (1, 8, 64, 256):
        for i in range(batch):
            llm.engine.add_request([i % 1000] * 256, SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
        for _ in range(batch // 8 + 40):
            llm.engine.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(50):
                llm.engine.step()
            torch.cuda.synchronize()
        rows.append({"decoding": batch, "gpu idle": idle_share(trace)})
        while llm.engine.has_work:
            llm.engine.step()
    return rows


def idle_share(trace: torch.profiler.profile) -> float:
    """1 - the union of all kernels' and copies' times over the time from the first to the last."""
    device = torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type == device)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


def startup(model: str) -> list[Row]:
    """In a process of its own, of a checkpoint that was just written: it is in the page cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).bfloat16().save_pretrained(folder)
        torch.cuda.empty_cache()
        command = [sys.executable, str(Path(__file__).with_name("startup.py")), folder]
        line = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line)]


# Part -> what makes its rows, and the options of its engine; parts with the same options share one.
PARTS: dict[str, tuple[Callable[[LLM, roofline.Machine], list[Row]], Row]] = {
    "throughput": (throughput, SHORT),
    "latency": (latency, SHORT),
    "idle": (idle, SHORT),
    "prefill": (prefill, LONG),
    "throughput, fp8 KV cache": (throughput, SHORT | {"kv_cache_dtype": "fp8_e4m3"}),
}


def run(wanted: list[str], model: str, given: Row) -> Iterator[tuple[str, Row]]:
    """Name and content of every part that is wanted, then of what was run on."""
    device = torch.device("cuda", torch.cuda.current_device())
    machine = roofline.Machine.measure(device, torch.bfloat16)
    llm, options, facts = None, None, None
    for name in [n for n in PARTS if n in wanted]:
        measure, its_options = PARTS[name]
        if its_options != options:
            if llm is not None:
                llm.exit()
            llm, options = LLM(model, load_format="dummy", **its_options | given), its_options
            facts = report.facts(llm)
        rows = measure(llm, machine)
        print(f"{name}\n{report.table(rows)}", flush=True)
        yield name, {"options": facts["options"], "rows": rows}
    if llm is not None:
        llm.exit()
    if "startup" in wanted:
        rows = startup(model)
        print(f"startup\n{report.table(rows)}", flush=True)
        yield "startup", {"rows": rows}
    if facts is not None:
        yield "facts", {k: v for k, v in facts.items() if k != "options"}
    yield "machine", {"bandwidth": machine.bandwidth, "compute": machine.compute}


def main() -> None:
    names = [*PARTS, "startup"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=names, help="this part; may be repeated (default: all)")
    parser.add_argument("--hf-config", default="qwen3-0.6b", help="another shape: see nanovllm bench --help")
    parser.add_argument("--json", type=Path, help="write the rows to this file, as they come")
    add_engine_flags(parser, model_is_optional=True)
    args = parser.parse_args()
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig) if hasattr(args, f.name)}
    given.pop("model")
    content: Row = {}
    with config_folder(args.hf_config) as model:
        for name, part in run(args.only or names, model, given):
            content = part | content if name == "facts" else content | {name: part}
            if args.json:
                args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
