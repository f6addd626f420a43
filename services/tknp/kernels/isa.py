"""Which instruction sets the kernels are written for, and which this processor has."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from tknp.errors import InvalidValue, Unavailable


@dataclass(frozen=True)
class Isa:
    """An instruction set: what /proc/cpuinfo must list and how to compile for it."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


AVX512_BF16 = Isa(
    "avx512_bf16",
    frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16"}),
    # By -O2 GCC 12 keeps a third of the sums of decode attention's scores in memory.
    ("-O3", "-march=x86-64-v4", "-mavx512bf16", "-DTKNP_AVX512_BF16"),
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


def chosen_isa() -> Isa:
    """The instruction set to compile for. Unavailable if this machine can't have the kernels.

    The environment variable TKNP_KERNELS is read here and nowhere else: `auto` (default), `off`, or
    the name of an instruction set to use instead of the fastest.
    """
    return choose_isa(os.environ.get("TKNP_KERNELS", "auto"), cpu_features())


def choose_isa(setting: str, features: frozenset[str]) -> Isa:
    """The instruction set that TKNP_KERNELS=`setting` means on a processor with `features`."""
    if setting == "off":
        raise Unavailable("CPU kernels are switched off by TKNP_KERNELS=off")
    names = ["auto", "off", *(isa.name for isa in ISAS)]
    if setting not in names:
        raise InvalidValue("TKNP_KERNELS", setting, f"choose one of {', '.join(names)}")
    isa = best_isa(features)
    if setting != "auto":
        isa = next(isa for isa in ISAS if isa.name == setting)
    if isa is None or not isa.needs <= features:
        missing = "avx2 and fma" if isa is None else ", ".join(sorted(isa.needs - features))
        raise Unavailable(f"this processor lacks {missing}, which the CPU kernels need")
    return isa
