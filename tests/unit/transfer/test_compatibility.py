"""Two services that would misread each other's bytes are told which field differs."""

from __future__ import annotations

import pytest

from tknp.errors import ProtocolError
from tknp.model.config import ModelConfig
from tknp.transfer import compatibility
from tknp.v1.common_pb2 import Compatibility

CONFIG = ModelConfig(32, 48, 24, 3, 8, 2, 4, 512)


def build(layout: str = "") -> Compatibility:
    return compatibility.build(CONFIG, model="abc", dtype="bfloat16", page_size=16, layout=layout)


def test_equal_services_fit() -> None:
    compatibility.check(build(), build())
    compatibility.check(build("x"), build("x"))


def test_layout_counts_only_where_both_have_one() -> None:
    compatibility.check(build(), build("x"))
    with pytest.raises(ProtocolError, match="layout differs"):
        compatibility.check(build("y"), build("x"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "9"), ("model", "z"), ("dtype", "float32"), ("page_size", 64), ("layers", 9),
     ("kv_heads", 1), ("head_dim", 8)],
)  # fmt: skip
def test_the_differing_field_is_named(field: str, value: object) -> None:
    theirs = build()
    setattr(theirs, field, value)
    with pytest.raises(ProtocolError, match=f"{field} differs"):
        compatibility.check(build(), theirs)
