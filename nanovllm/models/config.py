"""What a model needs to be built, read once from a Hugging Face config of any transformers from 4.56 to 5.x.

transformers moved `rope_theta` and `rope_scaling` into `rope_parameters`, and `torch_dtype` to `dtype`;
nothing beyond this module knows. No compiled extension is imported here.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.models.registry import check_architecture

DEFAULT_DTYPE = torch.bfloat16  # of a checkpoint that names none
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
_MAX_SIZE = 2**31 - 1
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are changed, with every default resolved."""

    rope_type: str = "default"  # one of default, linear, llama3, yarn
    factor: float = 1.0  # linear, llama3, yarn: how much longer the context becomes
    original_max_position_embeddings: int = 0  # llama3, yarn: length before scaling, tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    freq_divisors: tuple[float, ...] | None = None  # [rotary_dim / 2], divides each frequency: how GGUF stores llama3


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of one dense decoder.

    To build it in another dtype or for a shorter context, change `dtype` or `max_position_embeddings` with
    dataclasses.replace: the rotary scaling, already resolved, does not depend on them.
    """

    architecture: str  # architectures[0] of config.json
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # tokens; also the rows of the rotary table
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    rotary_dim: int  # leading elements of a head that are rotated
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of q and k
    tie_word_embeddings: bool
    dtype: torch.dtype

    @classmethod
    def from_hf(cls, hf_config: Any) -> "ModelConfig":
        """Read a transformers PretrainedConfig, or any object with the same attributes.

        Raises:
            ValueError: an unsupported architecture, quantisation, activation, dtype or sliding window, or a
                field that is missing or does not fit; the text names it and what is allowed.
            NotImplementedError: a rotary scaling that is not supported, by name.
        """
        architecture = check_architecture(getattr(hf_config, "architectures", None))
        _check_unquantized(hf_config)
        _check_activation(hf_config)
        _check_no_sliding_window(hf_config)
        hidden_size, num_q_heads = (
            _size(hf_config, "hidden_size"),
            _size(hf_config, "num_attention_heads"),
        )
        num_kv_heads = _size(hf_config, "num_key_value_heads", num_q_heads)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads={num_q_heads}, got {num_kv_heads}"
            )
        head_dim = _size(hf_config, "head_dim", hidden_size // num_q_heads)
        rope = _rope_parameters(hf_config)
        scaling = _rope_scaling(rope, _size(hf_config, "max_position_embeddings"))
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        is_qwen2 = architecture == "Qwen2ForCausalLM"  # q, k, v biased, o not; config.json does not say so
        return cls(
            architecture=architecture,
            num_layers=_size(hf_config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_size(hf_config, "intermediate_size"),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_size(hf_config, "vocab_size"),
            max_position_embeddings=_max_positions(hf_config, scaling),
            rms_norm_eps=_positive("rms_norm_eps", _required(hf_config, "rms_norm_eps")),
            rope_theta=_positive("rope_theta", rope["rope_theta"]),
            rope_scaling=scaling,
            rotary_dim=_rotary_dim(head_dim, rope.get("partial_rotary_factor") or 1.0),
            qkv_bias=attention_bias or is_qwen2,
            o_bias=attention_bias and not is_qwen2,
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(getattr(hf_config, "tie_word_embeddings", False)),
            dtype=_dtype(hf_config),
        )


_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
)
_MORE_FIELDS = {"Qwen3ForCausalLM": ("head_dim",), "MistralForCausalLM": ("sliding_window",)}


def needs_defaults(fields: dict[str, Any]) -> bool:
    """Whether a config.json leaves out a field for which transformers has a default that ModelConfig does not know.

    What else from_hf reads is off, or follows from other fields, where a config.json does not have it.
    """
    rope = fields.get("rope_parameters")
    has_theta = "rope_theta" in fields or (isinstance(rope, dict) and "rope_theta" in rope)
    if not has_theta or (fields.get("sliding_window") is not None and "use_sliding_window" not in fields):
        return True
    names = _FIELDS + _MORE_FIELDS.get(fields["architectures"][0], ())
    return any(name not in fields for name in names)


def _required(hf_config: Any, name: str) -> Any:
    value = getattr(hf_config, name, None)
    if value is None:
        raise ValueError(f"{name}: expected a value in the model's config, got none")
    return value


def _size(hf_config: Any, name: str, default: int | None = None) -> int:
    """A count of the config; 0 and None take the default where there is one, as transformers has them."""
    value = _required(hf_config, name) if default is None else getattr(hf_config, name, None) or default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
        raise ValueError(f"{name}: expected an integer in [1, {_MAX_SIZE}], got {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return float(value)


def _rotary_dim(head_dim: int, share: Any) -> int:
    if _positive("partial_rotary_factor", share) > 1:
        raise ValueError(f"partial_rotary_factor: expected a share of at most 1, got {share!r}")
    return int(head_dim * share)


def _check_unquantized(hf_config: Any) -> None:
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization is None:
        return
    settings = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    if not isinstance(settings, dict):
        raise ValueError(f"quantization_config: expected an object, got {settings!r}")
    if not settings.get("config_groups") and settings.get("kv_cache_scheme"):
        _check_cache_scheme(settings["kv_cache_scheme"])  # llm-compressor: scales of the cache beside dense weights
        return
    method = settings.get("quant_method", "unnamed")
    raise ValueError(
        "quantization_config: expected unquantised weights (or a GGUF file), got quantisation method "
        f"{method}, which is not supported"
    )


def _check_cache_scheme(scheme: dict[str, Any]) -> None:
    expected = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    got = {name: scheme.get(name) for name in expected}
    if got != expected:
        raise ValueError(f"quantization_config.kv_cache_scheme: expected {expected}, got {got}")


def _check_activation(hf_config: Any) -> None:
    activation = getattr(hf_config, "hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act: expected silu, got {activation}")


def _check_no_sliding_window(hf_config: Any) -> None:
    """Qwen keeps a `sliding_window` that only counts when `use_sliding_window` is set and a layer uses it."""
    window = getattr(hf_config, "sliding_window", None)
    if window is None or not getattr(hf_config, "use_sliding_window", True):
        return
    if getattr(hf_config, "max_window_layers", 0) >= _required(hf_config, "num_hidden_layers"):
        return
    raise ValueError(
        "sliding_window: expected none (every token attends to its whole context), got an active window of "
        f"{window} tokens, which is not supported"
    )


def _dtype(hf_config: Any) -> torch.dtype:
    value = getattr(hf_config, "dtype" if hasattr(hf_config, "dtype") else "torch_dtype", None)
    if value is None:
        return DEFAULT_DTYPE
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(_DTYPES)}, got {name}")
    return _DTYPES[name]


def _rope_parameters(hf_config: Any) -> dict[str, Any]:
    """One dict with rope_type and rope_theta, of rope_parameters (5.x), rope_scaling and top-level fields."""
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters: expected an object, got {rope!r}")
    rope = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None:
            rope[name] = getattr(hf_config, name, None)
    if rope["rope_theta"] is None:
        raise ValueError("rope_theta: expected a number at the top level of the config or in rope_parameters, got none")
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    divisors = getattr(hf_config, "rope_freq_divisors", None)  # set by nanovllm.loader.gguf
    rope["freq_divisors"] = None if divisors is None else tuple(divisors)
    return rope


def _rope_scaling(rope: dict[str, Any], max_position_embeddings: int) -> RopeScaling:
    rope_type = rope["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise NotImplementedError(f"rope_type: expected one of {', '.join(_ROPE_TYPES)}, got {rope_type}")
    if rope_type == "default":
        return RopeScaling(freq_divisors=rope["freq_divisors"])
    wanted = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate"),
    }[rope_type]
    values = {name: rope[name] for name in wanted if rope.get(name) is not None}
    for name in values.keys() - {"truncate"}:
        values[name] = _positive(f"rope_scaling.{name}", values[name])
    original = rope.get("original_max_position_embeddings") or max_position_embeddings
    original = _positive("rope_scaling.original_max_position_embeddings", original)
    if rope_type == "yarn":
        values["factor"] = _positive("rope_scaling.factor", rope.get("factor") or max_position_embeddings / original)
        values["attention_factor"] = _yarn_attention_factor(rope, values["factor"])
        if _positive("rope_theta", rope["rope_theta"]) <= 1:
            raise ValueError(f"rope_theta: expected more than 1 for rope_type yarn, got {rope['rope_theta']!r}")
    elif "factor" not in values:
        raise ValueError(f"rope_scaling: expected a factor for rope_type {rope_type}, got none")
    return RopeScaling(rope_type=rope_type, original_max_position_embeddings=original, **values)


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    """The config's own, else the ratio of both mscales, else 0.1 ln(factor) + 1 (Peng et al., YaRN, 2023)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return _positive("rope_scaling.attention_factor", rope["attention_factor"])
    names = ("mscale", "mscale_all_dim")
    if all(rope.get(name) for name in names):
        one, all_dim = (_positive(f"rope_scaling.{name}", rope[name]) for name in names)
        return mscale(one) / mscale(all_dim)
    return mscale(1.0)


def _max_positions(hf_config: Any, scaling: RopeScaling) -> int:
    """YaRN checkpoints may give the length before scaling here; the model reaches factor times that."""
    positions = _size(hf_config, "max_position_embeddings")
    if scaling.rope_type == "yarn":
        return max(positions, int(scaling.original_max_position_embeddings * scaling.factor))
    return positions
