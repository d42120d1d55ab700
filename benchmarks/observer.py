"""What watching an engine costs: steps in turns, watched and not, in one run.

    python benchmarks/observer.py                                              # the host's side of a decode step
    python benchmarks/observer.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/observer.py --model qwen3-0.6b --device cuda             # random weights of that shape

A line a batch size; every few steps the observer comes or goes, so that both kinds meet the same machine. Without
--model: the engine of benchmarks/scheduler.py, whose model computes nothing, and an observer whose events go nowhere;
medians in microseconds of the thread's CPU time, and what the JSON of an event takes (a recording and a page make it in
another thread). With --model: decode steps of a real model, and a recording of everything to a file; medians of the
wall time of a step, and their ratio.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
from scheduler import PROMPT_LEN, VOCAB, make_engine

from nanovllm import LLM, SamplingParams
from nanovllm.bench.hf_configs import HF_CONFIGS, config_folder
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.observer import Event, Sink, observe, unobserve
from nanovllm.inspector.record import Recorder, encode

BATCHES = (1, 8, 64, 256)
TURN = 20  # steps; the first two of a turn do not count


def steps_in_turns(
    engine: LLMEngine, num_seqs: int, num_turns: int, sink: Sink, clock: Callable[[], float]
) -> tuple[float, float]:
    """Median seconds of a decode step of num_seqs sequences: when nobody watches, and when sink does."""
    params = SamplingParams(temperature=0, max_tokens=2 * num_turns * TURN + 40, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request([(i + j) % VOCAB for j in range(PROMPT_LEN)], params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(10):
        engine.step()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * num_turns):
        is_watched = turn % 4 in (1, 2)  # neither kind is always the first
        if is_watched:
            observe(engine, sink)
        for i in range(TURN):
            start = clock()
            engine.step()
            if i > 1:
                seconds[is_watched].append(clock() - start)
        if is_watched:
            unobserve(engine, sink)
    for request_id in list(engine.requests):
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return median(seconds[False]), median(seconds[True])


def host_side(num_seqs: int, num_turns: int) -> None:
    needed = -(-(PROMPT_LEN + 2 * num_turns * TURN + 60) // 16)
    last: list[Event] = [{}]
    closed, watched = steps_in_turns(
        make_engine(num_seqs, num_seqs * needed),
        num_seqs,
        num_turns,
        lambda event: last.__setitem__(0, event),
        time.thread_time,
    )
    encoding = []
    for _ in range(200):
        start = time.thread_time()
        encode(last[0])
        encoding.append(time.thread_time() - start)
    closed, more, encoded = (s * 1e6 for s in (closed, watched - closed, median(encoding)))
    print(f"{num_seqs:>4} sequences | step {closed:7.1f} us | watched {more:+5.1f} us | JSON {encoded:5.1f} us")


def with_model(llm: LLM, num_seqs: int, num_turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder, "trace.jsonl"))
        closed, watched = steps_in_turns(llm.engine, num_seqs, num_turns, recorder, time.perf_counter)
        recorder.close()
    ms = f"step {closed * 1e3:8.3f} ms | recorded {watched * 1e3:8.3f} ms"
    print(f"{num_seqs:>4} sequences | {ms} | {watched / closed:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model to step; a name of nanovllm/bench/hf_configs.py: random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--turns", type=int, default=12, help="turns of each kind")
    args = parser.parse_args()
    if args.model is None:
        torch.set_num_threads(1)
        for num_seqs in args.batches:
            host_side(num_seqs, args.turns)
        return
    is_shape = args.model in HF_CONFIGS
    with config_folder(args.model) if is_shape else nullcontext(args.model) as model:
        load_format = "dummy" if is_shape else "auto"
        options = {"device": args.device, "load_format": load_format}
        llm = LLM(model, max_num_seqs=max(args.batches), max_model_len=2048, **options)
    for num_seqs in args.batches:
        with_model(llm, num_seqs, args.turns)


if __name__ == "__main__":
    main()
