"""Any cluster, any loss: what must hold of every placement."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tknp_operator.api.service import parse_spec
from tknp_operator.api.spec import Spec
from tknp_operator.placement.hosts import Host
from tknp_operator.placement.place import Placement, Slot, place

labels = st.sampled_from(["", "1", "2", "3"])


@st.composite
def clusters(draw: st.DrawFn) -> list[Host]:
    size = draw(st.integers(1, 10))
    return [
        Host(f"h{i}", product=draw(st.sampled_from(["H100", "GB200"])),
             slots=draw(st.integers(1, 3)), domain=draw(labels), rack=draw(labels),
             rail=draw(labels))
        for i in range(size)
    ]  # fmt: skip


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    copies = draw(st.sampled_from([1, 2]))
    nodes = draw(st.integers(1, 4)) * copies
    decode = {"nodes": nodes, "copies": copies, "spareNodes": draw(st.integers(0, 2)),
              "tensorParallel": 4, "allowMixedProducts": draw(st.booleans())}  # fmt: skip
    model = {"source": {"hostPath": {"path": "/m"}}}
    return parse_spec({"image": "i", "model": model, "decode": decode})


def without(hosts: Sequence[Host], lost: set[str]) -> list[Host]:
    return [replace(host, unusable="is not Ready") if host.name in lost else host for host in hosts]


def check(spec: Spec, hosts: Sequence[Host], found: Placement) -> None:
    by_name = {host.name: host for host in hosts}
    assert len(found.nodes) == spec.decode.nodes
    assert [node.index for node in found.nodes] == list(range(spec.decode.nodes))
    used = [*found.slots, *found.spares]
    assert len(set(used)) == len(used), "no slot twice"
    for name, count in Counter(slot.host for slot in used).items():
        assert count <= by_name[name].slots
        assert not by_name[name].unusable
    assert all(0 <= slot.number < by_name[slot.host].slots for slot in used)
    if not spec.decode.allow_mixed_products:
        assert len({by_name[slot.host].product for slot in used}) == 1
    half = spec.decode.nodes // 2
    if spec.decode.copies == 2:  # the loss of any host leaves each block a root
        for n in range(half):
            assert found.slots[n].host != found.slots[n + half].host
    assert all(node.reason for node in found.nodes)


def solvable(spec: Spec, hosts: Sequence[Host]) -> bool:
    """Whether enough slots are there, counted in another way: at most half of them on one host."""
    half = spec.decode.nodes // 2 if spec.decode.copies == 2 else spec.decode.nodes
    room = Counter[str]()
    for host in hosts:
        if not host.unusable:
            key = "any" if spec.decode.allow_mixed_products else host.product
            room[key] += min(host.slots, half)
    return max(room.values(), default=0) >= spec.decode.nodes


@settings(max_examples=150, deadline=None)
@given(specs(), clusters())
def test_a_pool_is_placed_where_it_can_be_and_only_there(spec: Spec, hosts: list[Host]) -> None:
    found = place(spec, hosts)
    assert isinstance(found, Placement) == solvable(spec, hosts)
    if isinstance(found, Placement):
        check(spec, hosts, found)
    else:
        assert found.missing
        assert found.remedy


@settings(max_examples=100, deadline=None)
@given(specs(), clusters(), st.randoms(use_true_random=False))
def test_it_depends_on_no_order_and_is_idempotent(
    spec: Spec, hosts: list[Host], chance: random.Random
) -> None:
    found = place(spec, hosts)
    mixed = list(hosts)
    chance.shuffle(mixed)
    assert place(spec, mixed) == found
    if isinstance(found, Placement):
        again = place(spec, mixed, found.slots)
        assert isinstance(again, Placement)
        assert again.slots == found.slots
        assert again.spares == found.spares


@settings(max_examples=200, deadline=None)
@given(specs(), clusters(), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_losses_move_as_few_as_possible(spec: Spec, hosts: list[Host], losses: list[int]) -> None:
    now = place(spec, hosts)
    lost: set[str] = set()
    for loss in losses:  # one after another, as they happen
        if not isinstance(now, Placement):
            return
        lost.add(f"h{loss}")
        left = without(hosts, lost)
        after = place(spec, left, now.slots)
        assert isinstance(after, Placement) == solvable(spec, left)
        if isinstance(after, Placement):
            check(spec, left, after)
            moved = {n for n in range(spec.decode.nodes) if now.slots[n] != after.slots[n]}
            gone = {n for n, slot in enumerate(now.slots) if slot.host in lost}
            assert gone <= moved
            products = {h.name: h.product for h in hosts}
            if {products[s.host] for s in now.slots} >= {products[s.host] for s in after.slots}:
                extra = moved - gone
                assert not extra or (spec.decode.copies == 2 and len(extra) <= len(gone))
        now = after


@settings(max_examples=100, deadline=None)
@given(specs(), clusters(), st.sampled_from(["yes", "until replaced"]), st.integers(0, 9))
def test_what_may_stay_stays_or_has_a_better_place(
    spec: Spec, hosts: list[Host], stays: str, which: int
) -> None:
    now = place(spec, hosts)
    if not isinstance(now, Placement):
        return
    doubtful = [
        replace(host, unusable="is cordoned", stays=stays) if host.name == f"h{which}" else host
        for host in hosts
    ]
    after = place(spec, doubtful, now.slots)
    assert isinstance(after, Placement)
    if stays == "yes":
        assert after.slots == now.slots
    elif after.slots != now.slots:
        assert all(slot.host != f"h{which}" for slot in after.slots)
    assert all(slot.host != f"h{which}" for slot in after.spares)


def test_garbage_of_an_older_epoch_is_no_place() -> None:
    spec = parse_spec({
        "image": "i", "model": {"source": {"hostPath": {"path": "/m"}}}, "decode": {"nodes": 2},
    })  # fmt: skip
    hosts = [Host("a", slots=1), Host("b", slots=1)]
    found = place(spec, hosts, [Slot("a", 0), Slot("a", 0), Slot("z", 7)])
    assert isinstance(found, Placement)
    assert found.slots == (Slot("a"), Slot("b"))
