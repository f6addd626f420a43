"""What every backend does before attending: rotate the rows and store their keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.model.rope import apply_rope


@dataclass(frozen=True)
class AppendPlan:
    """Where the rows of a step are stored and how they are rotated.

    cos, sin      float32 [R, dh / 2]
    pages, slots  int64 [R]; the dummy page for rows that don't append
    """

    cos: Tensor
    sin: Tensor
    pages: Tensor
    slots: Tensor

    @classmethod
    def of(cls, rows: DecodeRows, rope: RopeTable, page_size: int) -> AppendPlan:
        cos, sin = rope
        positions = rows.positions.long()
        return cls(cos[positions], sin[positions], *rows.append_slots(page_size))


def rotate(
    shape: AttentionShape, qkv: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [q | k | v] -> q [R, Hq, dh] and k [R, Hkv, dh] rotated, v [R, Hkv, dh] as it is.

    Rotated in float32 and rounded once to the dtype of `qkv`, so pages hold rotated keys.
    """
    first_value = shape.q_heads + shape.kv_heads
    heads = qkv.view(qkv.shape[0], first_value + shape.kv_heads, shape.head_dim)
    rotated = apply_rope(heads[:, :first_value], cos, sin)
    return rotated[:, : shape.q_heads], rotated[:, shape.q_heads :], heads[:, first_value:]


def append(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor
) -> None:
    """Store rows k, v [R, Hkv, dh] at (page, slot) of pages [pages, Hkv, page_size, dh]."""
    k_pages.transpose(1, 2).index_put_((pages, slots), k)
    v_pages.transpose(1, 2).index_put_((pages, slots), v)


def rotate_and_append(
    shape: AttentionShape, plan: AppendPlan, qkv: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Tensor:
    """Rotate `qkv` [R, W], store keys and values by `plan`; returns q [R, Hq, dh] rotated."""
    q, k, v = rotate(shape, qkv, plan.cos, plan.sin)
    append(k_pages, v_pages, k, v, plan.pages, plan.slots)
    return q
