"""Seconds from process start to the first token, by phase; one line of JSON.

    python benchmarks/startup.py MODEL [--option value ...]     options of LLM, as JSON values

Run it in a process of its own: importing is a part of what it measures. With weights in the page cache, run it twice.
"""

import json
import os
import sys
import time


def process_age() -> float:
    """Seconds since the kernel started this process."""
    with open("/proc/self/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])  # field 22, in clock ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def main() -> None:
    model, *words = sys.argv[1:]
    options = {name.removeprefix("--").replace("-", "_"): json.loads(v) for name, v in zip(words[::2], words[1::2])}
    from nanovllm import LLM, SamplingParams

    imported = process_age()
    with LLM(model, **options) as llm:
        phases = dict(llm.engine.startup_seconds)
        phases["import"] += imported
        before = process_age()
        llm.generate([[1] * 16], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        now = process_age()
        phases["first token"] = now - before
        phases["other"] = now - sum(phases.values())
        print(json.dumps(phases | {"total": now}))


if __name__ == "__main__":
    main()
