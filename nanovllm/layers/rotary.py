"""The rotary table of one model, for every position it can reach.

Sources: Su et al., RoFormer (2021); Chen et al., Position Interpolation (2023) for linear; the Llama 3.1
release for llama3; Peng et al., YaRN (2023) for yarn.
"""

import math

import torch
from torch import Tensor

from nanovllm.layers.layer import Layer
from nanovllm.models.config import ModelConfig, RopeScaling


class RotaryEmbedding(Layer):
    """Holds `cos_sin` [max_position_embeddings, rotary_dim] fp32: cos of rotary_dim / 2 angles, then their
    sin."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        device = torch.get_default_device()
        # On the CPU whatever the model's device: at position 100,000 the last bit of pow() is 0.01 rad.
        self.register_buffer("cos_sin", cos_sin_table(config).to(device), persistent=False)


def cos_sin_table(config: ModelConfig) -> Tensor:
    """[max_position_embeddings, rotary_dim] fp32 on the CPU; the angles are rounded to fp32 as transformers
    does."""
    with torch.device("cpu"):
        scaling = config.rope_scaling
        inv_freq = _scaled(inverse_frequencies(config.rope_theta, config.rotary_dim), config, scaling)
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scaling.attention_factor)


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """[rotary_dim / 2] fp32: theta ** (-2i / rotary_dim)."""
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _scaled(inv_freq: Tensor, config: ModelConfig, scaling: RopeScaling) -> Tensor:
    match scaling.rope_type:
        case "default" if scaling.freq_divisors is None:
            return inv_freq
        case "default":
            return inv_freq / torch.tensor(scaling.freq_divisors, dtype=torch.float32)
        case "linear":
            return inv_freq / scaling.factor
        case "llama3":
            return _llama3(inv_freq, scaling)
        case "yarn":
            return _yarn(inv_freq, config, scaling)
    raise NotImplementedError(f"rope_type: expected default, linear, llama3 or yarn, got {scaling.rope_type}")


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, long ones are stretched by factor, those between are blended."""
    wavelength = 2 * math.pi / inv_freq  # tokens
    turns = scaling.original_max_position_embeddings / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq


def _yarn(inv_freq: Tensor, config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Dimensions that turn more than beta_fast times over the original context stay, those below beta_slow
    are stretched by factor, and a ramp over the dimensions joins the two."""

    def dimension_of(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(len(inv_freq), dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq / scaling.factor * (1 - kept) + inv_freq * kept
