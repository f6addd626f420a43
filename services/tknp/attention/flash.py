"""Flash attention that also returns its log-sum-exp: torch's own kernels, wrapped once.

The public `scaled_dot_product_attention` drops the LSE, so this calls the operators under it. They
are private to torch: parity tests run them, and the supported torch versions are pinned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tknp.errors import InvalidValue


def flash_with_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """q [B, H, n, dh], k and v [B, H, m, dh] -> out [B, H, n, dh], lse float32 [B, H, n], base e.

    `causal`: token i of q sees tokens 0..i of k; needs n == m. Strides are free, 0 for expanded
    heads included. m must be at least 1: the CPU kernel divides by it and kills the process.
    """
    if k.shape[2] == 0:
        raise InvalidValue("k.shape", tuple(k.shape), "needs at least one token to attend to")
    if causal and q.shape[2] != k.shape[2]:
        raise InvalidValue("q.shape", tuple(q.shape), f"causal needs {k.shape[2]} tokens as k has")
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k.contiguous(), v.contiguous(), 0.0, causal, False, scale=scale
        )
    return out, lse
