"""SmolLM2-135M-Instruct from its Q4_1 GGUF file, against transformers' own reading of the same file, in fp32."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanovllm.loader.source import load_tokenizer, resolve
from nanovllm.models.decoder import DecoderForCausalLM
from tests.loader.test_weights import load
from tests.models.paged import PagedModel
from tests.real_model import REAL_MODEL, needs_real_model

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "1 2 3 4 5 6 7"]
NUM_DECODE = 16


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(REAL_MODEL.parent, gguf_file=REAL_MODEL.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours() -> DecoderForCausalLM:
    return load(REAL_MODEL, dtype=torch.float32)


@needs_real_model
def test_weights_equal(theirs, ours):
    """Bit for bit: the same dequantisation, and llama's rows in the same order."""
    state = theirs.state_dict()
    for layer in (0, 29):
        attention = f"model.layers.{layer}.self_attn"
        fused = torch.cat([state[f"{attention}.{name}_proj.weight"] for name in "qkv"])
        assert torch.equal(ours.get_parameter(f"{attention}.qkv_proj.weight"), fused)
    assert torch.equal(ours.lm_head.weight, state["lm_head.weight"])


@needs_real_model
def test_greedy_tokens_and_logits_equal(theirs, ours):
    tokenizer = load_tokenizer(resolve(REAL_MODEL))
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    paged = PagedModel(ours, block_size=4)
    logits = paged.step(prefills=enumerate(prompts))
    last = [rows[-1] for rows in logits.split([len(prompt) for prompt in prompts])]
    generated = [[row] for row in last]
    sequences = prompts
    for _ in range(NUM_DECODE):
        tokens = [row.argmax().item() for row in last]
        sequences = [[*sequence, token] for sequence, token in zip(sequences, tokens)]
        last = list(paged.step(decodes=[(seq, [token]) for seq, token in enumerate(tokens)]))
        generated = [[*rows, row] for rows, row in zip(generated, last)]
    for prompt, sequence, rows in zip(prompts, sequences, generated):
        with torch.inference_mode():
            expected = theirs(torch.tensor([sequence]), use_cache=False).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack(rows), expected, atol=1e-3, rtol=1e-4)
        assert expected[:-1].argmax(-1).tolist() == sequence[len(prompt) :]
    assert tokenizer.decode(sequences[0]).startswith("The capital of France is Paris")
