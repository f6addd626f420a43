"""Which instruction sets the kernels are written for, and which this processor has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Isa:
    """An instruction set: what /proc/cpuinfo must list and how to compile for it."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


AVX512_BF16 = Isa(
    "avx512_bf16",
    frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16"}),
    ("-march=x86-64-v4", "-mavx512bf16", "-DTKNP_AVX512_BF16"),
)
AVX2 = Isa("avx2", frozenset({"avx2", "fma", "bmi2", "f16c"}), ("-march=x86-64-v3", "-DTKNP_AVX2"))
ISAS = (AVX512_BF16, AVX2)
"""Fastest first."""


def cpu_features() -> frozenset[str]:
    """Flags of this processor as Linux names them; empty on other systems and architectures."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(flags.partition(":")[2].split())


def best_isa(features: frozenset[str]) -> Isa | None:
    """The fastest instruction set that `features` allow."""
    return next((isa for isa in ISAS if isa.needs <= features), None)
