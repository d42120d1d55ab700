"""The engine on a GPU: throughput of several workloads on random weights of Qwen3-0.6B's shape, in one run.

    python benchmarks/engine.py --json benchmarks/results/engine_h200.json

Wall time of generate() with token-id prompts, prefill included, no detokenising, after one short warm-up; output tokens
over that time. Lengths are drawn uniformly from the ranges, seed 0; EOS is ignored.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm import LLM, SamplingParams

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Workload:
    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    temperature: float = 0.0

    def __str__(self) -> str:
        lengths = ["..".join(map(str, sorted({*r}))) for r in (self.input_len, self.output_len)]
        return f"{self.num_requests} x {lengths[0]} in, {lengths[1]} out, T {self.temperature:g}"


WORKLOADS = [
    Workload(1, (128, 128), (512, 512)),
    Workload(8, (512, 512), (256, 256)),
    Workload(64, (512, 512), (256, 256)),
    Workload(256, (100, 1024), (100, 1024), temperature=0.6),  # nano-vLLM's bench.py
]


def run(llm: LLM, workload: Workload) -> dict:
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10000) for _ in range(rng.randint(*workload.input_len))] for _ in range(workload.num_requests)
    ]
    params = [
        SamplingParams(temperature=workload.temperature, ignore_eos=True, max_tokens=rng.randint(*workload.output_len))
        for _ in prompts
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(o.token_ids) for o in outputs)
    assert tokens == sum(p.max_tokens for p in params)
    return {"workload": str(workload), "seconds": seconds, "output_tokens": tokens, "tok_s": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, random weights of Qwen3-0.6B's shape, bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_0_6B))
        options = {"max_num_seqs": args.max_num_seqs, "enforce_eager": args.enforce_eager}
        llm = LLM(folder, load_format="dummy", device="cuda", enable_prefix_caching=False, **options)
    run(llm, Workload(4, (128, 128), (32, 32)))
    rows = [run(llm, w) for w in WORKLOADS]
    for row in rows:
        print(f"{row['workload']:<46} | {row['seconds']:7.3f} s | {row['tok_s']:8.0f} tok/s")
    if args.json:
        result = {"gpu": gpu, "torch": torch.__version__, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
