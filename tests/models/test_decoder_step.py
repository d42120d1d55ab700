from dataclasses import replace

from nanovllm import ops
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder_step import max_fused_rows
from tests.tiny import tiny_model


def test_the_largest_hidden_size():
    """64 elements of the residual stream for each block, of which there is one a tile of the smallest matrix."""
    sms = 132
    assert ops.decoder_step_max_hidden(3072, 16, 8, 128, 151936, sms) == 4096, "Qwen3-0.6B: the kernel's own limit"
    assert ops.decoder_step_max_hidden(1536, 9, 3, 64, 49152, sms) == 64 * 60, "SmolLM2-135M: 60 tiles of q, k and v"
    assert ops.decoder_step_max_hidden(8448, 4, 2, 64, 100, sms) == 64 * 7, "a vocabulary of 7 tiles"


def test_large_models_take_the_fused_step_for_fewer_rows():
    config = ModelConfig.from_hf(tiny_model("Qwen3ForCausalLM").config)
    assert [max_fused_rows(replace(config, hidden_size=n)) for n in (1024, 2560, 4096)] == [8, 8, 4]
