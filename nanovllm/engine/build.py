"""From a configuration to a running engine: device, checkpoint, weights, KV cache."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine, Runner
from nanovllm.models.config import ModelConfig
from nanovllm.parallel.rendezvous import external_rank
from nanovllm.parallel.shards import check_shards, rank_config
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.loader.source import ModelSource
    from nanovllm.models.decoder import DecoderForCausalLM
    from nanovllm.parallel.group import Group

logger = logging.getLogger("nanovllm")
_DEVICE_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
_CUDA_HEAD_DIMS = (64, 80, 96, 128, 256)
_MAX_CPU_HEAD_DIM = 512
_MIN_CUDA_BLOCK = 16
_MAX_GROUP = 16


def resolve_device(wanted: str) -> torch.device:
    """The device to run on; "auto" is CUDA where there is a GPU and every operator has a CUDA kernel, else the CPU.

    Raises:
        ValueError, NotImplementedError: CUDA was asked for and cannot be had; the text says what is missing.
    """
    from nanovllm import ops

    if wanted == "cpu":
        return torch.device("cpu")
    problem = None
    if not torch.cuda.is_available():
        problem = ValueError("device: expected a CUDA GPU, torch finds none (torch.cuda.is_available() is False)")
    elif not ops.HAS_CUDA:
        problem = ValueError("device: nanovllm was built without its CUDA module; see `nanovllm env`")
    elif missing := ops.without_cuda_kernel():
        problem = NotImplementedError(f"device: cuda is not supported yet, no CUDA kernel for {', '.join(missing)}")
    if problem is None:
        return torch.device("cuda", torch.cuda.current_device())
    if wanted == "cuda":
        raise problem
    return torch.device("cpu")


def resolve_dtype(wanted: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in. "auto": the checkpoint's; where the device has no kernels for that (float16 on CPU,
    float32 on CUDA), float32 on CPU and bfloat16 on CUDA.

    Raises:
        ValueError: the dtype asked for has no kernels on the device.
    """
    allowed = _DEVICE_DTYPES[device.type]
    if wanted == "auto":
        return checkpoint if checkpoint in allowed else allowed[0]
    dtype = getattr(torch, wanted)
    if dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ValueError(f"dtype: expected one of {names} on {device.type}, got {wanted}")
    return dtype


