"""What an fp8 KV cache costs in quality: perplexity and greedy tokens against a cache of the model's dtype.

    python benchmarks/kv_cache_dtype.py models/SmolLM2-135M-Instruct.Q4_1.gguf --json kv_cache_dtype.json

The text is pydoc's topics (English prose that every CPython has), or a file. Perplexity reads it in chunks of 16
tokens: all but a window's first 16 attend through the cache alone. Greedy tokens follow 48 pieces of the text.
"""

import argparse
import json
import math
import platform
import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams, __version__
from nanovllm.engine.context import Context

CHUNK, WINDOW, NUM_WINDOWS = 16, 1024, 16
PIECE, NUM_PIECES, NUM_GREEDY = 64, 48, 64
Windows = list[list[int]]


def text_of(path: Path | None) -> str:
    return path.read_text() if path else "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))


def windows(token_ids: list[int], length: int, count: int) -> Windows:
    """Pieces spread evenly over the text."""
    step = (len(token_ids) - length) // count
    return [token_ids[i * step : i * step + length] for i in range(count)]


def read(llm: LLM, texts: Windows) -> tuple[float, list[int]]:
    """Mean negative log likelihood (nats a token) of the windows, and the most likely token at every position."""
    runner = llm.engine.runner
    run_model, rows = runner.run_model, []

    def run_and_keep(input_ids: Tensor, positions: Tensor, context: Context, logits_indices: Tensor) -> Tensor:
        rows.append(run_model(input_ids, positions, context, None).float())
        return rows[-1][logits_indices]

    runner.run_model = run_and_keep
    total, best = 0.0, []
    for text in texts:
        rows.clear()
        llm.generate([text], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        logits = torch.cat(rows)[: len(text) - 1]
        targets = torch.tensor(text[1:], device=logits.device)
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        best += logits.argmax(-1).tolist()
    runner.run_model = run_model
    return total / len(best), best


def measure(model: str, kv_cache_dtype: str, args: argparse.Namespace) -> dict:
    options = {"dtype": args.dtype, "max_model_len": WINDOW + 1, "max_num_batched_tokens": CHUNK, "max_num_seqs": CHUNK}
    with LLM(model, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, enforce_eager=True, **options) as llm:
        token_ids = llm.tokenizer.encode(text_of(args.text))
        loss, best = read(llm, windows(token_ids, WINDOW, args.windows))
        params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True)
        outputs = llm.generate(windows(token_ids, PIECE, args.pieces), params, use_tqdm=False)
        device = llm.engine.runner.device.type
    return {"device": device, "loss": loss, "best": best, "greedy": [o.token_ids for o in outputs]}


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="another text")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default: bfloat16)")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help=f"of {WINDOW} tokens, for the perplexity")
    parser.add_argument("--pieces", type=int, default=NUM_PIECES, help=f"prompts of {PIECE} tokens, for greedy tokens")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()

    exact, fp8 = (measure(args.model, kv_cache_dtype, args) for kv_cache_dtype in ("auto", "fp8_e4m3"))
    same = [a == b for a, b in zip(exact["best"], fp8["best"])]
    prefixes = [common_prefix(a, b) for a, b in zip(exact["greedy"], fp8["greedy"])]
    result = {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "device": exact["device"],
        "machine": torch.cuda.get_device_name() if exact["device"] == "cuda" else platform.machine(),
        "nanovllm": __version__,
        "torch": torch.__version__,
        "perplexity": {"auto": math.exp(exact["loss"]), "fp8_e4m3": math.exp(fp8["loss"])},
        "positions": len(same),
        "same most likely token": sum(same) / len(same),
        "greedy sequences": len(prefixes),
        "greedy sequences that agree": sum(n == NUM_GREEDY for n in prefixes) / len(prefixes),
        "mean common prefix": f"{sum(prefixes) / len(prefixes):.1f} of {NUM_GREEDY} tokens",
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
