"""Every architecture against transformers in fp32: packed prefill, chunks, decode and mixed steps over a paged cache
with shuffled block ids."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm.layers import decode_linear, linear
from nanovllm.models import decoder
from nanovllm.models.decoder import DecoderForCausalLM
from tests.loader.test_weights import load
from tests.models.paged import PagedModel
from tests.tiny import ARCHITECTURES, tiny_model

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
PROMPT_LENGTHS = [1, 7, 16, 23]
NUM_DECODE = 12
BLOCK_SIZE = 4
VARIANTS = [
    {},
    {"tie_word_embeddings": True},
    {"num_attention_heads": 8, "num_key_value_heads": 1},
    {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 128},
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 120},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
]


def make(tmp_path: Path, architecture: str, **overrides: object) -> tuple[PreTrainedModel, DecoderForCausalLM]:
    """A transformers model and ours, loaded from its checkpoint."""
    theirs = tiny_model(architecture, **overrides)
    theirs.save_pretrained(tmp_path)
    return theirs, load(tmp_path)


def make_prompts(vocab_size: int = 199) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


def dense_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), vocab] of transformers, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("overrides", VARIANTS, ids=lambda o: "-".join(map(str, o.values())) or "plain")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_then_decode(tmp_path, architecture, overrides):
    theirs, ours = make(tmp_path, architecture, **overrides)
    paged = PagedModel(ours, BLOCK_SIZE)
    sequences = make_prompts()
    logits = paged.step(prefills=enumerate(sequences))
    rows = list(logits.split(PROMPT_LENGTHS))  # of each sequence, one a token
    for _ in range(NUM_DECODE):
        tokens = [sequence_rows[-1].argmax().item() for sequence_rows in rows]
        sequences = [[*sequence, token] for sequence, token in zip(sequences, tokens)]
        logits = paged.step(decodes=[(seq, [token]) for seq, token in enumerate(tokens)])
        rows = [torch.cat((sequence_rows, row[None])) for sequence_rows, row in zip(rows, logits)]
    for sequence, sequence_rows in zip(sequences, rows):
        expected = dense_logits(theirs, sequence)
        torch.testing.assert_close(sequence_rows, expected, **TOLERANCE)
        assert expected[-NUM_DECODE - 1 : -1].argmax(-1).tolist() == sequence[-NUM_DECODE:]
        assert len(set(sequence[-NUM_DECODE:])) > 2, "a model that repeats itself shows little"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_that_take_the_norms_along(tmp_path, architecture, monkeypatch):
    """What Hopper runs for few tokens, by the operators' CPU side."""
    for module in (decode_linear, linear, decoder):
        monkeypatch.setattr(module, "is_decode_product", lambda num_tokens, weight, workspace: weight.shape[0] % 8 == 0)
    theirs, ours = make(tmp_path, architecture)
    paged = PagedModel(ours, BLOCK_SIZE)
    sequences = make_prompts()
    rows = paged.step(prefills=enumerate(sequences)).split(PROMPT_LENGTHS)
    decoded = paged.step(decodes=[(seq, [5]) for seq in range(len(sequences))])
    for sequence, sequence_rows, row in zip(sequences, rows, decoded):
        expected = dense_logits(theirs, [*sequence, 5])
        torch.testing.assert_close(torch.cat((sequence_rows, row[None])), expected, **TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_and_decodes_share_a_step(tmp_path, architecture):
    theirs, ours = make(tmp_path, architecture)
    paged = PagedModel(ours, BLOCK_SIZE)
    prompts = make_prompts()
    paged.step(prefills=[(1, prompts[1]), (3, prompts[3][:10])])
    # A decode of 1, the second chunk of 3, which ends within a block, and the new prompts 0 and 2.
    logits = paged.step(decodes=[(1, [5])], prefills=[(3, prompts[3][10:]), (0, prompts[0]), (2, prompts[2])])
    expected = [
        dense_logits(theirs, prompts[1] + [5])[-1:],
        dense_logits(theirs, prompts[3])[10:],
        dense_logits(theirs, prompts[0]),
        dense_logits(theirs, prompts[2]),
    ]
    torch.testing.assert_close(logits, torch.cat(expected), **TOLERANCE)


def test_shared_prefix_blocks(tmp_path):
    theirs, ours = make(tmp_path, "Qwen3ForCausalLM")
    paged = PagedModel(ours, BLOCK_SIZE)
    prompt = make_prompts()[3]
    paged.step(prefills=[(0, prompt)])
    shared = 2 * BLOCK_SIZE
    paged.fork(0, 1, shared)
    assert paged.tables[1] not in ([0, 1], [1, 0])
    other = [*prompt[:shared], 11, 12, 13, 14, 15]
    logits = paged.step(prefills=[(1, other[shared:])])
    torch.testing.assert_close(logits, dense_logits(theirs, other)[shared:], **TOLERANCE)


def test_many_rows_equal_few(tmp_path):
    """Above and below the number of rows where a linear layer changes its operator."""
    theirs, ours = make(tmp_path, "LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    tokens = make_prompts()[3]
    expected = dense_logits(theirs, tokens)
    for count in (15, 16, 17, 23):
        logits = PagedModel(ours, BLOCK_SIZE).step(prefills=[(0, tokens[:count])])
        torch.testing.assert_close(logits, expected[:count], **TOLERANCE)


def test_bfloat16(tmp_path):
    theirs, _ = make(tmp_path, "Qwen3ForCausalLM")
    ours = load(tmp_path, dtype=torch.bfloat16)
    tokens = make_prompts()[3]
    with torch.no_grad():
        naive = dense_logits(theirs.bfloat16(), tokens).float()
    exact = dense_logits(theirs.float(), tokens)
    logits = PagedModel(ours, BLOCK_SIZE).step(prefills=[(0, tokens)]).float()
    assert (logits - exact).abs().mean() < 2 * (naive - exact).abs().mean()


def test_no_cache_is_needed_for_a_plain_prefill(tmp_path):
    """As when the engine warms up: no blocks yet, every slot -1."""
    theirs, ours = make(tmp_path, "Qwen3ForCausalLM")
    paged = PagedModel(ours, BLOCK_SIZE)
    for attention in (layer.self_attn.attn for layer in ours.model.layers):
        attention.k_cache, attention.v_cache = paged.cache[:, 0, :0]
    paged._slot = lambda seq, position: -1
    tokens = make_prompts()[3]
    torch.testing.assert_close(paged.step(prefills=[(0, tokens)]), dense_logits(theirs, tokens), **TOLERANCE)
