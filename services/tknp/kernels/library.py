"""The compiled kernels as Python functions, and whether this machine can have them.

Calls go through ctypes, which releases the GIL. Structures mirror csrc/dense.h, rope.h,
attention.h, mailbox.h and layers.h field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch  # loads the OpenMP runtime that the kernels share

from tknp.errors import TknpError
from tknp.kernels.build import prepare
from tknp.kernels.isa import Isa, chosen_isa

_OUT_OF_MEMORY = 1


@dataclass(frozen=True)
class Availability:
    """Whether kernels can be used: true or false itself, with the `isa` or the `reason`."""

    isa: str | None
    reason: str

    def __bool__(self) -> bool:
        return self.isa is not None


class Layer(ctypes.Structure):
    """Pointers to one layer's norms (float32) and packed matrices (bfloat16)."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
    )


class Shape(ctypes.Structure):
    """Sizes of one rank's dense operations."""

    _fields_ = (
        ("hidden", c_int64),
        ("qkv_width", c_int64),
        ("q_width", c_int64),
        ("mlp_columns", c_int64),
        ("vocabulary", c_int64),
        ("norm_eps", c_float),
    )


class Heads(ctypes.Structure):
    """One rank's heads, their pages and the rotary table."""

    _fields_ = (
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("scale", c_float),
    )


class Step(ctypes.Structure):
    """The rows of one decode step and the items that they are cut into."""

    _fields_ = (
        ("rows", c_int64),
        ("table_width", c_int64),
        ("items", c_int64),
        ("block_tables", c_void_p),
        ("positions", c_void_p),
        ("lengths", c_void_p),
        ("append", c_void_p),
        ("item_row", c_void_p),
        ("item_first", c_void_p),
        ("item_blocks", c_void_p),
        ("row_items", c_void_p),
    )


class Layers(ctypes.Structure):
    """`count` layers: arrays of pointers to `Layer`, to their pages of keys and of values."""

    _fields_ = (
        ("count", c_int64),
        ("weights", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Stage(ctypes.Structure):
    """What is done in each layer of a run, on rows [start, stop), with messages [first, last)."""

    _fields_ = (
        ("work", c_int64),
        ("start", c_int64),
        ("stop", c_int64),
        ("first", c_int64),
        ("last", c_int64),
    )


class Part(ctypes.Structure):
    """A message on its way; `moved` bytes of `size` are through, -1: not even its header."""

    _fields_ = (
        ("end", c_void_p),
        ("address", c_void_p),
        ("size", c_int64),
        ("code", c_int64),
        ("moved", c_int64),
    )


class Run(ctypes.Structure):
    """Whole layers, and how far they got."""

    _fields_ = (
        ("layers", Layers),
        ("stages", c_int64),
        ("at", c_int64),
        ("rows", c_int64),
        ("pattern", c_void_p),
        ("shape", c_void_p),
        ("heads", c_void_p),
        ("step", c_void_p),
        ("lane", c_void_p),
        ("parts", c_void_p),
        ("part_count", c_int64),
        ("x", c_void_p),
        ("qkv", c_void_p),
        ("attention", c_void_p),
        ("lse", c_void_p),
        ("seconds", c_void_p),
        ("waits", c_void_p),
        ("begun", c_int64),
        ("since_ns", c_int64),
    )


_P, _N = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "refused_bytes": (_N, ()),
    "supports_head_dim": (c_int, (_N,)),
    "packed_elements": (_N, (_N, _N)),
    "packed_gate_up_elements": (_N, (_N, _N)),
    "pack": (None, (_P, _N, _N, _P, c_int)),
    "pack_gate_up": (None, (_P, _N, _N, _P, c_int)),
    "embed": (None, (_P, _P, _P, _N, _P, c_int)),
    "project": (c_int, (_P, _P, _P, _N, _P, c_int)),
    "finish": (c_int, (_P, _P, _P, _P, _N, c_int)),
    "output": (c_int, (_P, _P, _P, _N, _P, c_int)),
    "mlp": (c_int, (_P, _P, _P, _N, _P, c_int)),
    "head": (c_int, (_P, _P, _P, _P, _N, _P, c_int)),
    "plan": (_N, (_P, _N)),
    "attend": (c_int, (_P, _P, _P, _P, _P, _P, _P, c_int)),
    "layers": (c_int, (_P, c_int)),
    "layers_together": (c_int, (_P, _P, _N, _P, c_int, c_int)),
    "prefill": (c_int, (_P, _P, _N, _N, _P, _P, _P, _P, c_int)),
    "chunk": (c_int, (_P, _P, _P, _N, _N, _P, _P, _P, _P, _P, c_int)),
    "keep_cores": (c_int, (_P, c_int)),
    "read": (c_uint64, (_P, _N, c_int)),
}


class Library:
    """The functions of csrc/*.cpp without their prefix, e.g. `library.project`."""

    def __init__(self, path: str, isa: Isa) -> None:
        self.isa = isa
        functions = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(functions, f"tknp_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def check(self, status: int) -> None:
        """MemoryError if a kernel, called by this thread, returned that it got no scratch memory.

        It says how many bytes were wanted, and what to lower.
        """
        if status == _OUT_OF_MEMORY:
            wanted = self.refused_bytes()
            raise MemoryError(
                f"the CPU kernels need {wanted} bytes ({wanted / 2**30:.2f} GiB) of scratch memory "
                "and there are none: lower prefill_chunk (prefill) or max_batch (decode), or give "
                "the process more memory"
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernels have no function {name}")


def threads() -> int:
    """Threads of a kernel call: torch's, as everything on the CPU."""
    return torch.get_num_threads()


def available() -> Availability:
    """Whether the kernels can be used here; builds them if nobody has yet. Never raises for it."""
    try:
        return Availability(load().isa.name, "")
    except TknpError as error:
        return Availability(None, str(error))


@cache
def load() -> Library:
    """The compiled kernels, built on first use. Unavailable if this machine can't have them."""
    return Library(str(prepare()), chosen_isa())
