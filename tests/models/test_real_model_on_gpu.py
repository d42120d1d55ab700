"""SmolLM2-135M-Instruct on CUDA in bf16 against transformers, in fp32 and in bf16, with the same weights.

`pytest -s` shows the tokens that are not fp32's own.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from tests.engine.near_ties import NearTies
from tests.real_model import REAL_MODEL, needs_real_model

pytestmark = pytest.mark.gpu
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1 2 3 4 5 6 7",
    "<|im_start|>user\nWhat is a block table?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a little girl who",
    "Water boils at 100 degrees Celsius because",
    "SELECT name, age FROM",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of motion are:\n1.",
    "In 1969,",
    "Ingredients: flour, sugar, butter.\nMethod:",
    "Der schnelle braune Fuchs",
]
PARAMS = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)


@pytest.fixture(scope="module")
def ties() -> NearTies:
    model = AutoModelForCausalLM.from_pretrained(REAL_MODEL.parent, gguf_file=REAL_MODEL.name, dtype=torch.float32)
    return NearTies(model, "cuda")


OPTIONS = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "two ranks": {"tensor_parallel_size": 2},  # of 9 query and 3 KV heads
    "three ranks": {"tensor_parallel_size": 3},
}


@needs_real_model
@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_follows_transformers(ties, name):
    """One request alone, three and all at once: each has steps of its own kind; and logprobs."""
    options = {"max_model_len": 512, "max_num_seqs": 16, "num_kvcache_blocks": 1000} | OPTIONS[name]
    if options.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("needs more GPUs")
    with LLM(str(REAL_MODEL), device="cuda", dtype="bfloat16", **options) as llm:
        prompts = [llm.engine.tokenize(text) for text in TEXTS]
        for count in (1, 3, len(prompts)):
            for first in range(0, 3, count):
                some = prompts[first : first + count]
                ties.check(some, llm.generate(some, PARAMS, use_tqdm=False), f"{count} at once")
        outputs = llm.generate(prompts, replace(PARAMS, logprobs=5), use_tqdm=False)
        ties.check(prompts, outputs, "logprobs")
        assert llm.generate(prompts[:1], PARAMS, use_tqdm=False)[0]["text"].lstrip().startswith("Paris")
