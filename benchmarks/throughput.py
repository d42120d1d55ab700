"""nanovllm against transformers.generate on CPU or GPU: decode at batch 1 and 16, and prefill, in one run.

    python benchmarks/throughput.py models/SmolLM2-135M-Instruct.Q4_1.gguf --baseline transformers

Both sides get the same token ids, dtype, threads and output lengths, greedy, EOS ignored, after one warm-up. At batch
16 lengths in and out are uneven: transformers pads on the left and runs until its longest row ends; only the tokens
asked for count. Each case alternates the two and takes the median of --repeats.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from nanovllm import LLM, SamplingParams, __version__


@dataclass(frozen=True)
class Case:
    name: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """What a case is measured in: output tokens, or prompt tokens where each row has one output token."""
        return sum(self.prompt_lens) if max(self.output_lens) == 1 else sum(self.output_lens)


def cases() -> list[Case]:
    rng = random.Random(0)
    uneven = [(rng.randint(16, 256), rng.randint(16, 128)) for _ in range(16)]
    return [
        Case("batch 1", (32,), (128,)),
        Case("batch 16, uneven", *zip(*uneven)),
        Case("prefill 1 x 512", (512,), (1,)),
        Case("prefill 1 x 1536", (1536,), (1,)),
        Case("prefill 16 x 128", (128,) * 16, (1,) * 16),
    ]


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ours(llm: LLM, prompts: list[list[int]], case: Case) -> Callable[[], None]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in case.output_lens]

    def run() -> None:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(o.token_ids) for o in outputs] == list(case.output_lens)

    return run


def theirs(model: transformers.PreTrainedModel, prompts: list[list[int]], case: Case) -> Callable[[], None]:
    width = max(case.prompt_lens)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    count = max(case.output_lens)
    options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}

    def run() -> None:
        model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **options)

    return run


def load_baseline(path: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    file = Path(path)
    where = (str(file.parent), {"gguf_file": file.name}) if file.suffix == ".gguf" else (path, {})
    model = transformers.AutoModelForCausalLM.from_pretrained(where[0], dtype=dtype, **where[1])
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--baseline", choices=["transformers", "none"], default="none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()

    llm = LLM(args.model, dtype=args.dtype, enable_prefix_caching=False)
    baseline = load_baseline(args.model, getattr(torch, args.dtype)) if args.baseline == "transformers" else None
    print(
        f"nanovllm {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}, {args.dtype}"
    )
    rng = random.Random(1)
    rows = []
    for case in [c for c in cases() if args.only in c.name]:
        prompts = [[rng.randrange(100, 40000) for _ in range(n)] for n in case.prompt_lens]
        runs = [ours(llm, prompts, case)] + ([theirs(baseline, prompts, case)] if baseline else [])
        for run in runs:
            run()
        times = [[seconds(run) for run in runs] for _ in range(args.repeats)]
        medians = [statistics.median(t) for t in zip(*times)]
        row = {"case": case.name, "tok/s": case.tokens / medians[0]}
        text = f"{case.name:<20} | nanovllm {row['tok/s']:8.1f} tok/s"
        if baseline:
            row |= {"baseline tok/s": case.tokens / medians[1], "ratio": medians[1] / medians[0]}
            text += f" | transformers {row['baseline tok/s']:8.1f} tok/s | {row['ratio']:.2f} x"
        print(text, flush=True)
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
