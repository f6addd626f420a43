from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.sampling.history import History, RowState
from tknp.sampling.params import SamplingParams

ids = st.lists(st.integers(0, 49), max_size=120)


@settings(deadline=None)
@given(ids, ids, ids)
def test_equals_counting_the_whole_list(
    prompt: list[int], output: list[int], later: list[int]
) -> None:
    history = History(50, prompt, output)
    for token in later:
        history.append(token)
    assert sorted(history.seen.tolist()) == sorted({*prompt, *output, *later})
    counts = dict(zip(history.output_ids.tolist(), history.output_counts.tolist(), strict=True))
    assert counts == Counter(output + later)


@pytest.mark.parametrize("token", [-1, 50])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(InvalidValue, match=rf"prompt={token}: must be a token id, 0 to 49"):
        History(50, [1, token])
    with pytest.raises(InvalidValue, match=rf"token={token}: must be a token id, 0 to 49"):
        History(50, [1]).append(token)


def test_a_replayed_state_equals_one_that_advanced() -> None:
    params = SamplingParams(frequency_penalty=1.0, min_tokens=3)
    advanced = RowState.at(params, 50, [4, 5])
    assert advanced.position == 2
    for token in (7, 4, 7):
        assert advanced.below_min_tokens
        advanced.advance(token)
    replayed = RowState.at(params, 50, [4, 5], [7, 4, 7])
    assert not advanced.below_min_tokens
    assert (advanced.position, advanced.generated) == (5, 3)
    assert (replayed.position, replayed.generated) == (5, 3)
    assert advanced.history is not None
    assert replayed.history is not None
    for name in ("seen", "output_ids", "output_counts"):
        assert getattr(advanced.history, name).tolist() == getattr(replayed.history, name).tolist()


def test_history_is_kept_only_where_it_is_needed() -> None:
    assert RowState.at(SamplingParams(temperature=1.0), 50, [1]).history is None
    with pytest.raises(InvalidValue, match="history=None: must be given when a penalty is on"):
        RowState(SamplingParams(presence_penalty=1.0), position=1)
