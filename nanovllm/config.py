"""The engine's configuration: every option of `LLM(...)` and of the command line, validated in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "native", "flash_attn", "torch")
LOAD_FORMATS = ("auto", "dummy")
DEFAULT_CPU_KV_BYTES = 1 << 30
_FLASH_ATTN_BLOCK = 256  # flash-attn 2 reads pages of a multiple of this many tokens
_INT32_MAX = 2**31 - 1  # block ids and token counts of a step are int32 on the device


def _doc(text: str, default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Each field is also a `--kebab-case` flag of every command that builds an engine.

    Raises:
        ValueError: a value is not allowed; the text names field, value and the allowed set. TypeError: an unknown
        keyword. NotImplementedError: an option that this version does not have yet.
    """

    model: str = _doc("directory, .gguf file, or Hugging Face hub id")
    device: str = _doc("auto, cuda or cpu", "auto")
    dtype: str = _doc("auto (from the checkpoint), bfloat16, float16 or float32", "auto")
    kv_cache_dtype: str = _doc("auto (the model's dtype) or fp8_e4m3", "auto")
    tensor_parallel_size: int = _doc("ranks (GPUs; on CPU, processes) that share the model", 1)
    max_model_len: int = _doc("tokens of prompt and output together, clipped to the model's own limit", 4096)
    max_num_seqs: int = _doc("sequences that run at the same time", 512)
    max_num_batched_tokens: int = _doc("tokens that one step computes at most", 16384)
    gpu_memory_utilization: float = _doc("share of the GPU's memory for weights, activations and KV cache", 0.9)
    kvcache_block_size: int = _doc("tokens of one KV-cache block, a power of two", 16)
    num_kvcache_blocks: int = _doc("blocks in the pool; -1 sizes it from memory", -1)
    kv_cache_memory_bytes: int | None = _doc("bytes of the pool (default on CPU: 1 GiB)", None)
    enable_prefix_caching: bool = _doc("reuse the K/V of prompts with a common prefix", True)
    enforce_eager: bool = _doc("never use CUDA graphs", False)
    attention_backend: str = _doc("auto (native), native, flash_attn or torch", "auto")
    seed: int = _doc("seed of requests that bring none", 0)
    overlap: bool | str = _doc("keep one step in flight; auto: on CUDA", "auto")
    load_format: str = _doc("auto, or dummy for random weights of the config", "auto")
    distributed_init_method: str = _doc("where ranks meet: auto, env://, file:///path or tcp://host:port", "auto")
    distributed_timeout: float = _doc("seconds after which a rank that does not go on ends the engine", 60.0)
    check_agreement: bool = _doc("compare the ranks' block tables, positions and tokens after every step", False)
    revision: str | None = _doc("branch, tag or commit of a hub id", None)
    token: str | None = _doc("Hugging Face access token", None)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model: expected a directory, a .gguf file or a hub id, got {self.model!r}")
        self._one_of("device", DEVICES)
        self._one_of("dtype", DTYPES)
        self._one_of("kv_cache_dtype", KV_CACHE_DTYPES)
        self._one_of("attention_backend", ATTENTION_BACKENDS)
        self._one_of("load_format", LOAD_FORMATS)
        for name in ("tensor_parallel_size", "max_model_len", "max_num_seqs"):
            self._integer(name, 1)
        self._integer("max_num_batched_tokens", 1, _INT32_MAX)
        self._integer("seed", 0, 2**63 - 1)
        self._integer("kvcache_block_size", 1, _INT32_MAX)
        if self.kvcache_block_size & (self.kvcache_block_size - 1):
            raise ValueError(f"kvcache_block_size: expected a power of two, got {self.kvcache_block_size}")
        if self.attention_backend == "flash_attn":
            self._check_flash_attn()
        if self.num_kvcache_blocks != -1:
            self._integer("num_kvcache_blocks", 1, _INT32_MAX)
        if self.kv_cache_memory_bytes is not None:
            self._integer("kv_cache_memory_bytes", 1)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization: expected a number in (0, 1], got {share!r}")
        timeout = self.distributed_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 1 <= timeout < math.inf:
            raise ValueError(f"distributed_timeout: expected seconds, at least 1, got {timeout!r}")
        self._meeting_place()
        for name in ("enable_prefix_caching", "enforce_eager", "check_agreement"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if not isinstance(self.overlap, bool) and self.overlap != "auto":
            raise ValueError(f"overlap: expected True, False or 'auto', got {self.overlap!r}")

    def _check_flash_attn(self) -> None:
        if self.kvcache_block_size % _FLASH_ATTN_BLOCK:
            raise ValueError(
                f"kvcache_block_size: attention_backend flash_attn needs a multiple of {_FLASH_ATTN_BLOCK}, "
                f"got {self.kvcache_block_size}"
            )
        if self.kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype: attention_backend flash_attn reads a cache of the model's dtype (auto), "
                f"got {self.kv_cache_dtype!r}"
            )

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def _integer(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"{name}: expected an integer {allowed}, got {value!r}")

    def _meeting_place(self) -> None:
        method = self.distributed_init_method
        if isinstance(method, str):
            if method in ("auto", "env://"):
                return
            with contextlib.suppress(ValueError):  # a port that is no number, or out of range
                url = urlsplit(method)
                if (url.scheme == "file" and url.path) or (
                    url.scheme == "tcp" and url.hostname and url.port is not None
                ):
                    return
        allowed = "auto, env://, file:///path or tcp://host:port"
        raise ValueError(f"distributed_init_method: expected {allowed}, got {method!r}")

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: Any) -> EngineConfig:
        """EngineConfig(model=model, **kwargs); an unknown keyword is a TypeError that names it and the known ones."""
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise TypeError(f"LLM: unknown option {name!r}; the options are {', '.join(known)}")
        return cls(model=model, **kwargs)

    @property
    def max_running(self) -> int:
        """Sequences that may run at once: each needs one token of every step's budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.kvcache_block_size)
