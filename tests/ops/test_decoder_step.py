"""The fused decode step against the layers' operators: logits, cache, and greedy tokens over many steps."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.context import Context, set_context
from nanovllm.loader.dummy import fill_dummy
from nanovllm.models.config import ModelConfig, RopeScaling
from nanovllm.models.decoder_step import DecoderStep, supports
from nanovllm.models.registry import model_class

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

# The error against fp32, as a multiple of the layers' own: both round to bfloat16 at the same places.
_TIMES_THE_ERROR = 2


def config(architecture: str = "Qwen3ForCausalLM", **changes) -> ModelConfig:
    fields = {
        "architecture": architecture,
        "num_layers": 3,
        "hidden_size": 256,
        "intermediate_size": 448,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": RopeScaling(),
        "qkv_bias": architecture == "Qwen2ForCausalLM",
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "tie_word_embeddings": True,
        "dtype": torch.bfloat16,
    } | changes
    return ModelConfig(**({"rotary_dim": fields["head_dim"]} | fields))


QWEN3_0_6B = config(
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rope_theta=1e6,
    max_position_embeddings=40960,
)


@dataclass(frozen=True)
class Case:
    name: str
    config: ModelConfig
    block_size: int = 16
    lens: tuple[int, ...] = (1, 15, 16, 17, 130, 0, 700, 64)
    scale: float = 8.0
    """Of the weights over the loader's dummies: logits then spread as a real model's do."""

    def __repr__(self) -> str:
        return self.name


CASES = [
    Case("qwen3", config()),
    Case("qwen3 block 256", config(), block_size=256, lens=(255, 256, 257, 1)),
    Case("qwen3 one row", config(), lens=(300,)),
    Case("qwen3 head 128", config(head_dim=128, num_q_heads=8, num_kv_heads=4, hidden_size=512)),
    Case("qwen3 long", config(head_dim=128), block_size=64, lens=(4000, 1, 2049)),
    Case("llama group 3", config("LlamaForCausalLM", num_q_heads=9, num_kv_heads=3, hidden_size=576, vocab_size=997)),
    Case("llama group 8", config("LlamaForCausalLM", num_q_heads=16, head_dim=128, num_layers=4)),
    Case("llama biases", config("LlamaForCausalLM", qkv_bias=True, o_bias=True, mlp_bias=True)),
    Case("llama partial rotary", config("LlamaForCausalLM", rotary_dim=32)),
    Case(
        "llama deep",
        config(
            "LlamaForCausalLM",
            num_q_heads=40,
            num_kv_heads=40,
            head_dim=128,
            hidden_size=2048,
            intermediate_size=8208,
            num_layers=2,
        ),
        lens=(5, 200, 33),
    ),
    Case("qwen2 group 7", config("Qwen2ForCausalLM", num_q_heads=14, hidden_size=896, intermediate_size=4864)),
    Case("odd widths", config("LlamaForCausalLM", hidden_size=104, intermediate_size=120, vocab_size=199)),
    Case("two layers", config(num_layers=2)),
]


class Paths:
    """One model, and two equal caches: one for the layers' operators, one for the fused step."""

    def __init__(self, case: Case, seed: int = 0, extra: int = 64) -> None:
        c = self.config = case.config
        torch.manual_seed(seed)
        with torch.device("cuda"):
            self.model = model_class(c.architecture)(c)
        fill_dummy(self.model, seed)
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                if param.dim() == 1 and name.endswith("weight"):
                    param.add_(1.0)
                elif name.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
                    param.mul_(2.0)
        self.block_size, rows = case.block_size, len(case.lens)
        width = -(-(max(case.lens) + extra) // case.block_size)
        self.tables = torch.randperm(rows * width, device="cuda").view(rows, width).int()
        for row, length in enumerate(case.lens):  # absurd where nothing may be read
            used = -(-(length + extra) // case.block_size) if length else 0
            self.tables[row, used:] = -(2**31)
        shape = (2, c.num_layers, rows * width, case.block_size, c.num_kv_heads, c.head_dim)
        self.fused_cache = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        for row, length in enumerate(case.lens):
            for position in range(length - 1):
                block = self.tables[row, position // case.block_size]
                self.fused_cache[:, :, block, position % case.block_size] = torch.randn(
                    2, c.num_layers, c.num_kv_heads, c.head_dim, device="cuda"
                ).bfloat16()
        self.cache = self.fused_cache.clone()
        for layer, module in enumerate(m for m in self.model.modules() if hasattr(m, "k_cache")):
            module.k_cache, module.v_cache = self.cache[0, layer], self.cache[1, layer]
        self.lens = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
        self.token_ids = torch.randint(0, c.vocab_size, (rows,), device="cuda")
        self.plan = torch.empty(ops.decode_plan_numel(rows, "cuda"), dtype=torch.int32, device="cuda")
        heads = c.num_q_heads, c.num_kv_heads, c.head_dim
        numel = ops.decode_workspace_numel(rows, c.max_position_embeddings, *heads, "cuda")
        self.workspace = torch.zeros(numel, device="cuda")
        self.step = DecoderStep(self.model)

    @torch.inference_mode()
    def layers(self) -> Tensor:
        rows, lens = len(self.lens), self.lens
        positions = (lens - 1).clamp(min=0).long()
        block = self.tables.gather(1, (positions // self.block_size)[:, None])[:, 0].long()
        slots = torch.where(lens > 0, block * self.block_size + positions % self.block_size, -1)
        ops.decode_plan(self.plan, lens, self.config.num_kv_heads, self.block_size)
        fields = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "context_lens", "block_tables"))
        context = Context(
            slot_mapping=slots,
            num_decode=rows,
            decode_block_tables=self.tables,
            decode_context_lens=lens,
            plan=self.plan,
            workspace=self.workspace,
            max_seqlen_q=0,
            **fields,
        )
        with set_context(context):
            return self.model.compute_logits(self.model(self.token_ids, positions))

    @torch.inference_mode()
    def fused(self) -> Tensor:
        return self.step(self.token_ids, self.tables, self.lens, self.fused_cache)

    @torch.inference_mode()
    def reference(self) -> Tensor:
        """Logits of the live rows in fp32, from the bfloat16 weights and cached keys and values; 0 for others."""
        c, logits = self.config, torch.zeros(len(self.lens), self.config.vocab_size, device="cuda")
        for row, length in enumerate(self.lens.tolist()):
            if length > 0:
                logits[row] = self._reference_row(row, length, c)
        return logits

    def _reference_row(self, row: int, length: int, c: ModelConfig) -> Tensor:
        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.rms_norm_eps) * weight.float()

        def rotate(x: Tensor) -> Tensor:
            half = c.rotary_dim // 2
            cos, sin = angles[:half], angles[half:]
            first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
            return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), 1)

        def linear(x: Tensor, layer) -> Tensor:
            return x @ layer.weight.float().T + (0 if layer.bias is None else layer.bias.float())

        model, positions = self.model.model, torch.arange(length - 1, device="cuda")
        angles = model.layers[0].self_attn.attn.rotary_emb.cos_sin[length - 1]
        blocks = self.tables[row, positions // self.block_size].long()
        x = model.embed_tokens.weight[self.token_ids[row]].float()
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            qkv = linear(norm(x, layer.input_layernorm.weight), attention.qkv_proj).view(-1, c.head_dim)
            q, k, v = qkv.split((c.num_q_heads, c.num_kv_heads, c.num_kv_heads))
            if c.qk_norm:
                q, k = norm(q, attention.q_norm.weight), norm(k, attention.k_norm.weight)
            past_k, past_v = self.cache[:, index, blocks, positions % self.block_size].float()
            keys, values = torch.cat((past_k, rotate(k)[None])), torch.cat((past_v, v[None]))  # [tokens, heads, dim]
            group = c.num_q_heads // c.num_kv_heads
            scores = torch.einsum("hgd,thd->hgt", rotate(q).view(-1, group, c.head_dim), keys) * c.head_dim**-0.5
            mixed = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values)
            x = x + linear(mixed.flatten(), attention.o_proj)
            gate, up = linear(norm(x, layer.post_attention_layernorm.weight), layer.mlp.gate_up_proj).chunk(2)
            x = x + linear(torch.nn.functional.silu(gate) * up, layer.mlp.down_proj)
        return norm(x, model.norm.weight) @ self.model.lm_head.weight.float().T


