"""An owner rank's pool as a prefill rank sees it, and what is checked before it is written.

A one-sided write is refused by nobody: a wrong shape or page would silently hit other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tknp.errors import ProtocolError
from tknp.kv.storage import KvStorage
from tknp.transfer.extents import PoolShape
from tknp.transfer.plan import Route
from tknp.v1.attention_owner_pb2 import OwnerDescription


@dataclass
class Remote:
    """An owner rank's pool as its description gives it. `running`, `lost`: worker thread only."""

    metadata: bytes
    name: str
    segment: int
    device: int
    address: int
    shape: PoolShape
    heads: range
    running: int = 0
    lost: bool = False


def shape_of(storage: KvStorage) -> PoolShape:
    layers, _, pages, heads, page_size, head_dim = storage.shape
    return PoolShape(layers, pages, heads, page_size, head_dim, storage.data.element_size())


def described_shape(owner: str, mine: PoolShape, described: OwnerDescription) -> PoolShape:
    """Shape of an owner's pool; page size, head size and dtype have been compared before."""
    heads = described.head_stop - described.head_start
    one = PoolShape(1, described.pages, heads, mine.page_size, mine.head_dim, mine.item_bytes)
    layers = described.kv_bytes // one.nbytes if one.nbytes else 0
    shape = PoolShape(layers, one.pages, heads, one.page_size, one.head_dim, one.item_bytes)
    if not layers or shape.nbytes != described.kv_bytes:
        raise ProtocolError(
            f"{owner}: kv_bytes={described.kv_bytes} is not a number of layers of "
            f"{described.pages} pages of {heads} KV heads ({one.nbytes} bytes each)"
        )
    return shape


def check_route(route: Route, owner: str, remote: Remote) -> None:
    """Refuse a placement that the described pool doesn't have: a write would hit other memory."""
    if route.heads.start - route.dst_head != remote.heads.start or (
        route.heads.stop > remote.heads.stop
    ):
        raise ProtocolError(
            f"{route} at {owner}: placement heads begin at {route.heads.start - route.dst_head}, "
            f"its pool holds [{remote.heads.start}, {remote.heads.stop})"
        )
    if route.dst_layer + len(route.layers) > remote.shape.layers:
        raise ProtocolError(
            f"{route} at {owner}: placement has more layers than the {remote.shape.layers} of "
            "its pool"
        )
    for page in route.pages:
        if page >= remote.shape.pages:
            raise ProtocolError(
                f"{route} at {owner}: page {page} is not in its pool of {remote.shape.pages} pages"
            )
