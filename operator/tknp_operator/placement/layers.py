"""Which layers each node will root, where the model's shape is known before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from tknp.errors import InvalidValue
from tknp.layout.layout import Layout, make_layout
from tknp.layout.rank import Rank
from tknp.layout.strategies import NodeSpec
from tknp.layout.strategy import Strategy
from tknp.planner.models import MODELS, Model
from tknp_operator.api.spec import Spec

_BUILTIN = {"smollm2": "smollm2-135m"}
_FIELDS = {"tp": "tensorParallel"}  # of a layout's own names, those that differ in the spec


def shape_of(spec: Spec) -> Model | None:
    """The model's row in the planner's table. Raises InvalidValue for a name it doesn't have."""
    name = spec.model.shape or _BUILTIN.get(spec.model.source.builtin or "", "")
    if not name:
        return None
    if name not in MODELS:
        raise InvalidValue("spec.model.shape", name, f"choose one of {', '.join(MODELS)}")
    return MODELS[name]


def layout_of(spec: Spec, memories: Sequence[int] | None = None) -> Layout | None:
    """The pool's layout; None where the shape is not known.

    `memories`: weights plus KV on each rank of each node in bytes; None: all are equal. Raises
    InvalidValue where the model can't be laid out so; better here than in every pod.
    """
    model, decode = shape_of(spec), spec.decode
    if model is None:
        return None
    strategy = Strategy(decode.strategy)
    nodes = [
        NodeSpec(memories[n] if memories else 1 << 40, root=decode.role(n) != "attention-owner",
                 owner=decode.role(n) != "decode-root")
        for n in range(decode.nodes)
    ]  # fmt: skip
    try:
        return make_layout(
            model.config, model.dtype, decode.tensor_parallel, nodes, strategy=strategy,
            copies=decode.copies, microbatches=decode.microbatches, width=decode.width,
        )  # fmt: skip
    except InvalidValue as error:
        field = f"spec.decode.{_FIELDS.get(error.field, error.field)}"
        raise InvalidValue(field, error.value, error.remedy) from error


def too_small(spec: Spec, memories: Sequence[int]) -> str:
    """Which node's memory its weights leave nothing of; empty: none, or the shape is not known."""
    try:
        layout = layout_of(spec, memories)
    except InvalidValue as error:
        return str(error)
    if layout is None:
        return ""
    for node, memory in enumerate(memories):
        weights = layout.weight_bytes(Rank(node, 0))
        if weights >= memory:
            return (f"node {node} would hold {weights / 2**30:.1f} GiB of weights on each rank of "
                    f"{memory / 2**30:.1f} GiB")  # fmt: skip
    return ""


def layers_of(layout: Layout | None, node: int) -> str:
    """Such as `0-14` or `0-7, 16-23`; empty where there are none or nobody knows."""
    if layout is None or node >= len(layout.held):
        return ""
    return ", ".join(
        f"{block.start}-{block.stop - 1}" for block in layout.held[node] if not block.empty
    )
