"""Options that say how `tknp generate` and `tknp chat` draw tokens: fields of the Sampling message.

`--json-schema FILE` and `--json-object` fill the same field, so only one of them may be given. What
a schema means, and whether it can be kept to, is for the pool to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tknp.cli.options import FILE, UINT32, UINT64, combined

if TYPE_CHECKING:
    from tknp.v1.common_pb2 import Sampling

F = TypeVar("F", bound=Callable[..., Any])
ANY_OBJECT = '{"type":"object"}'
_SCHEMA = "json_schema"


def _file(context: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """The schema in the file at `path`, without the white space that only people need."""
    if path is None:
        return None
    try:
        schema = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise click.BadParameter(f"{path!r} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path!r} is not JSON: {error}") from error
    return _only(context, json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def _object(context: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        context.params[_SCHEMA] = _only(context, ANY_OBJECT)


def _only(context: click.Context, schema: str) -> str:
    if context.params.get(_SCHEMA) is not None:
        raise click.UsageError("give --json-schema or --json-object, not both")
    return schema


SAMPLING = (
    click.option("--max-tokens", type=UINT32, help="Longest answer; unset: up to the context."),
    click.option("--min-tokens", type=UINT32, help="Shortest answer."),
    click.option("--temperature", type=float, help="0, the default, is greedy."),
    click.option("--top-p", type=float, help="Nucleus: smallest set with this probability."),
    click.option("--top-k", type=UINT32, help="Most likely tokens kept; 0: off."),
    click.option("--min-p", type=float, help="Least probability relative to the likeliest."),
    click.option("--seed", type=UINT64, help="Makes sampling repeatable."),
    click.option("--repetition-penalty", type=float, help="Above 1 discourages repetition."),
    click.option("--presence-penalty", type=float, help="Subtracted once a token has occurred."),
    click.option("--frequency-penalty", type=float, help="Subtracted for each occurrence."),
    click.option("--stop-token-id", "stop_token_ids", type=UINT32, multiple=True,
                 help="Ends the answer; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token."),
    click.option("--json-schema", type=FILE, callback=_file, metavar="FILE",
                 help="Hold the answer to JSON that the schema in FILE describes."),
    click.option("--json-object", is_flag=True, expose_value=False, callback=_object,
                 help="Hold the answer to a JSON object of any shape."),
)  # fmt: skip


def sampling_options(function: F) -> F:
    """Fields of the Sampling message, by name."""
    return combined(*SAMPLING)(function)


def sampling_from(values: dict[str, Any]) -> Sampling:
    """A Sampling message of the values given; the server validates them and fills the rest."""
    from tknp.v1.common_pb2 import Sampling

    return Sampling(**{name: value for name, value in values.items() if value is not None})
