"""What the GPU does in one steady decode step, from the profiler's trace: every kernel and copy in order.

    python benchmarks/step_trace.py --rows 1 8 64 [--context 640]

Dummy weights of Qwen3-0.6B's shape in bfloat16. Of the steps that are alike (those without new blocks), the mean of
each node, in us: since the step's first node began; it ran; the GPU had nothing to do before it (negative: it began
while the node before it ran, by programmatic launch); "adds": it ran and none that began before it. What nodes add and
the gaps make up the step. Of the layers the first two and the end of the last one are listed. The wall time of a step
is measured apart, without the profiler.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.bench.hf_configs import config_folder
from nanovllm.bench.step_times import HOST_PHASES, record_steps

_STEPS = 96


@dataclass(slots=True)
class Node:
    """One kernel or copy, in us."""

    name: str
    start: float
    end: float
    gap: float = 0.0
    adds: float = 0.0


def short(name: str) -> str:
    """A kernel's name with its template's arguments, without namespaces and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|void |\(int\)|\(bool\)", "", name)
    name = re.sub(r"\(.*", "", name) if "Mem" not in name else name
    return re.sub(r"(\w+::)+", "", name)[:72]


def nodes_of(trace: profile) -> list[Node]:
    device = torch.autograd.DeviceType.CUDA
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type == device]
    nodes, until = [], None
    for start, end, name in sorted(spans):
        gap = 0.0 if until is None else start - until
        adds = end - start if until is None else max(0.0, end - max(start, until))
        nodes.append(Node(short(name), start, end, gap, adds))
        until = end if until is None else max(until, end)
    return nodes


def steps_of(nodes: list[Node], last: str) -> list[list[Node]]:
    """Nodes of each whole step; `last`: the name that ends one."""
    steps: list[list[Node]] = [[]]
    for node in nodes:
        steps[-1].append(node)
        if last in node.name:
            steps.append([])
    return steps[1:-1]


def report(steps: list[list[Node]]) -> None:
    kinds = Counter(tuple(n.name for n in s) for s in steps)
    names, count = kinds.most_common(1)[0]
    alike = [s for s in steps if tuple(n.name for n in s) == names]
    total = statistics.mean(sum(max(0.0, n.gap) + n.adds for n in s) for s in alike)
    print(f"{count} of {len(steps)} steps alike, {len(names)} nodes, {total:.1f} us")
    for other, times in kinds.most_common()[1:4]:
        mean = statistics.mean(
            sum(max(0.0, n.gap) + n.adds for n in s) for s in steps if tuple(n.name for n in s) == other
        )
        more = Counter(other) - Counter(names)
        print(f"    {times} others of {len(other)} nodes, {mean:.1f} us, with {dict(more)}")
    columns = [[s[i] for s in alike] for i in range(len(names))]
    first = [s[0].start for s in alike]
    repeated = Counter(names)
    of_layers = [n for n in repeated if repeated[n] > 4]
    shown = range(len(names))
    if of_layers:
        rarest = min(of_layers, key=lambda n: repeated[n])
        places = [i for i, name in enumerate(names) if name == rarest]
        shown = [*range(places[2]), *range(places[-1], len(names))]
    print(f"{'at':>8} {'runs':>7} {'gap':>6} {'adds':>7}  node")
    for i in shown:
        at = statistics.mean(n.start - f for n, f in zip(columns[i], first))
        ran, gap, adds = (statistics.mean(f(n) for n in columns[i]) for f in (_ran, lambda n: n.gap, lambda n: n.adds))
        print(f"{at:8.1f} {ran:7.2f} {gap:6.2f} {adds:7.2f}  {names[i]}")
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, column in zip(names, columns):
        for i, f in enumerate((_ran, lambda n: n.gap, lambda n: n.adds)):
            totals[name][i] += statistics.mean(f(n) for n in column)
    print(f"{'count':>8} {'runs':>7} {'gaps':>6} {'adds':>7}  in all")
    for name, (ran, gap, adds) in sorted(totals.items(), key=lambda item: -item[1][2]):
        print(f"{repeated[name]:8} {ran:7.1f} {gap:6.1f} {adds:7.1f}  {name}")


def _ran(node: Node) -> float:
    return node.end - node.start


def trace(llm: LLM, rows: int, context: int, last: str) -> None:
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=3 * _STEPS + 40, ignore_eos=True)
    for i in range(rows):
        engine.add_request([(i * 7 + j) % 1000 for j in range(context - 2 * _STEPS)], params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(16):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_STEPS):
        engine.step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) / _STEPS * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    with record_steps(engine, device=False) as times:
        llm.generate([[i] * 16 for i in range(rows)], replace(params, max_tokens=_STEPS), use_tqdm=False)
    times = [s for s in times if s.kind == "decode"]
    host = {phase: statistics.median(getattr(s, phase) for s in times) * 1e6 for phase in HOST_PHASES}
    parts = ", ".join(f"{phase} {us:.0f}" for phase, us in host.items())
    print(f"\n== {rows} rows, {context} tokens of context: {wall:.1f} us a step; on the host {parts}")
    report(steps_of(nodes_of(traced), last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=640, help="tokens of each row, about")
    parser.add_argument("--hf-config", default="qwen3-0.6b", help="another shape: see nanovllm bench --help")
    parser.add_argument("--last", default="sample_kernel", help="part of the name of a step's last node")
    args = parser.parse_args()
    with config_folder(args.hf_config) as model:
        llm = LLM(model, load_format="dummy", max_model_len=4096, max_num_seqs=256, enable_prefix_caching=False)
        for rows in args.rows:
            trace(llm, rows, args.context, args.last)
        llm.exit()


if __name__ == "__main__":
    main()
