from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.rpc.ids import MAX_TOKEN_ID, pack_ids, unpack_ids


def test_ids_are_little_endian_uint32() -> None:
    assert pack_ids([1, MAX_TOKEN_ID]) == b"\1\0\0\0\xff\xff\xff\xff"


@given(st.lists(st.integers(0, MAX_TOKEN_ID)))
def test_unpacking_is_the_inverse(ids: list[int]) -> None:
    assert unpack_ids("token_ids", pack_ids(ids)) == ids


@pytest.mark.parametrize("wrong", [-1, MAX_TOKEN_ID + 1, 2**70])
def test_an_id_that_is_no_uint32_is_named(wrong: int) -> None:
    with pytest.raises(InvalidValue, match=f"token_ids={wrong}: must be in 0..4294967295"):
        pack_ids([3, wrong])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_torn_ids_are_refused_by_the_name_of_their_field(size: int) -> None:
    with pytest.raises(InvalidValue, match=f"prompt='{size} bytes'"):
        unpack_ids("prompt", bytes(size))
