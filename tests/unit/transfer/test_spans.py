from __future__ import annotations

import pytest

from tknp.transfer.spans import spans

SIZE = 4


@pytest.mark.parametrize("first_slot", range(SIZE))
@pytest.mark.parametrize("slots", range(1, SIZE + 1))
@pytest.mark.parametrize("pages", range(1, 5))
def test_every_slot_between_is_in_one_span(pages: int, first_slot: int, slots: int) -> None:
    if pages == 1 and first_slot >= slots:
        return
    found = [
        page * SIZE + slot
        for span in spans(pages, first_slot, slots, SIZE)
        for page in range(span.start, span.stop)
        for slot in range(span.first_slot, span.last_slot)
    ]
    assert found == list(range(first_slot, (pages - 1) * SIZE + slots))
    assert sum(span.tokens for span in spans(pages, first_slot, slots, SIZE)) == len(found)
