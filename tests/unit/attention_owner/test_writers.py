from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from tknp.attention_owner.writers import KEPT, LOOKS, Contact, Writers, contact


class Network:
    """What each address does with a connection."""

    def __init__(self, **contacts: Contact) -> None:
        self.contacts: Mapping[str, Contact] = contacts

    async def __call__(self, address: str) -> Contact:
        return self.contacts[address]


async def looks(writers: Writers, count: int) -> list[str]:
    """Who is found dead at each of `count` looks."""
    return [writer for _ in range(count) for writer in await writers.dead(["w"])]


async def test_a_writer_is_dead_when_all_its_processes_refuse_at_several_looks() -> None:
    network = Network(a=Contact.ACCEPTED, b=Contact.ACCEPTED)
    writers = Writers(network)
    await writers.learn("w", ["a", "b"])
    network.contacts = {"a": Contact.REFUSED, "b": Contact.ACCEPTED}
    assert await looks(writers, 2 * LOOKS) == []
    network.contacts = {"a": Contact.REFUSED, "b": Contact.REFUSED}
    assert await looks(writers, LOOKS - 1) == []
    assert await looks(writers, 1) == ["w"]
    assert await looks(writers, 1) == []
    writers.note("w", one_sided=False)  # a Begin that was under way
    assert not writers.one_sided("w")
    assert await looks(writers, LOOKS) == []


async def test_silence_is_not_death() -> None:
    network = Network(a=Contact.ACCEPTED)
    writers = Writers(network)
    await writers.learn("w", ["a"])
    network.contacts = {"a": Contact.UNKNOWN}
    assert await looks(writers, 10 * LOOKS) == []


async def test_one_answer_between_refusals_starts_the_count_anew() -> None:
    network = Network(a=Contact.ACCEPTED)
    writers = Writers(network)
    await writers.learn("w", ["a"])
    for answer in (Contact.UNKNOWN, Contact.ACCEPTED):
        network.contacts = {"a": Contact.REFUSED}
        assert await looks(writers, LOOKS - 1) == []
        network.contacts = {"a": answer}
        assert await looks(writers, 1) == []


@pytest.mark.parametrize("first", [Contact.REFUSED, Contact.UNKNOWN])
async def test_a_refusal_from_an_address_that_was_never_reached_means_nothing(
    first: Contact,
) -> None:
    """A firewall refuses too."""
    network = Network(a=first)
    writers = Writers(network)
    await writers.learn("w", ["a"])
    network.contacts = {"a": Contact.REFUSED}
    assert await looks(writers, 10 * LOOKS) == []


async def test_a_writer_without_addresses_never_counts_as_dead() -> None:
    writers = Writers(Network())
    await writers.learn("w", [])
    assert await looks(writers, 10 * LOOKS) == []


async def test_a_successor_at_the_same_address_shows_that_its_predecessor_has_gone() -> None:
    network = Network(a=Contact.ACCEPTED)
    writers = Writers(network)
    await writers.learn("w", ["a"])
    await writers.learn("successor", ["a"])
    assert await looks(writers, LOOKS) == ["w"]
    assert await writers.dead(["successor"]) == []


async def test_writers_with_nothing_in_flight_are_forgotten_but_for_the_latest() -> None:
    asked: list[str] = []

    async def network(address: str) -> Contact:
        asked.append(address)
        return Contact.ACCEPTED

    writers = Writers(network)
    for number in range(3 * KEPT):
        name = f"w{number}"
        await writers.learn(name, [name])
        writers.note(name, one_sided=False)
        writers.forget({"w0"})  # that one is writing
    known = [f"w{n}" for n in range(3 * KEPT) if not writers.one_sided(f"w{n}")]
    assert known == ["w0", *(f"w{n}" for n in range(2 * KEPT, 3 * KEPT))]
    assert len(asked) == 3 * KEPT
    await writers.learn("w1", ["w1"])
    assert asked[-1] == "w1"


async def test_a_writer_that_begins_again_is_among_the_latest() -> None:
    writers = Writers(Network(again=Contact.ACCEPTED, other=Contact.ACCEPTED))
    for name in ("again", *(f"w{number}" for number in range(KEPT - 1)), "again", "last"):
        await writers.learn(name, ["again" if name == "again" else "other"])
        writers.note(name, one_sided=False)
        writers.forget(())
    assert not writers.one_sided("again")
    assert writers.one_sided("w0")


async def test_contact_with_real_sockets() -> None:
    server = await asyncio.start_server(lambda _, stream: stream.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await contact(address) is Contact.ACCEPTED
    server.close()
    await server.wait_closed()
    assert await contact(address) is Contact.REFUSED
