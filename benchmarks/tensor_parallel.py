"""Decode of one model on 1, 2, 4 ... GPUs of a host: random weights of Qwen3-8B's or Qwen3-32B's shape.

    python benchmarks/tensor_parallel.py --shape 32b --ranks 1 2 4 [--json results.json]

A line a number of ranks and batch size: milliseconds of a decode step, and how many times faster than the first line of
that batch. Prompts are random ids, the same for all; the last column is how many of their first tokens are those of the
first line.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from timing import write_json

from nanovllm import LLM, SamplingParams

COMMON = {
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
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
PROMPT_LEN, OUTPUT_LEN, BATCHES = 64, 100, (1, 32)


def measure(folder: str, ranks: int, **options) -> dict[int, tuple[float, list[int]]]:
    """Batch size to milliseconds a step and the first tokens."""
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
            times = [(o.latency - o.time_to_first_token) / (OUTPUT_LEN - 1) * 1000 for o in outputs]
            results[batch] = (min(times), [o.token_ids[0] for o in outputs])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="32b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shape = COMMON | SHAPES[args.shape]
        shape["num_hidden_layers"] = args.layers or shape["num_hidden_layers"]
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        first = None
        for ranks in args.ranks:
            results = measure(folder, ranks, enforce_eager=args.enforce_eager)
            first = first or results
            for batch, (ms, tokens) in results.items():
                same = sum(a == b for a, b in zip(tokens, first[batch][1]))
                faster = first[batch][0] / ms
                rows.append({"ranks": ranks, "batch": batch, "ms": ms, "faster": faster, "same_first_tokens": same})
                print(
                    f"{args.shape}  {ranks} ranks  batch {batch:2}  {ms:7.3f} ms  x{faster:.2f}  {same} of {batch}",
                    flush=True,
                )
    write_json(args.json, rows, shape=args.shape, layers=shape["num_hidden_layers"])


if __name__ == "__main__":
    main()
