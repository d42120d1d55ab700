"""kv_cache_dtype="fp8_e4m3": near the tokens of an exact cache, however scheduled; the checkpoint's scales."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from tests.engine.test_end_to_end import MAX_TOKENS, OPTIONS, PARAMS, PROMPTS
from tests.tiny import save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = "fp8_e4m3"
CPU_OPTIONS = ("plain", "few blocks, overlap", "small budget: chunks", "overlap, chunks")
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def make_llm(path, **options) -> LLM:
    return LLM(str(path), **{"device": "cpu", "dtype": "float32", "max_model_len": 128} | options)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [o.token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def assert_near(hf, tokens: list[list[int]], what: str) -> None:
    """How far each token's logit is behind the greatest of an exact cache, in standard deviations of its row: an fp8
    value has 4 bits, so none is far behind and most are first. (A random token is 2.5 behind.)"""
    gaps = []
    for prompt, out in zip(PROMPTS, tokens):
        with torch.no_grad():
            logits = hf(torch.tensor([prompt + out], device=hf.device)).logits[0, len(prompt) - 1 : -1].float().cpu()
        chosen = logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        gaps.append((logits.max(1).values - chosen) / logits.std(1))
    gap = torch.cat(gaps)
    assert gap.max() < 0.6 and gap.mean() < 0.02 and (gap == 0).float().mean() > 0.8, f"{what}: {gap.max()}"


def test_tokens_are_near_those_of_an_exact_cache(qwen3):
    """However they are scheduled: preempted, chunked, with one step in flight, and from cached prefixes."""
    hf = tiny_model("Qwen3ForCausalLM")
    for name in CPU_OPTIONS:
        with make_llm(qwen3, kv_cache_dtype=FP8, **OPTIONS[name]) as llm:
            tokens = tokens_of(llm)
            assert_near(hf, tokens, name)
            assert all(len(t) == MAX_TOKENS for t in tokens)
            if "few blocks" in name:
                assert llm.engine.scheduler.num_preemptions > 0
            if llm.config.enable_prefix_caching:
                assert_near(hf, tokens_of(llm), f"{name}, cached prefixes")
            assert len(llm.engine.scheduler.block_manager.free_block_ids) == llm.engine.runner.num_kvcache_blocks


@pytest.mark.parametrize("name", ["plain", "small budget: chunks"])
def test_unwritten_slots_are_never_read(qwen3, name):
    with make_llm(qwen3, kv_cache_dtype=FP8, **OPTIONS[name]) as llm:
        llm.engine.runner.kv_cache.view(torch.uint8).fill_(0x7F)  # NaN
        poisoned = tokens_of(llm)
    with make_llm(qwen3, kv_cache_dtype=FP8, **OPTIONS[name]) as llm:
        assert tokens_of(llm) == poisoned


def test_the_pool_holds_more_tokens(qwen3):
    memory = {"kv_cache_memory_bytes": 3 << 18, "kvcache_block_size": 8}
    sizes = []
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": FP8}):
        with make_llm(qwen3, **memory | options) as llm:
            sizes.append(llm.engine.runner.num_kvcache_blocks)
            assert llm.engine.runner.kv_cache.nbytes == 3 << 18
    assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]


# The checkpoint's scales


def with_scales(path, names: tuple[str, str], value, **config) -> None:
    """Scales of every layer under `names` with {} for the layer's attention; k's is `value`, v's twice as much."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        for i, name in enumerate(names):
            tensors[name.format(f"model.layers.{layer}.self_attn")] = torch.as_tensor(value) * (1 + i)
    save_file(tensors, file)
    fields = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(fields))


STYLES = {
    "llm-compressor": ("{}.k_scale", "{}.v_scale"),
    "ModelOpt": ("{}.k_proj.k_scale", "{}.v_proj.v_scale"),
    "of the attention module": ("{}.attn.k_scale", "{}.attn.v_scale"),
}


