"""What the HTTP layer costs, without a model: an engine whose steps take a fixed time, behind the real server.

    python benchmarks/serving_overhead.py --streams 64 --step-ms 2.5 --tokens 1000

A process serves a stub model runner (a step sleeps --step-ms, as the host does while a GPU works, and gives every
sequence a token); this one reads the streams. Printed: tokens per second against the ideal of streams / step-ms, and
the server's CPU time per token, of all its threads. --offline runs the same engine under LLM-like stepping instead.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

from nanovllm import async_llm
from nanovllm.config import EngineConfig
from nanovllm.engine.batch import Batch
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.sampling_params import SamplingParams

MODEL = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Once upon a time there was a small engine"


@dataclasses.dataclass
class StubRunner:
    """Steps that take step_s seconds; a launch finds the device busy until the step before it is done."""

    step_s: float
    vocab_size: int
    num_kvcache_blocks: int = 1 << 16
    ready_at: float = 0.0
    num_steps: int = 0

    def launch(self, batch: Batch) -> tuple[float, list[int]]:
        self.num_steps += 1
        self.ready_at = max(self.ready_at, time.perf_counter()) + self.step_s
        return self.ready_at, [300 + (s.seq_id * 79 + self.num_steps * 31) % 400 for s in batch.sampled]

    def collect(self, handle: tuple[float, list[int]]) -> tuple[list[int], dict[int, Any]]:
        time.sleep(max(handle[0] - time.perf_counter(), 0))
        return handle[1], {}


def make_engine(step_s: float, streams: int, tokens: int) -> LLMEngine:
    from nanovllm.loader.gguf_tokenizer import load_gguf_tokenizer

    tokenizer = load_gguf_tokenizer(MODEL)
    config = EngineConfig(model="stub", max_num_seqs=streams, max_model_len=tokens + 64)
    return LLMEngine(config, StubRunner(step_s, len(tokenizer)), tokenizer, frozenset(), len(tokenizer), overlap=True)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(step_s: float, streams: int, tokens: int, max_chunks: float, profile: str | None, pipe: Any) -> None:
    """The server's process: says its port, serves until told to stop, and says what it used."""
    from nanovllm.server import run
    from nanovllm.server.config import ServerConfig

    engine = make_engine(step_s, streams, tokens)
    async_llm.build_engine = lambda config: (engine, SamplingParams())  # type: ignore[assignment]
    llm = async_llm.AsyncLLM("stub")
    config = ServerConfig(port=0, access_log=False, max_chunks_per_second=max_chunks)
    sys.setswitchinterval(run.SWITCH_INTERVAL)
    with run.listening(config) as sock:
        server = run.make_server(llm, config)

        async def main() -> None:
            task = asyncio.create_task(server.serve(sockets=[sock]))
            while not server.started:
                await asyncio.sleep(0.01)
            before, loop = cpu_seconds(), asyncio.get_running_loop()
            pipe.send(sock.getsockname()[1])
            await loop.run_in_executor(None, pipe.recv)
            pipe.send((cpu_seconds() - before, engine.runner.num_steps))
            server.should_exit = True
            await task

        loop = server.config.get_loop_factory()()
        loop_main = loop.run_until_complete
        if profile:
            import cProfile

            profiler = cProfile.Profile(time.thread_time)
            profiler.runcall(lambda: loop_main(main()))
            profiler.dump_stats(profile)
        else:
            loop_main(main())
    llm.shutdown()


async def read_stream(port: int, path: str, body: dict[str, Any]) -> int:
    """Events of one streamed answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    count = 0
    while chunk := await reader.read(1 << 20):
        count += chunk.count(b"data: ")
    writer.close()
    return count


async def load(port: int, streams: int, tokens: int) -> tuple[float, int]:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "stream": True}
    start = time.perf_counter()
    events = await asyncio.gather(*(read_stream(port, "/v1/chat/completions", body) for _ in range(streams)))
    return time.perf_counter() - start, sum(events)


def offline(step_s: float, streams: int, tokens: int) -> tuple[float, float, int]:
    engine = make_engine(step_s, streams, tokens)
    prompt = engine.tokenizer.encode(PROMPT)
    start, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(streams):
        engine.add_request(prompt, SamplingParams(max_tokens=tokens))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start, cpu_seconds() - cpu, engine.runner.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=2.5)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--max-chunks-per-second", type=float, default=10_000)
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--profile", metavar="FILE", help="write a cProfile of the event loop's thread")
    args = parser.parse_args()
    step_s, total = args.step_ms / 1e3, args.streams * args.tokens
    if args.offline:
        seconds, cpu, steps = offline(step_s, args.streams, args.tokens)
        events = 0
    else:
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=serve, args=(step_s, args.streams, args.tokens, args.max_chunks_per_second, args.profile, there)
        )
        process.start()
        seconds, events = asyncio.run(load(here.recv(), args.streams, args.tokens))
        here.send(None)
        cpu, steps = here.recv()
        process.join()
    ideal = args.streams / step_s
    print(
        f"{total / seconds:,.0f} tokens/s, {100 * total / seconds / ideal:.1f} % of the ideal {ideal:,.0f}; "
        f"CPU {1e6 * cpu / total:.1f} us a token; {steps} steps, {events / total:.2f} events a token"
    )


if __name__ == "__main__":
    main()
