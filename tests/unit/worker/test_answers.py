from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from tknp.engine.batch import Delta
from tknp.engine.decode import Outcome
from tknp.errors import ProtocolError
from tknp.kv.holding import Key
from tknp.layout.rank import Rank
from tknp.v1.step_pb2 import StepResult
from tknp.worker.answers import IN_FLIGHT, Answers

KEY = Key("done", 0)


class Node:
    """TP rank 0 of a node with `siblings` other ranks, and what it has said and freed."""

    def __init__(self, siblings: int) -> None:
        self.said: list[StepResult] = []
        self.freed: list[Key] = []
        self.answers = Answers(Rank(0, 0), siblings, self.said.append, self.freed.extend)

    def begin(self, step: int, *, stream: int = 0) -> Future[Outcome]:
        outcome: Future[Outcome] = Future()
        self.answers.begin(Delta(1, stream, step), outcome, [KEY])
        return outcome

    async def finish(self, outcome: Future[Outcome], token: int = 5) -> None:
        outcome.set_result(Outcome(Delta(1, 0, 0), (3,), (token,), (None,), {}, 0.5))
        await asyncio.sleep(0)  # a turn of the loop brings the outcome

    def sibling(self, step: int, error: str = "") -> None:
        self.answers.answered(StepResult(epoch=1, step=step, error=error))


async def test_a_rank_alone_answers_with_what_it_drew() -> None:
    node = Node(siblings=0)
    outcome = node.begin(7)
    assert len(node.answers) == 1
    await node.finish(outcome)
    (said,) = node.said
    assert (said.epoch, said.step, list(said.slots), said.seconds) == (1, 7, [3], 0.5)
    assert ([token.token_id for token in said.tokens], said.error) == ([5], "")
    assert (node.freed, len(node.answers)) == ([KEY], 0)


@pytest.mark.parametrize("sibling_first", [True, False])
async def test_an_answer_and_pages_wait_for_every_rank(sibling_first: bool) -> None:
    node = Node(siblings=2)
    outcome = node.begin(0)
    node.sibling(0)
    if sibling_first:
        node.sibling(0)
        assert not node.said
        await node.finish(outcome)
    else:
        await node.finish(outcome)
        assert (node.said, node.freed) == ([], [])
        node.sibling(0)
    assert [said.step for said in node.said] == [0]
    assert node.freed == [KEY]


async def test_a_failure_here_is_told_at_once_and_frees_nothing() -> None:
    node = Node(siblings=1)
    node.begin(4).set_exception(RuntimeError("out of memory"))
    await asyncio.sleep(0)
    (said,) = node.said
    assert said.error == "rank (0, 0), step 4: out of memory"
    node.sibling(4)  # too late to matter
    assert (len(node.said), node.freed) == (1, [])


async def test_a_failure_elsewhere_is_told_once_the_step_has_ended_here() -> None:
    node = Node(siblings=2)
    outcome = node.begin(0)
    node.sibling(0, "rank 0.1 failed")
    assert not node.said
    await node.finish(outcome)
    assert [said.error for said in node.said] == ["rank 0.1 failed"]
    assert not node.freed


async def test_a_lost_rank_fails_steps_under_way_and_later_ones() -> None:
    node = Node(siblings=1)
    first = node.begin(0)
    node.answers.lost("TP rank 1 of node 0 ended its steps")
    second = node.begin(1)
    await node.finish(first)
    await node.finish(second)
    assert [said.error for said in node.said] == ["TP rank 1 of node 0 ended its steps"] * 2


async def test_streams_answer_for_themselves_and_only_so_many_steps_are_open() -> None:
    node = Node(siblings=0)
    node.begin(0, stream=0)
    await node.finish(node.begin(0, stream=1))
    assert [said.stream for said in node.said] == [1]
    for step in range(1, IN_FLIGHT):
        node.begin(step)
    node.answers.check_room(1)
    with pytest.raises(ProtocolError, match=f"more than {IN_FLIGHT} steps"):
        node.answers.check_room(0)
