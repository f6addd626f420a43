"""What services may ask of each other. Pure.

A peer that showed the token can still be wrong: another version, a bug. What is refused here would
otherwise end in a wait without end, a lease for ever, or a rank out of step with its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence

from tknp.config import LONGEST_LEASE_S, check_address
from tknp.errors import InvalidValue

NAME_CHARACTERS = 128
_WRITER_ADDRESSES = 1024


def check_name(field: str, name: str) -> str:
    """A name that others chose: not empty, not long, fit for a line of a log."""
    if not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
        shown = f"{len(name)} characters"
        raise InvalidValue(field, shown, f"must be 1 to {NAME_CHARACTERS} printable characters")
    return name


def check_lease(lease_s: float) -> float:
    """A lease that ends; NaN is none."""
    if not 0 < lease_s <= LONGEST_LEASE_S:
        raise InvalidValue("lease_s", lease_s, f"must be above 0 and at most {LONGEST_LEASE_S}")
    return lease_s


def check_writer(writer: str, addresses: Sequence[str]) -> None:
    """A writer of KV and where its processes listen."""
    check_name("writer", writer)
    if len(addresses) > _WRITER_ADDRESSES:
        remedy = f"at most {_WRITER_ADDRESSES} processes can be one writer"
        raise InvalidValue("writer_addresses", len(addresses), remedy)
    for address in addresses:
        check_address("writer_addresses", address)


def check_prompt(ids: Sequence[int], generated: int, vocab_size: int, longest: int) -> None:
    """A prompt that a prefill replica can compute, `generated` of its ids from before a replay."""
    if not 0 < len(ids) <= longest:
        raise InvalidValue("token_ids", f"{len(ids)} ids", f"must be 1 to {longest}")
    check_ids(ids, vocab_size)
    if generated >= len(ids):
        raise InvalidValue("generated", generated, f"must leave a prompt of these {len(ids)} ids")


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Ids that the embedding has a row for."""
    if ids and max(ids) >= vocab_size:
        raise InvalidValue("token_ids", max(ids), f"ids end at {vocab_size - 1}")


def check_owners(addresses: Sequence[str], placements: int) -> None:
    """One address of an owner rank for each placement."""
    if len(addresses) != placements or not placements:
        raise InvalidValue(
            "owners", len(addresses), f"give one for each of {placements} placements"
        )
    for address in addresses:
        check_address("owners", address)
