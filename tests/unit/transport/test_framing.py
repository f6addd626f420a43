"""What shared memory sends is payload and framing, both counted, and framing is little."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tknp.kernels.mailbox import choose_lanes
from tknp.layout.derive import derive
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import sent_bytes
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.model.config import ModelConfig
from tknp.transport import shared_memory
from tknp.transport.base import Traffic
from tknp.transport.lane import Lane, LaneFactory, PythonLane, Wire
from tknp.transport.ring import framing_bytes

RING_BYTES = 4096  # less than the largest message
SIZES = (1, 63, 64, 65, 1000, 3 * RING_BYTES + 5)


def exchange(rank: Rank, name: str, lanes: LaneFactory) -> tuple[Traffic, int]:
    """Messages, a sum and a broadcast between two ranks; what was counted, and written to rings."""
    wires: list[Wire] = []

    def watched(of: Sequence[Wire], own: mmap.mmap) -> Lane:
        wires.extend(of)
        return lanes(of, own)

    transport = shared_memory.connect(
        rank, 1, 2, pool=name, epoch=1, timeout_s=60.0, streams=1, ring_bytes=RING_BYTES,
        lanes=watched,
    )  # fmt: skip
    peer = Rank(0, 1 - rank.t)
    for size in SIZES:
        out, into = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        empty = torch.zeros(0)
        transport.post([(peer, out), (peer, empty)], [(peer, into), (peer, empty)], stream=0).wait()
        transport.post([(peer, out)], [(peer, into)], stream=0).wait()
        assert torch.equal(into, out)
    transport.all_reduce(torch.ones(17), stream=0).wait()
    transport.broadcast(torch.ones(3), stream=0)
    heads = (wire.memory[wire.offset : wire.offset + 8] for wire in wires if wire.sends)
    written = sum(int.from_bytes(head, "little") for head in heads)
    transport.close()
    return transport.sent_bytes, written


@pytest.mark.parametrize("lanes", [choose_lanes, lambda: PythonLane], ids=["chosen", "python"])
def test_payload_and_framing_are_what_rings_carried(lanes: Callable[[], LaneFactory]) -> None:
    name = secrets.token_hex(8)
    with ThreadPoolExecutor(2) as threads:
        ranks = (Rank(0, 0), Rank(0, 1))
        found = list(threads.map(lambda rank: exchange(rank, name, lanes()), ranks))
    for (sent, written), collective in zip(found, ([68, 12], [68]), strict=True):
        assert sent.node_local == 2 * sum(SIZES)
        assert sent.collective == sum(collective)
        assert sent.framing == sum(map(framing_bytes, [*SIZES, *SIZES, *collective]))
        assert written == sent.node_local + sent.collective + sent.framing


def test_framing_is_below_a_hundredth_from_batches_of_eight_on() -> None:
    """Two nodes of SmolLM2 with four rows each: equation (3), handoffs and ids, plus under 1%."""
    config = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, tied_embeddings=True)
    layout = make_layout(config, "bfloat16", 1, [NodeSpec(memory_bytes=0)] * 2)
    groups = [Group((node,), node, 4) for node in range(2)]
    programs = [derive(layout, 0, groups, rank) for rank in layout.ranks()]
    payload = sum(sent_bytes(program, cross_node=True) for program in programs)
    sent = [t.nbytes for program in programs for op in program for t in op.sends]
    assert sum(sent) == payload
    assert 0 < sum(map(framing_bytes, sent)) < payload / 100
