"""Safetensors checkpoints as published on model hubs.

    config.json  +  model.safetensors
    config.json  +  model.safetensors.index.json  +  model-00001-of-000NN.safetensors ...

Headers are parsed here, so that a damaged file can be refused by tensor name before it is mapped;
the safetensors library reads the data, memory-mapped, slice by slice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tknp.errors import CheckpointError
from tknp.model.config import ModelConfig
from tknp.model.hf_config import read_hf_config, read_json
from tknp.model.source import TensorHeader

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_READABLE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_LENGTH_BYTES = 8  # a header starts with its own length as a little-endian u64


class SafetensorsSource:
    """The tensors of a safetensors directory. Handles open on first read, `close` drops them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = read_hf_config(directory)
        self._headers: dict[str, TensorHeader] = {}
        self._file_bytes: dict[str, int] = {}
        self._handles: dict[str, Any] = {}
        for file, promised in _weight_files(directory).items():
            headers, size = _read_headers(directory / file)
            for name in promised - headers.keys():
                raise CheckpointError(f"{file}: tensor {name} is missing; {INDEX} says it is here")
            self._headers |= headers
            self._file_bytes[file] = size

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self._headers

    @property
    def file_bytes(self) -> Mapping[str, int]:
        return self._file_bytes

    def expected_name(self, name: str) -> str:
        return name

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        file = self._headers[name].file
        if file not in self._handles:
            from safetensors import safe_open  # needs torch, which header checks do without

            self._handles[file] = safe_open(self._directory / file, framework="pt")
        stored = self._handles[file].get_slice(name)
        part = slice(rows.start, rows.stop)
        tensor: torch.Tensor = (
            stored[part] if columns is None else stored[part, columns.start : columns.stop]
        )
        return tensor

    def close(self) -> None:
        self._handles.clear()


def _weight_files(directory: Path) -> dict[str, set[str]]:
    """Weight files, each with the tensors that the index promises in it."""
    if (directory / SINGLE).exists():
        return {SINGLE: set()}
    if not (directory / INDEX).exists():
        raise CheckpointError(
            f"{directory} holds neither {SINGLE} nor {INDEX}; save the model as safetensors "
            "(pickled weights are never loaded)"
        )
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX}: weight_map is missing")
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{INDEX}: {tensor} lies in {file!r}; expected a plain file name")
        files.setdefault(file, set()).add(tensor)
    return files


def _read_headers(path: Path) -> tuple[dict[str, TensorHeader], int]:
    """Headers of one file by tensor name, and the file's size in bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if _LENGTH_BYTES + length > size:
                raise CheckpointError(
                    f"{path.name} is truncated: its header takes {_LENGTH_BYTES + length} bytes, "
                    f"the file has {size}; download the file again"
                )
            raw = json.loads(stream.read(length))
        entries = {k: v for k, v in raw.items() if k != "__metadata__"}
        data = _LENGTH_BYTES + length
        return {k: _header(path.name, k, v, data) for k, v in entries.items()}, size
    except OSError as error:
        raise CheckpointError(f"{path.name} can't be read: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is not a safetensors file: {error}") from error


def _header(file: str, name: str, entry: Any, data_start: int) -> TensorHeader:
    try:
        shape = tuple(int(n) for n in entry["shape"])
        dtype = str(entry["dtype"])
        start, stop = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name} has a damaged header") from error
    item = _READABLE_BYTES.get(dtype)
    if item is not None and (start < 0 or stop - start != math.prod(shape) * item):
        raise CheckpointError(
            f"{file}: tensor {name} spans {stop - start} bytes; expected "
            f"{math.prod(shape) * item} for {dtype} {list(shape)}"
        )
    return TensorHeader(
        name, file, shape, dtype, data_start + start, stop - start, readable=item is not None
    )
