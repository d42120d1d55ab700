"""EngineConfig: what is allowed, and that every refusal names field, value and allowed set."""

import dataclasses

import pytest

from nanovllm.config import EngineConfig


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"model": ""}, ValueError, "model: expected a directory, a .gguf file or a hub id, got ''"),
        ({"model": 3}, ValueError, "model: .* got 3"),
        ({"device": "tpu"}, ValueError, "device: expected one of auto, cuda, cpu, got 'tpu'"),
        ({"dtype": "int8"}, ValueError, "dtype: expected one of auto, bfloat16, float16, float32, got 'int8'"),
        ({"kv_cache_dtype": "fp4"}, ValueError, "kv_cache_dtype: expected one of auto.*, got 'fp4'"),
        ({"attention_backend": "magic"}, ValueError, "attention_backend: expected one of auto, native.*, got 'magic'"),
        ({"load_format": "pt"}, ValueError, "load_format: expected one of auto, dummy, got 'pt'"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size: expected an integer >= 1, got 0"),
        ({"max_model_len": 0}, ValueError, "max_model_len: expected an integer >= 1, got 0"),
        ({"max_num_seqs": -1}, ValueError, "max_num_seqs: expected an integer >= 1, got -1"),
        ({"max_num_seqs": True}, ValueError, "max_num_seqs: expected an integer >= 1, got True"),
        (
            {"max_num_batched_tokens": 1.5},
            ValueError,
            r"max_num_batched_tokens: expected an integer in \[1, 2147483647\], got 1.5",
        ),
        ({"seed": -1}, ValueError, r"seed: expected an integer in \[0, \d+\], got -1"),
        ({"seed": 2**63}, ValueError, rf"seed: expected an integer in \[0, {2**63 - 1}\], got {2**63}"),
        ({"kvcache_block_size": 0}, ValueError, r"kvcache_block_size: expected an integer in \[1, 2147483647\], got 0"),
        ({"kvcache_block_size": 100}, ValueError, "kvcache_block_size: expected a power of two, got 100"),
        ({"kvcache_block_size": 255}, ValueError, "kvcache_block_size: expected a power of two, got 255"),
        ({"num_kvcache_blocks": 0}, ValueError, r"num_kvcache_blocks: expected an integer in \[1, 2147483647\], got 0"),
        (
            {"num_kvcache_blocks": -2},
            ValueError,
            r"num_kvcache_blocks: expected an integer in \[1, 2147483647\], got -2",
        ),
        ({"kv_cache_memory_bytes": 0}, ValueError, "kv_cache_memory_bytes: expected an integer >= 1, got 0"),
        ({"gpu_memory_utilization": 0}, ValueError, r"gpu_memory_utilization: expected a number in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 1.1}, ValueError, r"gpu_memory_utilization: .* in \(0, 1\], got 1.1"),
        ({"gpu_memory_utilization": True}, ValueError, r"gpu_memory_utilization: .* got True"),
        ({"gpu_memory_utilization": float("nan")}, ValueError, r"gpu_memory_utilization: .* got nan"),
        ({"enable_prefix_caching": 1}, ValueError, "enable_prefix_caching: expected True or False, got 1"),
        ({"enforce_eager": "no"}, ValueError, "enforce_eager: expected True or False, got 'no'"),
        ({"overlap": "yes"}, ValueError, "overlap: expected True, False or 'auto', got 'yes'"),
        ({"overlap": 1}, ValueError, "overlap: expected True, False or 'auto', got 1"),
        ({"check_agreement": 1}, ValueError, "check_agreement: expected True or False, got 1"),
        ({"distributed_timeout": 0.5}, ValueError, "distributed_timeout: expected seconds, at least 1, got 0.5"),
        ({"distributed_timeout": float("inf")}, ValueError, "distributed_timeout: .* got inf"),
        ({"distributed_init_method": "tcp://host"}, ValueError, "distributed_init_method: .* got 'tcp://host'"),
        ({"distributed_init_method": "tcp://host:x"}, ValueError, "distributed_init_method: .* got 'tcp://host:x'"),
        (
            {"distributed_init_method": "nfs"},
            ValueError,
            "distributed_init_method: expected auto, env://, .* got 'nfs'",
        ),
    ],
)
def test_bad_value_is_refused_by_name(options: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        EngineConfig(**{"model": "m", **options})


@pytest.mark.parametrize("size", [1, 8, 16, 256, 1024])
def test_c13_powers_of_two_are_block_sizes(size: int) -> None:
    assert EngineConfig(model="m", kvcache_block_size=size).kvcache_block_size == size


def test_e12_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'tensor_parallel'; the options are .*tensor_parallel_size"):
        EngineConfig.from_kwargs("m", tensor_parallel=2)


def test_every_field_has_a_help_text() -> None:
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"], field.name


def test_config_cannot_be_changed() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 1


@pytest.mark.parametrize("seqs, tokens, expected", [(512, 16384, 512), (8, 3, 3), (1, 1, 1)])
def test_running_sequences_fit_the_token_budget(seqs: int, tokens: int, expected: int) -> None:
    assert EngineConfig(model="m", max_num_seqs=seqs, max_num_batched_tokens=tokens).max_running == expected


@pytest.mark.parametrize("length, size, expected", [(4096, 16, 256), (4097, 16, 257), (1, 16, 1)])
def test_blocks_of_the_longest_sequence(length: int, size: int, expected: int) -> None:
    assert EngineConfig(model="m", max_model_len=length, kvcache_block_size=size).max_blocks_per_seq == expected


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "kvcache_block_size", "num_kvcache_blocks"])
def test_what_the_device_counts_in_int32_is_bounded(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected an integer in \[1, 2147483647\], got {2**40}"):
        EngineConfig(model="m", **{name: 2**40})
