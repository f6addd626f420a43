"""What two services must agree on before the first byte of KV passes between them."""

from __future__ import annotations

import tknp
from tknp.errors import ProtocolError
from tknp.model.config import DType, ModelConfig
from tknp.v1.common_pb2 import Compatibility

_FIELDS = ("version", "model", "dtype", "page_size", "layers", "kv_heads", "head_dim")


def build(
    config: ModelConfig, *, model: str, dtype: DType, page_size: int, layout: str = ""
) -> Compatibility:
    """`model`: fingerprint of the checkpoint. `layout`: hash of the decode layout, if any."""
    return Compatibility(
        version=tknp.__version__,
        model=model,
        dtype=dtype,
        page_size=page_size,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layout=layout,
    )


def check(mine: Compatibility, theirs: Compatibility) -> None:
    """Raise ProtocolError naming the first field that differs; layout only where both have one."""
    fields = _FIELDS + (("layout",) if mine.layout and theirs.layout else ())
    for name in fields:
        own, other = getattr(mine, name), getattr(theirs, name)
        if own != other:
            raise ProtocolError(
                f"{name} differs: {own!r} here, {other!r} there; start both from one pool file, "
                "one checkpoint and one version"
            )