@pytest.mark.parametrize("style", STYLES)
def test_scales_of_the_checkpoint_are_used(tmp_path, style):
    """The cache holds keys / k_scale: times the scale, they are what an exact cache holds, within 4 bits."""
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    value = torch.tensor([0.25]).bfloat16() if style == "ModelOpt" else 0.25
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    with_scales(tmp_path, STYLES[style], value, quantization_config=quantization)
    caches = []
    for dtype in ("auto", FP8):
        with make_llm(tmp_path, kv_cache_dtype=dtype) as llm:
            llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
            blocks = llm.engine.runner.kv_cache[:, :, 0]  # K and V of every layer, of the first tokens
            caches.append(blocks.float()[:, :1, :8].clone())  # deeper layers have already read the fp8 cache
    exact, stored = caches
    scale = torch.tensor([0.25, 0.5]).view(2, 1, 1, 1, 1)
    torch.testing.assert_close(stored * scale, exact, rtol=2**-4, atol=2**-9)


def test_tokens_with_scales_are_near(tmp_path):
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    with_scales(tmp_path, STYLES["llm-compressor"], 0.03)
    with make_llm(tmp_path, kv_cache_dtype=FP8, max_num_batched_tokens=29) as llm:
        assert_near(tiny_model("Qwen3ForCausalLM"), tokens_of(llm), "scales")


@pytest.mark.parametrize(
    "value, message",
    [
        (0.0, r"model\.layers\.0\.self_attn\.k_scale: expected a scale above 0, got 0\.0"),
        (-1.0, r"self_attn\.k_scale: expected a scale above 0, got -1\.0"),
        (float("nan"), r"self_attn\.k_scale: expected a scale above 0, got nan"),
        ([1.0, 1.0], r"6 misshapen: .*self_attn\.k_scale \(expected one scale for all heads, got \[2\]\)"),
    ],
)
def test_bad_scales_are_refused(tmp_path, value, message):
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    with_scales(tmp_path, STYLES["llm-compressor"], value)
    with pytest.raises(ValueError, match=message):
        make_llm(tmp_path, kv_cache_dtype=FP8)


def test_other_cache_schemes_are_refused(tmp_path):
    save_tiny(tmp_path, "Qwen3ForCausalLM")
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | {"type": "int"}}
    with_scales(tmp_path, STYLES["llm-compressor"], 1.0, quantization_config=scheme)
    with pytest.raises(ValueError, match=r"kv_cache_scheme: expected .*'type': 'float'.*, got .*'type': 'int'"):
        make_llm(tmp_path, kv_cache_dtype=FP8)


# On a GPU


GPU_OPTIONS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 37},
    "eager, no overlap": {"enforce_eager": True, "overlap": False},
    "few blocks": {"num_kvcache_blocks": 24},
}


@pytest.mark.gpu
def test_tokens_on_the_gpu_are_near_those_of_an_exact_cache(qwen3):
    hf = tiny_model("Qwen3ForCausalLM").bfloat16().cuda()
    cuda = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "num_kvcache_blocks": 1000}
    for name, options in GPU_OPTIONS.items():
        with make_llm(qwen3, kv_cache_dtype=FP8, **cuda | options) as llm:
            assert_near(hf, tokens_of(llm), name)
            if llm.config.enable_prefix_caching:
                assert_near(hf, tokens_of(llm), f"{name}, cached prefixes")


@pytest.mark.gpu
def test_half_the_bytes_on_the_gpu(qwen3):
    cuda = {"device": "cuda", "dtype": "bfloat16", "gpu_memory_utilization": 0.3, "enforce_eager": True}
    cuda["kvcache_block_size"] = 1024  # a tiny model would have millions of small ones
    blocks = []
    for dtype in ("auto", FP8):
        with make_llm(qwen3, kv_cache_dtype=dtype, **cuda) as llm:
            blocks.append(llm.engine.runner.num_kvcache_blocks)
    assert blocks[1] == pytest.approx(2 * blocks[0], rel=0.02)
