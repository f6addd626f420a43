"""The header of a GGUF file: metadata and tensor table, nothing of the data.

The `gguf` package's own reader builds a Python object for every vocabulary entry (4 s for 49,152
tokens) and fails on a truncated file without naming the tensor; this parser skips arrays it isn't
asked for and checks every length against the file. Types and block sizes are the package's.

    magic u32 | version u32 | tensors u64 | keys u64
    keys    x (name str | type u32 | value)
    tensors x (name str | dims u32 | dim u64 ... | type u32 | offset u64)
    padding to general.alignment | data
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from tknp.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is row-major (rows first); offsets are absolute."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays only where asked for) and tensors of one file of `size_bytes`."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    size_bytes: int


def read_gguf_header(path: Path, arrays: Container[str] = ()) -> GgufHeader:
    """Parse the header of `path`, keeping the arrays whose keys are in `arrays`.

    Raises CheckpointError if the file isn't GGUF 2 or 3 in this machine's byte order, or ends
    inside its own header.
    """
    try:
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path.name} is not a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path.name, data, arrays)
    except OSError as error:
        raise CheckpointError(f"{path.name} can't be read: {error.strerror}") from error


def _parse(file: str, data: mmap.mmap, arrays: Container[str]) -> GgufHeader:
    cursor = _Cursor(file, data, len(MAGIC))
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise CheckpointError(f"{file}: GGUF version {version}; expected 2 or 3, little-endian")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.string()
        value = cursor.value(cursor.type(), keep_array=key in arrays)
        if value is not None:
            metadata[key] = value
    table = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{file}: general.alignment={alignment!r}; expected at least 1")
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(name, shape, kind, start + offset, _size_bytes(file, name, shape, kind))
        for name, shape, kind, offset in table
    }
    if len(tensors) != len(table):
        raise CheckpointError(f"{file}: two tensors have one name")
    return GgufHeader(metadata, tensors, len(data))


def _size_bytes(file: str, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(
            f"{file}: tensor {name} has rows of {shape[-1]}; expected a multiple of {kind.name}'s "
            f"block of {block}"
        )
    return math.prod(shape) // block * block_bytes


class _Cursor:
    """A reading position that can't leave the file."""

    def __init__(self, file: str, data: mmap.mmap, at: int) -> None:
        self._file = file
        self._data = data
        self.at = at

    def _advance(self, count: int) -> int:
        start = self.at
        self.at += count
        if self.at > len(self._data):
            raise CheckpointError(
                f"{self._file} is truncated inside its header at byte {len(self._data)}; "
                "download the file again"
            )
        return start

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self._data, self._advance(struct.calcsize(code)))
        return int(value)

    def string(self) -> str:
        length = self.number("Q")
        start = self._advance(length)
        try:
            return self._data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._file}: damaged text in the header: {error}") from error

    def type(self) -> GGUFValueType:
        value = self.number("I")
        try:
            return GGUFValueType(value)
        except ValueError:
            raise CheckpointError(f"{self._file}: unknown metadata type {value}") from None

    def value(self, kind: GGUFValueType, keep_array: bool) -> object:
        """One metadata value; None for an array that nobody asked for."""
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array(keep_array)
        code = _SCALARS[kind]
        start = self._advance(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._data, start)[0]

    def _array(self, keep: bool) -> list[object] | None:
        kind, count = self.type(), self.number("Q")
        if kind in _SCALARS:
            start = self._advance(count * struct.calcsize("<" + _SCALARS[kind]))
            form = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack_from(form, self._data, start)) if keep else None
        if keep:
            return [self.value(kind, keep_array=True) for _ in range(count)]
        for _ in range(count):
            if kind == GGUFValueType.STRING:
                self._advance(self.number("Q"))
            else:
                self._array(keep=False)
        return None

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """Name, row-major shape, type and offset in the data section of one tensor."""
        name = self.string()
        dims = self.number("I")
        if not 1 <= dims <= 4:
            raise CheckpointError(f"{self._file}: tensor {name} has {dims} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(dims)]))
        kind = self.number("I")
        try:
            return name, shape, GGMLQuantizationType(kind), self.number("Q")
        except ValueError:
            raise CheckpointError(
                f"{self._file}: tensor {name} has the unknown quantization type {kind}"
            ) from None
