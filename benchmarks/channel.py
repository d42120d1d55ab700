"""The control channel: from rank 0's write to a worker's wake-up, and to the decoded step.

    python benchmarks/channel.py [--workers 1] [--rows 32]

Messages of a decode step, `gap` apart, in which rank 0 is busy, as with scheduling: back to back, as far apart as steps
are, and as in an engine that is almost idle. Workers wait as on the CPU (short spin) and as with GPUs (long spin). The
wake-up is timed from rank 0's call. Needs no GPU. Microseconds.
"""

import argparse
import os
import statistics
import time
from multiprocessing import Pipe

from nanovllm.engine.batch import Batch, Chunk
from nanovllm.engine.sequence import Sequence
from nanovllm.parallel.messages import StepDecoder, encode_step
from nanovllm.parallel.ring import LONG_SPIN, SHORT_SPIN, RingReceiver, RingSender, create_memory

GAPS_MS = {0.0: 1000, 0.2: 1000, 2.0: 400, 8.0: 150, 50.0: 20}  # milliseconds: how many messages


def steps(rows: int) -> list[Batch]:
    """A step that admits the rows, then one that decodes them."""
    seqs = []
    for row in range(rows):
        seq = Sequence(list(range(100)), 16)
        seq.row, seq.block_table = row, list(range(7))
        seqs.append(seq)
    return [Batch([], [], [Chunk(s, 0, 100, True) for s in seqs]), Batch(seqs, [101] * rows)]


def worker(fd: int, size: int, rank: int, spin: float, connection) -> None:
    receiver, decoder = RingReceiver(fd, size, rank, spin), StepDecoder()
    decoder.decode(receiver.receive())
    for count in GAPS_MS.values():
        times, busy = [], time.process_time()
        for _ in range(count):
            message = receiver.receive()
            awake = time.perf_counter_ns()
            decoder.decode(message)
            times.append((awake, time.perf_counter_ns()))
        connection.send((times, time.process_time() - busy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    print(f"{args.workers} workers, {args.rows} rows, {os.cpu_count()} cores")
    for name, spin in (("short spin", SHORT_SPIN), ("long spin", LONG_SPIN)):
        measure(name, spin, args.workers + 1, args.rows)


def measure(name: str, spin: float, size: int, rows: int) -> None:
    fd = create_memory(size)
    pipes = [Pipe() for _ in range(size - 1)]
    for rank, (_, theirs) in enumerate(pipes, 1):
        if os.fork() == 0:
            worker(fd, size, rank, spin, theirs)
            os._exit(0)
    sender = RingSender(fd, size, lambda: None)
    admit, decode = steps(rows)
    sender.send(encode_step(admit))
    for seq in decode.decodes:
        seq.num_synced_blocks = len(seq.block_table)
    message = encode_step(decode)
    encode_us = statistics.median(_time(lambda: encode_step(decode)) for _ in range(200))
    print(f"{name}: messages of {len(message)} bytes, encoded in {encode_us:.1f}")
    for gap, count in GAPS_MS.items():
        sent, took = [], []
        start = time.perf_counter()
        for _ in range(count):
            until = time.perf_counter() + gap / 1000
            while time.perf_counter() < until:
                pass
            sent.append(time.perf_counter_ns())
            sender.send(message)
            took.append(time.perf_counter_ns() - sent[-1])
        seconds = time.perf_counter() - start
        results = [mine.recv() for mine, _ in pipes]
        wakes = sorted((t[0] - s) / 1000 for times, _ in results for t, s in zip(times, sent))
        decodes = [(t[1] - t[0]) / 1000 for times, _ in results for t in times]
        busy = max(b for _, b in results) / seconds
        print(
            f"  gap {gap:4.1f} ms: send {statistics.median(took) / 1000:6.1f}  "
            f"wake-up median {statistics.median(wakes):6.1f}  p99 {wakes[int(0.99 * len(wakes))]:7.1f}  "
            f"decode {statistics.median(decodes):5.1f}  core {100 * busy:5.1f}%"
        )


def _time(call) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


if __name__ == "__main__":
    main()
