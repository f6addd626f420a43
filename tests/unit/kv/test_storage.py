from __future__ import annotations

import ctypes

import pytest
import torch

from tknp.errors import InvalidValue
from tknp.kv.size import page_bytes
from tknp.kv.storage import KvStorage
from tknp.model.config import ModelConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_starts_as_zeros_of_the_right_shape(dtype: torch.dtype) -> None:
    storage = KvStorage(3, 200, 2, 16, 64, dtype)
    k, v = storage.layer(2)
    assert k.shape == v.shape == (200, 2, 16, 64)
    assert k.dtype == dtype
    assert not storage.data.any()


def test_filled_pages_differ_and_repeat_by_seed() -> None:
    filled, again, other = (KvStorage(2, 3, 2, 4, 8, torch.bfloat16) for _ in range(3))
    for storage, seed in ((filled, 1), (again, 1), (other, 2)):
        storage.fill(seed)
    assert torch.equal(filled.data, again.data)
    assert not torch.equal(filled.data, other.data)
    assert not torch.equal(*filled.layer(0))
    assert filled.data.float().std() == pytest.approx(1.0, abs=0.2)


def test_layers_are_views() -> None:
    storage = KvStorage(2, 3, 2, 4, 8, torch.float32)
    k, v = storage.layer(1)
    k[2, 1, 3] = 5.0
    v[2, 1, 3] = 7.0
    assert storage.data[1, 0, 2, 1, 3, 0] == 5.0
    assert storage.data[1, 1, 2, 1, 3, 7] == 7.0


def test_offsets_name_the_memory_of_a_run() -> None:
    storage = KvStorage(2, 3, 2, 4, 8, torch.float32)
    torch.arange(storage.data.numel(), out=storage.data.view(-1))
    for layer, kv, page, head in ((0, 0, 0, 0), (1, 0, 2, 1), (1, 1, 1, 0)):
        address = storage.data.data_ptr() + storage.offset(layer, kv, page, head)
        run = torch.frombuffer(
            bytearray(ctypes.string_at(address, storage.run_bytes)), dtype=torch.float32
        )
        assert torch.equal(run, storage.data[layer, kv, page, head].flatten())


def test_sizes_agree_with_the_arithmetic() -> None:
    config = ModelConfig(100, 64, 64, 5, 6, 2, 8, 512)
    storage = KvStorage(5, 7, 2, 16, 8, torch.bfloat16)
    assert storage.page_bytes == page_bytes(config, "bfloat16", 1, 16)
    assert storage.nbytes == 7 * storage.page_bytes


@pytest.mark.parametrize(
    ("place", "field"),
    [((2, 0, 0), "layer"), ((0, 2, 0), "kv"), ((0, 0, -1), "page"), ((0, 0, 0, 2), "head")],
)
def test_offsets_outside_are_refused(place: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        KvStorage(2, 3, 2, 4, 8, torch.float32).offset(*place)


def test_empty_shapes_are_refused() -> None:
    with pytest.raises(InvalidValue, match="pages=0"):
        KvStorage(1, 0, 1, 4, 8, torch.float32)
