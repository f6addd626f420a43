"""API keys: who is let in, how much each may have in flight, what a file may say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tknp.errors import InvalidValue
from tknp.gateway.keys import Keys, Unauthenticated, read_keys

KEY = "key-0123456789abcdef"


def test_without_keys_everybody_is_let_in() -> None:
    keys = Keys()
    assert keys.tenant(None) is keys.tenant("Bearer whatever")


def test_keys_are_found_by_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"other").hexdigest()
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"keys:\n- {{name: a, key: {KEY}, priority: 3}}\n- {{name: b, sha256: {digest}}}"
    )
    keys = read_keys(str(path))
    assert keys.tenant(f"bearer  {KEY} ").name == "a"
    assert keys.tenant("Bearer other").name == "b"
    for header in (None, "", KEY, "Bearer ", "Bearer x", f"Basic {KEY}"):
        with pytest.raises(Unauthenticated):
            keys.tenant(header)
    assert KEY not in repr(keys.tenants)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: []", "at least one key"),
        ("[]", "at least one key"),
        ("keys: [a]", "expected a mapping"),
        (f"keys: [{{key: {KEY}}}]", "needs a name"),
        ("keys: [{name: a}]", "either key or sha256"),
        (f"keys: [{{name: a, key: {KEY}, sha256: {'0' * 64}}}]", "either key or sha256"),
        ("keys: [{name: a, key: short}]", "at least 16"),
        ("keys: [{name: a, sha256: zz}]", "64 lower-case"),
        (f"keys: [{{name: a, key: {KEY}, max_requests: 0}}]", "at least 1"),
        (f"keys: [{{name: a, key: {KEY}, limit: 1}}]", "known are"),
        (f"keys: [{{name: a, key: {KEY}}}, {{name: b, key: {KEY}}}]", "same digest"),
        (f"keys: [{{name: a, key: {KEY}}}, {{name: a, key: {KEY}x}}]", "same name"),
        ("keys: [", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_without_showing_keys(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=message) as raised:
        read_keys(str(path))
    assert KEY not in str(raised.value)
