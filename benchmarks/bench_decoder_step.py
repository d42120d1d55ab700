"""decoder_step on CUDA: a whole decode step of a small batch, against the layers' operators in one graph.

    python benchmarks/bench_decoder_step.py [--rows 1 2 4 8] [--contexts 128 640 4096 32768] [--shape qwen3-0.6b]
        [--json results.json]

A line a case: rows x context | us a step | TB/s of weights and context | % of the read bandwidth measured in this run |
us of the layers. Dummy weights; the steps of a graph write the same position, so contexts stay as they are.
"""

import argparse
from functools import partial

import torch
from timing import machine, read_bandwidth, time_calls, write_json
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.context import Context, set_context
from nanovllm.layers.decode_linear import share_workspace
from nanovllm.loader.dummy import fill_dummy
from nanovllm.models.config import ModelConfig, RopeScaling
from nanovllm.models.decoder_step import DecoderStep
from nanovllm.models.registry import model_class

BLOCK_SIZE = 16
# architecture, layers, hidden, intermediate, q heads, kv heads, head_dim, vocabulary
SHAPES = {
    "qwen3-0.6b": ("Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": ("Qwen3ForCausalLM", 28, 2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": ("Qwen3ForCausalLM", 36, 2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": ("Qwen3ForCausalLM", 36, 4096, 12288, 32, 8, 128, 151936),
    "llama-3.2-1b": ("LlamaForCausalLM", 16, 2048, 8192, 32, 8, 64, 128256),
    "qwen2.5-0.5b": ("Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 64, 151936),
    "smollm2-135m": ("LlamaForCausalLM", 30, 576, 1536, 9, 3, 64, 49152),
}


def config(name: str) -> ModelConfig:
    architecture, layers, hidden, intermediate, q_heads, kv_heads, head_dim, vocab = SHAPES[name]
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=RopeScaling(),
        rotary_dim=head_dim,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        o_bias=False,
        mlp_bias=False,
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


class Case:
    """Rows of one context length over a random cache."""

    def __init__(self, model, rows: int, context: int) -> None:
        self.model, c = model, model.config
        blocks = -(-context // BLOCK_SIZE)
        self.tables = torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int()
        shape = (2, c.num_layers, rows * blocks, BLOCK_SIZE, c.num_kv_heads, c.head_dim)
        self.cache = torch.empty(shape, dtype=c.dtype, device="cuda").uniform_(-1, 1)
        for layer, module in enumerate(m for m in model.modules() if hasattr(m, "k_cache")):
            module.k_cache, module.v_cache = self.cache[0, layer], self.cache[1, layer]
        self.lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        self.token_ids = torch.arange(rows, device="cuda")
        self.positions = self.lens.long() - 1
        self.slots = self.tables[:, -1].long() * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.plan = torch.empty(ops.decode_plan_numel(rows, "cuda"), dtype=torch.int32, device="cuda")
        heads = c.num_q_heads, c.num_kv_heads, c.head_dim
        self.workspace = torch.zeros(ops.decode_workspace_numel(rows, context, *heads, "cuda"), device="cuda")

    def layers(self) -> Tensor:
        c = self.model.config
        ops.decode_plan(self.plan, self.lens, c.num_kv_heads, BLOCK_SIZE)
        fields = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "context_lens", "block_tables"))
        context = Context(
            slot_mapping=self.slots,
            num_decode=len(self.lens),
            decode_block_tables=self.tables,
            decode_context_lens=self.lens,
            plan=self.plan,
            workspace=self.workspace,
            max_seqlen_q=0,
            **fields,
        )
        with set_context(context):
            return self.model.compute_logits(self.model(self.token_ids, self.positions))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 640, 4096, 32768])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--json")
    args = parser.parse_args()
    peak = read_bandwidth()
    print("decoder_step", args.shape, *machine().values(), f"peak {peak / 1e9:.0f} GB/s", sep=" | ")
    c = config(args.shape)
    with torch.device("cuda"):
        model = model_class(c.architecture)(c)
    fill_dummy(model)
    share_workspace(model, torch.device("cuda"))
    step = DecoderStep(model)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    rows = []
    for context in args.contexts:
        for count in args.rows:
            case = Case(model, count, context)
            num_bytes = weight_bytes + count * context * 4 * c.num_layers * c.num_kv_heads * c.head_dim
            fused = time_calls([partial(step, case.token_ids, case.tables, case.lens, case.cache)] * 4)
            layers = time_calls([case.layers] * 2)
            rate = num_bytes / fused * 1e6
            print(
                f"{count} x {context:6,} | {fused:8.1f} us | {rate / 1e12:5.2f} TB/s | {100 * rate / peak:5.1f} % | "
                f"layers {layers:8.1f} us",
                flush=True,
            )
            rows.append({"rows": count, "context": context, "us": fused, "layers_us": layers, "tb_s": rate / 1e12})
            del case
    write_json(args.json, rows, shape=args.shape, peak_gb_s=peak / 1e9)


if __name__ == "__main__":
    main()
