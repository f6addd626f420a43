"""A chunk is accepted only while its transfer is open, and only into its own pages."""

from __future__ import annotations

import pytest

from tknp.errors import ProtocolError
from tknp.transfer.windows import WriteWindows
from tknp.v1.common_pb2 import RequestKey

KEY = RequestKey(request_id="a", attempt=1)


def test_open_pages_are_accepted() -> None:
    windows = WriteWindows()
    windows.open(KEY, "w", [3, 4])
    windows.check(KEY, "w", [4])


def test_a_late_chunk_after_the_window_closed_is_refused() -> None:
    windows = WriteWindows()
    windows.open(KEY, "w", [3])
    windows.close(KEY, "w")
    windows.close(KEY, "w")
    with pytest.raises(ProtocolError, match="no open transfer for a/1"):
        windows.check(KEY, "w", [3])
    assert len(windows) == 0


@pytest.mark.parametrize(
    ("key", "writer"), [(RequestKey(request_id="a", attempt=2), "w"), (KEY, "other")]
)
def test_another_attempt_or_writer_is_refused(key: RequestKey, writer: str) -> None:
    windows = WriteWindows()
    windows.open(KEY, "w", [3])
    with pytest.raises(ProtocolError, match="no open transfer"):
        windows.check(key, writer, [3])


def test_a_foreign_page_is_refused() -> None:
    windows = WriteWindows()
    windows.open(KEY, "w", [3])
    with pytest.raises(ProtocolError, match="page 4"):
        windows.check(KEY, "w", [3, 4])


def test_a_page_has_one_window_at_a_time() -> None:
    windows = WriteWindows()
    windows.open(KEY, "w", [3, 4])
    windows.open(KEY, "w", [3, 5])
    with pytest.raises(ProtocolError, match="page 5 is being written by w"):
        windows.open(RequestKey(request_id="b"), "v", [5, 6])
    windows.close(KEY, "w")
    windows.open(RequestKey(request_id="b"), "v", [5, 6])
