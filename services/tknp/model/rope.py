"""Rotary position embedding in the half-split convention: pairs (i, i + dh/2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tknp.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position advances each pair by: float32 [dh/2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _llama3(frequencies, config.rope_scaling)
    if config.rope_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_factors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: stretch long wavelengths by `factor`, keep short ones, blend between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = (scaling.original_max_position / wavelengths - low) / (high - low)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def rope_table(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of integer `positions` [n]: two float32 [n, dh/2] on their device."""
    frequencies = inverse_frequencies(config).to(positions.device)
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [B, H, dh] by the table rows of their tokens [B, dh/2]; in x.dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