def assert_as_good(got: Tensor, layers: Tensor, want: Tensor, lens: Tensor) -> None:
    """`got` is not further from fp32 than the layers' logits are, within a factor."""
    live = lens > 0
    got, layers, want = got[live].float(), layers[live].float(), want[live]
    assert torch.isfinite(got).all()
    error, allowed = (got - want).norm(dim=1), _TIMES_THE_ERROR * (layers - want).norm(dim=1)
    assert (error <= allowed).all(), f"errors {error.tolist()}, allowed {allowed.tolist()}"


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_logits_and_cache(case):
    paths = Paths(case)
    assert supports(case.config, torch.device("cuda"))
    for _ in range(3):
        want = paths.reference()
        assert_as_good(paths.fused(), paths.layers(), want, paths.lens)
        stored, expected = paths.fused_cache.isnan(), paths.cache.isnan()
        assert torch.equal(stored, expected), "the fused step stored elsewhere"
        error = (paths.fused_cache - paths.cache).nan_to_num().float().abs().max()
        assert error <= 0.2, f"a stored key or value is {error} off"
        paths.cache.copy_(paths.fused_cache)
        paths.lens += (paths.lens > 0).int()
        paths.token_ids = torch.randint_like(paths.token_ids, case.config.vocab_size)


def test_the_same_call_gives_the_same_bits():
    paths = Paths(CASES[0])
    first = paths.fused()
    for _ in range(20):
        assert torch.equal(paths.fused(), first)


