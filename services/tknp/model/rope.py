"""Rotary position embedding in the half-split convention: pairs (i, i + dh/2).

Where only the first r of dh elements are rotated (Nemotron-4), a checkpoint pairs (i, i + r/2) and
leaves the rest alone. The weights of Q and K are then reordered when they are loaded, as scores
don't change with the order of a head's elements: the rest becomes pairs of frequency zero, which
cos = 1 and sin = 0 leave exactly as they are. So attention knows nothing of it.

    checkpoint  | a: r/2 | b: r/2 | rest: dh - r        |
    loaded      | a      | first half of rest | b       | second half of rest |
                |<-- first of each pair ----->|<-- second of each pair ---->|
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tknp.model.config import LinearScaling, ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position advances each pair by: float32 [dh/2], zero for pairs not rotated."""
    rotated = config.rotary_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case RopeScaling():
            frequencies = _llama3(frequencies, config.rope_scaling)
        case LinearScaling():
            frequencies = frequencies / config.rope_scaling.factor
    if config.rope_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_factors, dtype=torch.float32)
    return torch.cat([frequencies, torch.zeros((config.head_dim - rotated) // 2)])


def loaded_order(config: ModelConfig) -> Tensor | None:
    """Index in the checkpoint of each element of a loaded Q or K head; None where they agree."""
    dh, rotated = config.head_dim, config.rotary_dim
    if rotated == dh:
        return None
    first, second = torch.arange(rotated).chunk(2)
    rest_first, rest_second = torch.arange(rotated, dh).tensor_split(2)
    return torch.cat([first, rest_first, second, rest_second])


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
