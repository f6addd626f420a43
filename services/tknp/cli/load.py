"""`tknp load`: the load generator's own command, `tknp-load`, under this one's roof."""

from __future__ import annotations

import importlib

import click

from tknp.errors import Unavailable


@click.command(
    "load",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Load a server and report what its users would have seen (tknp-load)."""
    try:
        module = importlib.import_module("tknp_loadgen.cli.main")
        module.main(list(arguments), prog_name=context.command_path)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error.name} is not installed: pip install 'tknp[loadgen]'") from error
