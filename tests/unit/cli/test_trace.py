from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from tknp.cli.main import main
from tknp.cli.trace import middle_step, spans_of
from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.planner.spans import Span
from tknp.v1.tracing_pb2 import TraceResponse


def test_a_column_table_becomes_spans_on_a_common_clock() -> None:
    answer = TraceResponse(
        node=1, tp_rank=2, origin_unix_s=105.0, kinds=["attend", "sample"], kind=[1, 0],
        layer=[-1, 7], stream=[0, 3], step=[9, 9], start_s=[0.5, 1.0], seconds=[2.0, 4.0],
        waited_s=[1.0, 0.0],
    )  # fmt: skip
    assert spans_of(answer, 100.0) == [
        Span(Rank(1, 2), 0, 9, Kind.SAMPLE, -1, 5.5, 2.0, 1.0),
        Span(Rank(1, 2), 3, 9, Kind.ATTEND, 7, 6.0, 4.0, 0.0),
    ]


def _embed(step: int, start: float, stream: int = 0) -> Span:
    return Span(Rank(0, 0), stream, step, Kind.EMBED, -1, start, 0.1, 0.0)


def test_the_middle_step_lies_between_two_embeddings() -> None:
    spans = [_embed(4, 0.0), _embed(5, 1.0), _embed(6, 2.5), _embed(7, 3.0), _embed(1, 9.0, 1)]
    assert middle_step(spans) == (1.0, 2.5)
    assert middle_step(spans[:1]) == (0.0, 0.1)


def test_it_needs_somewhere_to_write(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["trace", "--pool", str(tmp_path / "pool.yaml")])
    assert result.exit_code == 2
    assert "--output or --timeline" in result.stderr
