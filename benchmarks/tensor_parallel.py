"""Decode of one model on 1, 2, 4 ... GPUs of a host: random weights of SmolLM2-135M's, Qwen3-8B's or Qwen3-32B's shape.

    python benchmarks/tensor_parallel.py --shapes smollm2 8b 32b --ranks 1 2 4 [--json results.json]

A line a number of ranks and batch size: milliseconds of a decode step, and how many times faster than the first number
of ranks. Then how the greedy texts compare with that one's: how many are the same and, of the others, by how much the
token where they part is less likely there than its best one. Sums over ranks are rounded otherwise, so near ties may
turn: that is at most twice the noise, the largest difference of two logprobs of the same token after the same text.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from timing import write_json

from nanovllm import LLM, RequestOutput, SamplingParams

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "smollm2": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "8b": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32b": QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
PROMPT_LEN, OUTPUT_LEN, BATCHES = 64, 100, (1, 32)
LOGPROBS = 5


def measure(folder: str, ranks: int, **options) -> tuple[dict[int, float], list[RequestOutput]]:
    """Batch size to milliseconds a step; and greedy texts with logprobs."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10_000) for _ in range(PROMPT_LEN)] for _ in range(max(BATCHES))]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    results = {}
    start = time.perf_counter()
    fixed = {
        "load_format": "dummy",
        "max_model_len": 1024,
        "max_num_seqs": max(BATCHES),
        "enable_prefix_caching": False,
    }
    with LLM(folder, tensor_parallel_size=ranks, max_num_batched_tokens=2048, **fixed, **options) as llm:
        print(f"{ranks} ranks: engine in {time.perf_counter() - start:.1f} s", flush=True)
        for batch in BATCHES:
            for _ in range(2):  # the first is a warm-up
                outputs = llm.generate(prompts[:batch], params, use_tqdm=False)
            results[batch] = min((o.latency - o.time_to_first_token) / (OUTPUT_LEN - 1) * 1000 for o in outputs)
        texts = llm.generate(prompts, replace(params, logprobs=LOGPROBS), use_tqdm=False)
    return results, texts


def compare(texts: list[RequestOutput], others: list[RequestOutput]) -> dict[str, float]:
    """same: texts with the same tokens. gap: of the others, the largest distance of the first other token's logprob in
    `texts` from that of the best one; infinite where it is not among the LOGPROBS best. noise: the largest difference
    of the logprobs of a token while the texts are the same."""
    same, gap, noise = 0, 0.0, 0.0
    for mine, theirs in zip(texts, others):
        for a, b, p, q in zip(mine.token_ids, theirs.token_ids, mine.logprobs, theirs.logprobs):
            noise = max(noise, *(abs(p[t].logprob - q[t].logprob) for t in p.keys() & q.keys()))
            if a != b:
                gap = max(gap, p[a].logprob - p[b].logprob if b in p else float("inf"))
                break
        else:
            same += 1
    return {"same": same, "gap": gap, "noise": noise}


def measure_shape(name: str, args: argparse.Namespace) -> list[dict[str, float | str]]:
    rows, first, first_texts = [], None, []
    shape = SHAPES[name] | ({"num_hidden_layers": args.layers} if args.layers else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        for ranks in args.ranks:
            results, texts = measure(folder, ranks, enforce_eager=args.enforce_eager)
            first, first_texts = first or results, first_texts or texts
            texts_row = compare(first_texts, texts)
            for batch, ms in results.items():
                faster = first[batch] / ms
                rows.append({"shape": name, "ranks": ranks, "batch": batch, "ms": ms, "faster": faster} | texts_row)
                print(f"{name:7}  {ranks} ranks  batch {batch:2}  {ms:7.3f} ms  x{faster:.2f}", flush=True)
            same, gap, noise = texts_row.values()
            print(f"{name:7}  {ranks} ranks  {same} of {len(texts)} texts the same, gap {gap:.4f}, noise {noise:.4f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["32b"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = [row for name in args.shapes for row in measure_shape(name, args)]
    write_json(args.json, rows, layers=args.layers)


if __name__ == "__main__":
    main()