def test_fewer_rows_after_more():
    paths = Paths(CASES[0])
    want, layers = paths.reference(), paths.layers()
    for rows in (1, 8, 3, 2, 7):
        got = paths.step(paths.token_ids[:rows], paths.tables[:rows], paths.lens[:rows], paths.fused_cache)
        assert_as_good(got, layers[:rows], want[:rows], paths.lens[:rows])


def test_only_padding_rows_store_nothing():
    paths = Paths(CASES[0])
    paths.lens.zero_()
    before = paths.fused_cache.clone()
    for _ in range(3):
        paths.fused()
    assert torch.equal(before.view(torch.int16), paths.fused_cache.view(torch.int16))


def test_greedy_tokens_of_a_graph_follow_the_layers():
    """48 steps of a graph, the layers fed the same tokens: they choose the same ones but for near ties, which are
    frequent among the random logits of a large vocabulary."""
    paths = Paths(Case("greedy", QWEN3_0_6B, lens=(1, 128, 700, 33)))
    paths.fused()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        logits = paths.fused()
    others = 0
    for step in range(48):
        want = paths.reference() if step % 16 == 0 else None
        graph.replay()
        layers = paths.layers()
        if want is not None:
            assert_as_good(logits, layers, want, paths.lens)
            noise = (layers.float() - want).abs().amax(1)
        chosen = logits.float().argmax(-1)
        top, of_chosen = layers.float().max(-1).values, layers.float().gather(1, chosen[:, None])[:, 0]
        assert (top - of_chosen <= 4 * noise).all(), f"behind {(top - of_chosen).tolist()}, noise {noise.tolist()}"
        others += int((top > of_chosen).sum())
        paths.token_ids.copy_(chosen)
        paths.lens += 1
    assert others <= 48, f"{others} of 192 tokens differ"


def test_errors_name_the_argument():
    paths = Paths(CASES[2])
    rows = torch.zeros(9, dtype=torch.int64, device="cuda"), paths.tables.expand(9, -1).contiguous()
    with pytest.raises(RuntimeError, match="decoder_step: token_ids: expected at most 8 rows, got 9"):
        paths.step(*rows, paths.lens.expand(9).contiguous(), paths.fused_cache)
    with pytest.raises(RuntimeError, match="decoder_step: kv_cache: expected dtype bfloat16, got float16"):
        paths.step(paths.token_ids, paths.tables, paths.lens, paths.fused_cache.half())


def test_a_hidden_size_that_a_small_model_cannot_spread():
    """A vocabulary of 7 tiles has 7 blocks, which hold up to 64 elements of the residual stream each."""
    small = config(hidden_size=2048, vocab_size=100)
    assert not supports(small, torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"decoder_step: norm: expected at most 448 hidden elements .* got 2048"):
        Paths(Case("small vocabulary", small)).fused()
