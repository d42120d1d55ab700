"""What HTTP costs on a GPU: the same requests offline and through the server, on random weights of Qwen3-0.6B's shape.

    python benchmarks/serving.py --streams 64 --output-len 1024 --json benchmarks/results/serving_h200.json

Offline: LLM.generate of token ids. Served: `nanovllm serve` of the same model with a made-up tokenizer of its
vocabulary, under `nanovllm bench serve` from a process of its own; chat, streamed. Prompts have as many tokens in both.
Each runs twice and the second counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm.bench.hf_configs import HF_CONFIGS

CONFIG = HF_CONFIGS["qwen3-0.6b"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PORT = 8321


def make_model(path: Path, config: dict[str, Any]) -> Path:
    """A config and a byte-level tokenizer whose tokens beyond the bytes are made-up words."""
    (path / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"\u0120w{i}" for i in range(config["vocab_size"] - len(alphabet) - 1)]
    vocab = {word: i for i, word in enumerate([*words, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


def offline(path: Path, args: argparse.Namespace) -> float:
    """Output tokens a second of LLM.generate."""
    from nanovllm import LLM, SamplingParams

    with LLM(str(path), load_format="dummy", max_num_seqs=args.streams, max_model_len=args.output_len + 512) as llm:
        prompts = [[(7 * i + j) % 256 for j in range(args.input_len)] for i in range(args.streams)]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.output_len)
        seconds = 0.0
        for _ in range(2):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
    return args.streams * args.output_len / seconds


def served(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The summary of `nanovllm bench serve`."""
    base = [sys.executable, "-m", "nanovllm"]
    command = [*base, "serve", str(path), "--load-format", "dummy", "--port", str(PORT), "--no-access-log"]
    command += ["--max-num-seqs", str(args.streams), "--max-model-len", str(args.output_len + 512), *args.serve_flag]
    server = subprocess.Popen(command)
    try:
        for _ in range(1200):
            if server.poll() is not None:
                raise RuntimeError("the server ended")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        prompts = path / "prompts.jsonl"
        lines = (json.dumps({"prompt": chr(97 + i % 26) * args.input_len}) for i in range(args.streams))
        prompts.write_text("\n".join(lines))
        load = [
            *base,
            "bench",
            "serve",
            "--base-url",
            f"http://127.0.0.1:{PORT}/v1",
            "--prompts",
            str(prompts),
            "--json",
        ]
        load += ["--num-prompts", str(args.streams), "--output-len", str(args.output_len), str(args.output_len)]
        load += ["--num-warmups", str(args.streams)]
        return json.loads(subprocess.run(load, check=True, capture_output=True, text=True).stdout)
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="fewer for a quick look")
    parser.add_argument("--serve-flag", action="append", default=[], help="passed on to nanovllm serve")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), CONFIG | {"num_hidden_layers": args.layers})
        alone = offline(path, args)
        print(f"offline: {alone:,.0f} output tokens/s")
        run = served(path, args)
    through = run["output_tokens_per_second"]
    latency = f"TTFT {run['ttft_ms']['p50']:.1f} ms, {run['tpot_ms']['p50']:.2f} ms a token"
    print(f"served:  {through:,.0f} output tokens/s, {100 * through / alone:.1f} %; {latency}")
    if args.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        where = {"command": shlex.join(sys.argv), "date": date.today().isoformat(), "device": device}
        result = where | {"torch": torch.__version__, "streams": args.streams}
        result |= {"offline_tok_s": alone, "served_tok_s": through, "run": run}
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