def check_shapes(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Refuses what the attention kernels of the device do not have, with the allowed set."""
    if model.num_q_heads % model.num_kv_heads or model.num_q_heads // model.num_kv_heads > _MAX_GROUP:
        raise ValueError(
            f"attention heads: expected a multiple of the {model.num_kv_heads} key-value heads, at most {_MAX_GROUP} "
            f"times as many, got {model.num_q_heads}"
        )
    if device.type == "cpu" and (model.head_dim % 8 or model.head_dim > _MAX_CPU_HEAD_DIM):
        raise ValueError(
            f"head_dim: expected a multiple of 8, at most {_MAX_CPU_HEAD_DIM}, on CPU, got {model.head_dim}"
        )
    if device.type == "cuda":
        if model.head_dim not in _CUDA_HEAD_DIMS:
            raise ValueError(f"head_dim: expected one of {_CUDA_HEAD_DIMS} on CUDA, got {model.head_dim}")
        if config.kvcache_block_size < _MIN_CUDA_BLOCK:
            raise ValueError(
                f"kvcache_block_size: expected at least {_MIN_CUDA_BLOCK} on CUDA, got {config.kvcache_block_size}"
            )


def check_ranks(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Refuses more ranks than can share the model or have a device, before any process starts."""
    size = config.tensor_parallel_size
    check_shards(model, size)
    if device.type == "cuda" and size > 1 and external_rank(config.distributed_init_method, size) is None:
        count = torch.cuda.device_count()
        if size > count:
            raise ValueError(f"tensor_parallel_size: expected at most {count}, the visible GPUs, got {size}")


def load_model(
    config: EngineConfig, model_config: ModelConfig, where: ModelSource, device: torch.device, group: Group
) -> DecoderForCausalLM:
    """The rank's part of the model, with its weights, on its device."""
    from nanovllm.layers.attention import Attention
    from nanovllm.layers.attention_backends import make_backend
    from nanovllm.loader import dummy, weights
    from nanovllm.models.registry import model_class
    from nanovllm.parallel.group import use_group

    with device, use_group(group):
        model = model_class(model_config.architecture)(model_config)
    backend = make_backend(config.attention_backend, device)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.backend = backend
    if config.load_format == "dummy":
        dummy.fill_dummy(model, config.seed)
    else:
        weights.load_weights(model, where)
    return model.eval()


def make_runner(
    config: EngineConfig, model_config: ModelConfig, where: ModelSource, device: torch.device
) -> tuple[Runner, float]:
    """The loaded and warmed-up runner of one device, or of several ranks; and the seconds until weights were loaded.

    Raises:
        SystemExit: this process is a rank above 0, started by a launcher such as torchrun, and its work is done.
    """
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.parallel.group import Group

    start = time.perf_counter()
    size, dtype = config.tensor_parallel_size, model_config.dtype
    if size == 1:
        model = load_model(config, model_config, where, device, Group())
        seconds = time.perf_counter() - start
        return ModelRunner(config, model_config, model, device, dtype), seconds

    from nanovllm.parallel.team import ParallelRunner, Team, closed_on_error, rank_specs, serve_external_rank

    rank = external_rank(config.distributed_init_method, size)
    specs = rank_specs(config, model_config, where, device, is_external=rank is not None)
    if rank:
        sys.exit(serve_external_rank(specs[rank]))
    with closed_on_error(Team(specs, is_external=rank is not None)) as team:
        with team.loading():
            model = load_model(config, model_config, where, torch.device(specs[0].device), team.group)
        seconds = time.perf_counter() - start
        team.connect()
        with team.watcher.watched():
            local = rank_config(model_config, 0, size)
            runner = ModelRunner(config, local, model, torch.device(specs[0].device), dtype, team.group)
            team.watcher.wait_for("ready")
        return ParallelRunner(runner, team), seconds


def sampling_defaults(generation_config: Any) -> SamplingParams:
    """What generate() uses without sampling_params: the checkpoint's generation_config over our defaults."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {n: getattr(generation_config, n, None) for n in names}
    values = {n: v for n, v in given.items() if v is not None}
    if getattr(generation_config, "do_sample", None) is False and "temperature" not in values:
        values["temperature"] = 0.0
    return SamplingParams(**values)


def eos_token_ids(generation_config: Any, tokenizer: Any, hf_config: Any) -> frozenset[int]:
    """Union of the EOS ids that generation config, tokenizer and model config name."""
    ids: set[int] = set()
    for holder in (generation_config, tokenizer, hf_config):
        value = getattr(holder, "eos_token_id", None)
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in values):
            raise ValueError(f"eos_token_id: expected an integer or a list of them, got {value!r}")
        ids |= set(values)
    return frozenset(ids)


def examine(config: EngineConfig) -> tuple[torch.device, ModelSource, Any, ModelConfig]:
    """The device to run on, where the model is, its HF config, and its shape in the dtype to compute in.

    Raises:
        ValueError, NotImplementedError: the model or an option is not supported; the text names it.
    """
    from nanovllm.loader import source

    device = resolve_device(config.device)
    where = source.resolve(config.model, config.revision, config.token)
    hf_config = source.load_hf_config(where)
    model_config = ModelConfig.from_hf(hf_config)
    dtype = resolve_dtype(config.dtype, model_config.dtype, device)
    return device, where, hf_config, dataclasses.replace(model_config, dtype=dtype)


def build_engine(config: EngineConfig) -> tuple[LLMEngine, SamplingParams]:
    """Loads the model and makes its engine; also the model's default sampling parameters.

    Raises:
        ValueError, NotImplementedError: the model or an option is not supported; the text names it.
    """
    begin = time.perf_counter()
    from nanovllm.layers.attention_backends import make_backend
    from nanovllm.loader import source, weights

    start = time.perf_counter()
    device, where, hf_config, model_config = examine(config)
    max_model_len = min(config.max_model_len, model_config.max_position_embeddings)
    most_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)  # of a step
    config = dataclasses.replace(config, max_model_len=max_model_len, max_num_batched_tokens=most_tokens)
    # Positions end at max_model_len: so does the rotary table (its scaling is already resolved).
    model_config = dataclasses.replace(model_config, max_position_embeddings=max_model_len)
    check_shapes(config, model_config, device)
    check_ranks(config, model_config, device)
    backend = make_backend(config.attention_backend, device)
    if not backend.graph_safe:
        config = dataclasses.replace(config, enforce_eager=True)
    # In a thread: its import takes longer than the weights and the warm-up of a small model.
    tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")
    tokenizer_result = tokenizer_thread.submit(source.load_tokenizer, where)
    tokenizer_thread.shutdown(wait=False)
    generation_config = source.load_generation_config(where)
    if config.load_format != "dummy":
        weights.check_sizes(model_config, where)
    if not external_rank(config.distributed_init_method, config.tensor_parallel_size):  # of ranks, the first one
        _say(f"nanovllm: loading {_name(model_config, device)} from {config.model}")
    sampling_params = sampling_defaults(generation_config)
    runner, load_seconds = make_runner(config, model_config, where, device)
    overlap = device.type == "cuda" if config.overlap == "auto" else bool(config.overlap)
    try:
        tokenizer = tokenizer_result.result()
        end_ids = eos_token_ids(generation_config, tokenizer, hf_config)
        engine = LLMEngine(config, runner, tokenizer, end_ids, model_config.vocab_size, overlap)
    except BaseException:
        runner.close()
        raise
    engine.startup_seconds = {
        "import": start - begin,
        "weights": load_seconds,
        "warm-up": time.perf_counter() - start - load_seconds - runner.capture_seconds,
        "graphs": runner.capture_seconds,
    }
    _say_ready(engine, model_config, device, backend.name)
    return engine, sampling_params


def _say_ready(engine: LLMEngine, model: ModelConfig, device: torch.device, backend: str) -> None:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in engine.startup_seconds.items())
    blocks, size = engine.runner.num_kvcache_blocks, engine.config.kvcache_block_size
    _say(
        f"nanovllm: {_name(model, device)}, {backend} attention, {phases}; KV cache holds {blocks * size:,} tokens "
        f"({blocks:,} blocks of {size}{', fp8_e4m3' if engine.config.kv_cache_dtype == 'fp8_e4m3' else ''})"
    )


def _name(model: ModelConfig, device: torch.device) -> str:
    return f"{model.architecture} in {str(model.dtype).removeprefix('torch.')} on {device}"


def _say(text: str) -> None:
    if logger.handlers or logging.getLogger().handlers:
        logger.info(text)
    else:
        print(text, file=sys.stderr, flush=True)
