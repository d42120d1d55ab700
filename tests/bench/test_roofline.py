"""What a step must read and compute, against counts by hand; the configs by their published sizes."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.bench.hf_configs import HF_CONFIGS, config_folder
from nanovllm.bench.roofline import Cost, Machine
from nanovllm.bench.step_times import Step
from nanovllm.loader.source import load_hf_config, resolve
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import model_class
from tests.bench.small import SMALL, small_llm  # noqa: F401


def test_cost_of_a_model(small_llm: LLM) -> None:  # noqa: F811
    hidden, wide, layers = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["num_hidden_layers"]
    attention = hidden * 32 * (4 + 2 + 2) + 32 * 4 * hidden
    matrices = layers * (attention + 3 * hidden * wide)
    norms = layers * (2 * hidden + 2 * 32) + hidden
    head = 300 * hidden  # tied: the embedding is read as the head
    cost = Cost.of(small_llm)
    assert cost.weight_bytes == 4 * (matrices + norms + head)
    assert (cost.layer_flops, cost.head_flops) == (2 * matrices, 2 * head)
    assert cost.kv_bytes == 2 * layers * 2 * 32 * 4
    assert cost.attention_flops == 4 * layers * 4 * 32


def test_bytes_and_flops_of_a_step() -> None:
    cost = Cost(weight_bytes=1000, kv_bytes=10, layer_flops=100, head_flops=7, attention_flops=1)
    step = Step(decode_ends=[5, 9], chunks=[(4, 6)], num_sampled=3)
    assert cost.bytes_of(step) == 1000 + 10 * (4 + 8 + 4) + 10 * 4  # read what is cached, write what is new
    assert cost.flops_of(step) == 4 * 100 + 3 * 7 + (5 + 9) + (5 + 6)
    assert cost.floor([step, step], Machine(bandwidth=100.0, compute=1e9)) == pytest.approx(2 * 12.0)
    assert cost.floor([step, step], Machine(bandwidth=1e9, compute=10.0)) == pytest.approx(2 * 44.6)


def test_machine_is_measured_unless_given() -> None:
    device = torch.device("cpu")
    assert Machine.measure(device, torch.float32, 2e9, 3e9) == Machine(2e9, 3e9)
    measured = Machine.measure(device, torch.float32)
    assert 1e8 < measured.bandwidth < 1e13 and 1e8 < measured.compute < 1e15


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_named_configs_have_the_published_sizes(name: str, parameters: int) -> None:
    with config_folder(name) as folder:
        config = ModelConfig.from_hf(load_hf_config(resolve(folder)))
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_unknown_config_is_refused_with_the_names() -> None:
    message = f"expected one of {', '.join(HF_CONFIGS)}, or a config.json, got 'gpt-5'"
    with pytest.raises(ValueError, match=message), config_folder("gpt-5"):
        pass
