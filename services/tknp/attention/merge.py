"""Exact merge of attention over disjoint parts of one sequence by log-sum-exp.

With partial outputs o_i = softmax(s_i) v_i and l_i = logsumexp(s_i), attention over the whole is

    l = logsumexp_i l_i        o = sum_i exp(l_i - l) o_i

(Helix section 2.1; the same identity as in FlashDecoding). A part that holds nothing says
l_i = -inf and weighs zero; kernels that report an empty part as NaN or +inf are read so, too. What
such a part left in its output, NaN included, is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge k parts: outs [k, R, H, dh], lses [k, R, H] -> out [R, H, dh], lse [R, H].

    Computed in float32 in the order of the parts; `out` in the dtype of `outs`, `lse` float32 in
    base e as `lses` must be. Where every part is empty (and for k = 0): out 0, lse -inf.
    """
    if outs.shape[0] == 0:
        empty = lses.new_full(lses.shape[1:], -torch.inf, dtype=torch.float32)
        return outs.new_zeros(outs.shape[1:]), empty
    lses = empty_to_minus_inf(lses.float())
    highest = lses.amax(0)
    weights = torch.exp(lses - highest.masked_fill(highest == -torch.inf, 0.0))
    total = torch.zeros_like(highest)
    out = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for part, weight in zip(outs, weights, strict=True):
        total += weight
        out += torch.where(weight.unsqueeze(-1) == 0, 0.0, part.float() * weight.unsqueeze(-1))
    out /= total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out.to(outs.dtype), highest + total.log()


def merge_columns(
    outs: Sequence[Tensor], lses: Sequence[Tensor], columns: range, head_dim: int
) -> Tensor:
    """Merge parts that keep `columns` of a row of heads, which may cut heads.

    outs [R, len(columns)] a part, lses [R, H] of the heads that the columns belong to, in order.
    Returns [R, len(columns)] in the dtype of the outs.
    """
    stacked, heads = torch.stack(tuple(outs)), torch.stack(tuple(lses))
    rows = stacked.shape[1]
    if not columns:
        return stacked.new_empty(rows, 0)
    if columns.start % head_dim == columns.stop % head_dim == 0:
        out, _ = merge(stacked.view(len(stacked), rows, -1, head_dim), heads)
        return out.flatten(1)
    of_column = torch.arange(columns.start, columns.stop, device=heads.device) // head_dim
    out, _ = merge(stacked.unsqueeze(-1), heads[..., of_column - columns.start // head_dim])
    return out.squeeze(-1)


def weighted(out: Tensor, lses: Sequence[Tensor], part: int) -> Tensor:
    """Part `part`'s addend of the merged output: float32 [R, H dh] from its out [R, H dh].

    `lses`: float32 [R, H] of every part, in the order of the parts. The addends of all parts sum to
    what `merge` returns.
    """
    weights = torch.softmax(empty_to_minus_inf(torch.stack(tuple(lses))), 0)[part]
    weights = torch.nan_to_num(weights)  # every part is empty
    rows, heads = weights.shape
    return (out.float().view(rows, heads, -1) * weights.unsqueeze(-1)).flatten(1)


def empty_to_minus_inf(lse: Tensor) -> Tensor:
    """LSE with every spelling of an empty part (NaN, +inf) as -inf."""
    return torch.where(torch.isfinite(lse), lse, -torch.inf)
