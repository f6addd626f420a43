"""What `tknp up` makes of its flags, and what it refuses, before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tknp.cli.local_pool import LocalPool, check
from tknp.cli.main import main
from tknp.cli.up import command, local_pool
from tknp.config import PoolConfig
from tknp.layout.layout import Layout
from tknp.layout.strategy import Strategy
from tknp.pool import open_pool

NODES_AND_TP = ["--nodes", "2", "--tp", "2"]
SETTINGS = {field.name for cls in (LocalPool, PoolConfig) for field in fields(cls)}


@pytest.fixture
def layout_of(random_checkpoint: Callable[..., Path]) -> Callable[[str], Layout]:
    model = str(random_checkpoint(layers=4, q_heads=8, kv_heads=2))

    def make(flags: str) -> Layout:
        argv = ["--model", model, "--port", "0", *NODES_AND_TP, *flags.split()]
        given = command.make_context("up", argv).params
        pool = local_pool({k: v for k, v in given.items() if k in SETTINGS}).configure()
        check(pool)
        return open_pool(pool).layout

    return make


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"nodes": 2, "tp": 2, "streams": 1, "width": 2, "interleave": 16}),
        ("--copies 2", {"streams": 2, "held": 2}),
        ("--microbatches 2", {"streams": 2, "held": 1}),
        ("--width 1 --interleave 8", {"width": 1, "interleave": 8}),
        ("--roles decode-root,attention-owner", {"kv_nodes": (1,), "width": 1}),
        ("--strategy dp", {"streams": 2}),
        ("--strategy tp", {"nodes": 1, "tp": 4, "domain_ranks": 2}),
        ("--strategy pp", {"streams": 2, "divides": "layers"}),
        ("--strategy pp --microbatches 1", {"streams": 1, "divides": "layers"}),
        ("--strategy dcp", {"width": 2, "inside": False}),
        ("--strategy dcp --kvp 2 --inside", {"width": 2, "inside": True}),
        ("--strategy helix", {"nodes": 2, "tp": 2, "overlap": 1}),
        ("--strategy helix --kvp 4 --overlap", {"nodes": 4, "tp": 1, "overlap": 4}),
        ("--strategy helix --kvp 4 --no-overlap", {"overlap": 1}),
    ],
)
def test_flags_make_the_layout(
    flags: str, expected: dict[str, Any], layout_of: Callable[[str], Layout]
) -> None:
    layout = layout_of(flags)
    words = flags.split()
    named = words[words.index("--strategy") + 1] if "--strategy" in words else "tknp"
    assert layout.strategy is Strategy(named)
    found = {name: getattr(layout, name) for name in expected if name != "held"}
    if "held" in expected:
        found["held"] = max(map(len, layout.held))
    assert found == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--strategy ring", "'ring' is not one of 'tknp', 'dp', 'tp', 'pp', 'dcp', 'helix'"),
        ("--nodes 3 --copies 2", "use 2 or 4 of them, or 1 copy"),
        ("--copies 3", "3 is not in the range 1<=x<=2"),
        ("--nodes 4 --microbatches 3", "must divide 4 root nodes; nearest is 2"),
        ("--width 3", "1 to 2 owners here, one a node; nearest is 2"),
        ("--tp 2", "tp=2: must divide 9 query heads"),
        ("--strategy tp --nodes 2", "tp runs over all 2 ranks"),
        ("--strategy pp --nodes 31", "1 to 30 root nodes"),
        ("--strategy dcp --tp 3 --kvp 4", "kvp=4: dcp cuts 6 ranks"),
        ("--strategy helix --tp 3 --kvp 3", "nearest is 2"),
        ("--strategy dp --overlap", "dp has no overlap: leave it out, or use helix"),
        ("--roles decode-root", "roles='decode-root': give one for each of 2 nodes"),
        ("--roles decode-root,decode-root", "at least one node must own requests"),
        ("--roles root,owner", "'root': name one of decode-node, decode-root, attention-owner"),
        ("--strategy pp --roles decode-root,attention-owner", "pp has no roles: leave it out"),
        ("--roles decode-root,attention-owner --copies 2", "1 root nodes, an odd number"),
    ],
)
def test_what_can_not_be_is_refused_with_the_nearest_choice(flags: str, words: str) -> None:
    result = CliRunner().invoke(main, ["up", "--model", "smollm2", "--port", "0", *flags.split()])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
