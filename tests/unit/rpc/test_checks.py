from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.rpc.checks import (
    NAME_CHARACTERS,
    check_ids,
    check_lease,
    check_name,
    check_owners,
    check_prompt,
    check_writer,
)
from tknp.rpc.limits import MIB, port_bytes, request_bytes


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_lease_ends_within_an_hour(lease_s: float) -> None:
    if 0 < lease_s <= 3600:
        assert check_lease(lease_s) == lease_s
    else:
        with pytest.raises(InvalidValue, match="above 0 and at most 3600"):
            check_lease(lease_s)


@given(st.text())
def test_a_name_fits_a_line_of_a_log(name: str) -> None:
    if name.isprintable() and 0 < len(name) <= NAME_CHARACTERS:
        assert check_name("writer", name) == name
    else:
        with pytest.raises(InvalidValue) as error:
            check_name("writer", name)
        assert str(error.value) == (
            f"writer='{len(name)} characters': must be 1 to 128 printable characters"
        )


@pytest.mark.parametrize(
    ("ids", "generated"), [([], 0), ([0] * 9, 0), ([10], 0), ([1, 2], 2), ([1], 2**32 - 1)]
)
def test_a_prompt_fits_the_replica(ids: list[int], generated: int) -> None:
    check_prompt([0] * 8, 7, vocab_size=10, longest=8)
    with pytest.raises(InvalidValue):
        check_prompt(ids, generated, vocab_size=10, longest=8)


def test_ids_have_an_embedding() -> None:
    check_ids([], 10)
    check_ids([0, 9], 10)
    with pytest.raises(InvalidValue, match="token_ids=10: ids end at 9"):
        check_ids([0, 10, 3], 10)


@pytest.mark.parametrize(
    ("addresses", "placements"), [([], 0), (["a:1"], 2), (["a:1", "a"], 2), (["a:1"], 0)]
)
def test_each_placement_has_an_address(addresses: list[str], placements: int) -> None:
    check_owners(["a:1", "b:2"], 2)
    with pytest.raises(InvalidValue, match="owners="):
        check_owners(addresses, placements)


@pytest.mark.parametrize("arguments", [("", []), ("w", ["x"]), ("w", ["a:1"] * 1025)])
def test_a_writer_listens_somewhere(arguments: tuple[Any, ...]) -> None:
    check_writer("w", ["a:1"])
    with pytest.raises(InvalidValue, match="writer"):
        check_writer(*arguments)


def test_a_port_reads_as_much_as_the_most_of_its_methods() -> None:
    assert request_bytes("/tknp.v1.Inference/Generate") == 8 * MIB
    assert request_bytes("/tknp.v1.AttentionOwner/Write") == 8 * MIB
    assert request_bytes("/tknp.v1.AttentionOwner/Reserve") == MIB
    assert request_bytes("/grpc.health.v1.Health/Check") == MIB
    assert port_bytes(["tknp.v1.Coordinator", "tknp.v1.Inference"]) == 8 * MIB
    assert port_bytes(["tknp.v1.AttentionOwner"]) == 64 * MIB
    assert port_bytes(["other.Service"]) == MIB


def test_the_largest_messages_of_a_long_context_fit() -> None:
    """A million tokens: ids in a request, ids and pages of 64 tokens for prefill."""
    tokens, ranks = 1_000_000, 8
    assert 4 * tokens < request_bytes("/tknp.v1.Inference/Generate")
    pages = math.ceil(tokens / 64) * ranks * 3
    assert 4 * tokens + pages < request_bytes("/tknp.v1.Prefill/Run")
