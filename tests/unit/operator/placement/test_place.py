"""Tables of clusters, what is chosen on them, why, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tknp.errors import InvalidValue
from tknp_operator.api.service import parse_spec
from tknp_operator.api.spec import Spec
from tknp_operator.placement.hosts import read_hosts
from tknp_operator.placement.layers import layers_of, layout_of
from tknp_operator.placement.place import Placement, Refused, Slot, place

Node = dict[str, Any]
MakeNode = Callable[..., Node]
MakeSpec = Callable[..., Spec]


def placed(spec: Spec, nodes: Sequence[Node], current: Sequence[Slot] = ()) -> Placement:
    found = place(spec, read_hosts(nodes, spec, {}), current)
    assert isinstance(found, Placement), found
    return found


def refused(spec: Spec, nodes: Sequence[Node], current: Sequence[Slot] = ()) -> Refused:
    found = place(spec, read_hosts(nodes, spec, {}), current)
    assert isinstance(found, Refused), found
    return found


def names(placement: Placement) -> list[str]:
    return [f"{slot.host}/{slot.number}" for slot in placement.slots]


def test_one_nvlink_domain_is_taken_where_one_is_enough(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    trays = [make_node(f"{c}{i}", product="NVIDIA-GB200", clique=f"u.{c}") for c, size in
             (("a", 3), ("b", 18), ("c", 5)) for i in range(size)]  # fmt: skip
    found = placed(make_spec(nodes=4, spareNodes=1), trays)
    assert names(found) == ["c0/0", "c1/0", "c2/0", "c3/0"]
    assert found.spares == (Slot("c4"),)
    assert found.warnings == ()
    assert found.nodes[0].reason == "chosen on c0: NVLink domain u.c with 4 of 4 nodes"


def test_a_spare_may_be_elsewhere_but_the_pool_is_not_divided_for_it(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    trays = [make_node(f"{c}{i}", clique=c) for c in "ab" for i in range(4)]
    found = placed(make_spec(nodes=4, spareNodes=1), trays)
    assert names(found) == ["a0/0", "a1/0", "a2/0", "a3/0"]
    assert found.spares == (Slot("b0"),)


def test_else_one_rail_then_one_rack(make_node: MakeNode, make_spec: MakeSpec) -> None:
    topology = {"railLabel": "rail"}
    nodes = [make_node(f"h{i}", clique=f"c{i // 2}", rail=f"r{i // 4}", rack=f"k{i // 8}")
             for i in range(16)]  # fmt: skip
    found = placed(make_spec(nodes=4, topology=topology), nodes)
    assert names(found) == ["h0/0", "h1/0", "h2/0", "h3/0"]
    found = placed(make_spec(nodes=8, topology=topology), nodes[:4] + nodes[8:])
    assert {name[:-2] for name in names(found)} == {f"h{i}" for i in range(8, 16)}


def test_without_labels_any_hosts_do_and_more_domains_are_a_warning(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    bare = placed(make_spec(nodes=2), [make_node("b"), make_node("a")])
    assert names(bare) == ["a/0", "b/0"]
    assert bare.nodes[0].reason == "chosen on a"
    assert not bare.warnings
    two = placed(make_spec(nodes=2), [make_node("b", clique="1"), make_node("a", clique="2")])
    assert "no one NVLink domain, rail or rack holds all 2 nodes" in two.warnings[0]


def test_a_host_of_eight_is_two_nodes_and_whole_hosts_come_first(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    nodes = [make_node("a", gpus=4), make_node("b", gpus=8), make_node("c", gpus=8)]
    found = placed(make_spec(nodes=4), nodes)
    assert names(found) == ["b/0", "b/1", "c/0", "c/1"]
    assert found.nodes[1].reason == "chosen on b (part 1 of 2)"


def test_products_are_mixed_only_where_allowed(make_node: MakeNode, make_spec: MakeSpec) -> None:
    nodes = [make_node("h", gpus=8), make_node("g0", product="NVIDIA-GB200", memory_mib=189_471),
             make_node("g1", product="NVIDIA-GB200", memory_mib=189_471)]  # fmt: skip
    no = refused(make_spec(nodes=4), nodes)
    assert no.missing == "4 slots of 4 GPUs: 2 found; H100 80GB may not be mixed in"
    assert no.remedy == "add hosts, lower decode.nodes to 2, or set decode.allowMixedProducts"
    mixed = placed(make_spec(nodes=4, allowMixedProducts=True), nodes)
    assert names(mixed) == ["g0/0", "g1/0", "h/0", "h/1"]
    assert mixed.memories is not None
    assert mixed.memories[0] > 2 * mixed.memories[2]
    alike = placed(make_spec(nodes=2), nodes)
    assert alike.memories is None


def test_blocks_of_a_mixed_pool_are_cut_for_equal_kv_budgets(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    nodes = [make_node("h", gpus=8), make_node("g", product="NVIDIA-GB200", gpus=8,
                                               memory_mib=189_471)]  # fmt: skip
    plain = make_spec(nodes=4, allowMixedProducts=True)
    model = plain.model.model_copy(update={"shape": "llama-3.1-405b"})
    spec = plain.model_copy(update={"model": model})
    mixed = placed(spec, nodes)
    layout = layout_of(spec, mixed.memories)
    assert layout is not None
    layers = [len(held[0].layers) for held in layout.held]
    assert sum(layers) == 126
    assert min(layers[:2]) > max(layers[2:])  # GB200 before H100, by name
    even = layout_of(spec)
    assert even is not None
    assert layers_of(even, 0).startswith("0-")


def test_the_scarcest_product_that_suffices_is_taken(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    nodes = [make_node(f"h{i}") for i in range(4)] + [
        make_node(f"g{i}", product="NVIDIA-B200") for i in range(2)]  # fmt: skip
    assert names(placed(make_spec(nodes=2), nodes)) == ["g0/0", "g1/0"]
    assert names(placed(make_spec(nodes=3), nodes)) == ["h0/0", "h1/0", "h2/0"]


def test_dual_roots_are_in_different_racks(make_node: MakeNode, make_spec: MakeSpec) -> None:
    nodes = [make_node(f"{r}{i}", rack=r) for r in "abc" for i in range(4)]
    found = placed(make_spec(nodes=6, copies=2), nodes)
    for n in range(3):
        assert found.slots[n].host[0] != found.slots[n + 3].host[0]
    assert "another rack than node 3, the other root of its blocks" in found.nodes[0].reason
    assert not found.warnings


def test_dual_roots_of_one_rack_are_on_two_hosts_and_a_warning(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    nodes = [make_node(f"h{i}", gpus=8, rack="r") for i in range(2)]
    found = placed(make_spec(nodes=4, copies=2), nodes)
    assert names(found) == ["h0/0", "h0/1", "h1/0", "h1/1"]
    assert found.warnings == ("dual roots 0 and 2 share a rack, and 1 other pairs",)
    no = refused(make_spec(nodes=2, copies=2), nodes[:1])
    assert no.missing == "hosts for dual roots: nodes 0 and 1 would both be on h0"
    assert no.remedy == "add a host, or set decode.copies to 1"


def test_only_nodes_that_root_layers_are_pairs(make_node: MakeNode, make_spec: MakeSpec) -> None:
    roles = ["decode-node", "attention-owner", "decode-node", "attention-owner"]
    nodes = [make_node("a", gpus=8), make_node("b", gpus=8)]
    found = placed(make_spec(nodes=4, copies=2, roles=roles), nodes)
    assert found.slots[0].host != found.slots[2].host
    assert len(set(found.slots)) == 4


def test_a_lost_node_is_replaced_by_the_spare_and_nobody_else_moves(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    spec = make_spec(nodes=4, spareNodes=1)
    nodes = [make_node(f"h{i}", clique="c") for i in range(6)]
    before = placed(spec, nodes)
    nodes[1] = make_node("h1", clique="c", ready="False")
    after = placed(spec, nodes, before.slots)
    assert before.spares == (Slot("h4"),)
    assert names(after) == ["h0/0", "h4/0", "h2/0", "h3/0"]
    assert after.spares == (Slot("h5"),)
    assert [node.reason.split()[0] for node in after.nodes] == ["stays", "chosen", "stays", "stays"]
    nodes[1] = make_node("h1", clique="c")  # it is back, but nobody moves for that
    assert placed(spec, nodes, after.slots).slots == after.slots


def test_one_other_node_makes_way_where_both_roots_would_meet(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    spec = make_spec(nodes=4, copies=2)
    current = [Slot("a"), Slot("b"), Slot("c"), Slot("d")]
    nodes = [make_node("a"), make_node("b", gpus=8), make_node("c")]  # d is lost, b/1 is free
    after = placed(spec, nodes, current)
    assert sum(a == b for a, b in zip(after.slots, current, strict=True)) == 2
    assert after.slots[1].host != after.slots[3].host
    assert after.slots[0].host != after.slots[2].host


def test_a_second_copy_parts_nodes_that_shared_a_host(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    nodes = [make_node("a", gpus=8), make_node("b", gpus=8)]
    current = [Slot("a", 0), Slot("a", 1)]
    after = placed(make_spec(nodes=2, copies=2), nodes, current)
    assert names(after) == ["a/0", "b/0"]


def test_a_cordoned_host_is_left_when_there_is_another_place(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    spec, current = make_spec(nodes=2), (Slot("a"), Slot("b"))
    nodes = [make_node("a"), make_node("b", cordoned=True)]
    stays = placed(spec, nodes, current)
    assert stays.slots == current
    assert stays.warnings == ("b, where node 1 is, is cordoned",)
    assert names(placed(spec, [*nodes, make_node("c")], current)) == ["a/0", "c/0"]
    no = refused(spec, [make_node("a", deleting=True), *nodes[1:], make_node("c")], current)
    assert no.missing.startswith("2 slots of 4 GPUs: 1 found; no use, as it is ")


def test_cpu_nodes_share_hosts_evenly(make_node: MakeNode, make_spec: MakeSpec) -> None:
    nodes = [make_node(name, gpus=0) for name in "ab"]
    spec = make_spec(nodes=4, device="cpu")
    assert names(placed(spec, nodes)) == ["a/0", "a/1", "b/0", "b/1"]
    assert names(placed(spec, nodes[:1])) == ["a/0", "a/1", "a/2", "a/3"]
    small = make_spec(nodes=4, device="cpu", resources={"requests": {"cpu": "30"}})
    assert names(placed(small, nodes)) == ["a/0", "a/1", "b/0", "b/1"]
    assert refused(small, nodes[:1]).missing == "4 slots: 2 found"


def test_refusals_count_why_hosts_are_not_usable(make_node: MakeNode, make_spec: MakeSpec) -> None:
    nodes = [make_node("a", cordoned=True), make_node("b", cordoned=True), make_node("c", gpus=2)]
    no = refused(make_spec(nodes=1), nodes)
    assert no.missing == (
        "1 slots of 4 GPUs: 0 found; no use, as it is cordoned (2 hosts), "
        "has fewer than 4 free nvidia.com/gpu (1 host)"
    )
    assert no.remedy == "add or free hosts"
    assert refused(make_spec(nodes=1), []).missing == "1 slots of 4 GPUs: 0 found"


def test_a_layout_that_cannot_be_names_the_field_of_the_spec() -> None:
    model = {"source": {"builtin": "smollm2"}}
    decode = {"nodes": 2, "device": "cpu", "tensorParallel": 2}
    spec = parse_spec({"image": "i", "model": model, "decode": decode})
    with pytest.raises(InvalidValue) as error:
        layout_of(spec)
    assert error.value.field == "spec.decode.tensorParallel"
    unknown = parse_spec({"image": "i", "model": {**model, "shape": "x"}, "decode": decode})
    with pytest.raises(InvalidValue, match="smollm2-135m"):
        layout_of(unknown)
