"""How many bytes KV takes on one rank. Pure arithmetic, integer pages."""

from __future__ import annotations

from tknp.errors import InvalidValue
from tknp.model.config import ITEM_BYTES, DType, ModelConfig
from tknp.model.shard import Shard


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // page_size)


def token_bytes(config: ModelConfig, dtype: DType, tp: int = 1, layers: int | None = None) -> int:
    """Bytes of one token's keys and values on one of `tp` ranks, over `layers` (default: all).

    Beyond kv_heads ranks each holds one whole head, so replicas are counted.
    """
    count = config.layers if layers is None else layers
    kv_width = Shard(config, 0, 0, False, False, tp).kv_width
    return 2 * count * kv_width * ITEM_BYTES[dtype]


def page_bytes(
    config: ModelConfig, dtype: DType, tp: int, page_size: int, layers: int | None = None
) -> int:
    """Bytes of one page of `page_size` tokens on one of `tp` ranks, over `layers`."""
    return page_size * token_bytes(config, dtype, tp, layers)


def pages_in(
    budget_bytes: int,
    config: ModelConfig,
    dtype: DType,
    tp: int,
    page_size: int,
    layers: int | None = None,
) -> int:
    """Pages, the dummy page among them, that fit in `budget_bytes` of one rank.

    InvalidValue if the budget can't hold the dummy page and one more.
    """
    one = page_bytes(config, dtype, tp, page_size, layers)
    pages = budget_bytes // one
    if pages < 2:
        raise InvalidValue("budget_bytes", budget_bytes, f"two pages need {2 * one} bytes a rank")
    return pages
