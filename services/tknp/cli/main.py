"""The `tknp` command: finds the subcommand's module when it is needed and reports errors.

Exit codes: 0 done, 1 failed, 2 refused before anything ran, 128 + n stopped by signal n.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from tknp import __version__
from tknp.errors import TknpError

# Each name is a module of this package whose `command` is the click command.
COMMANDS = (
    "up", "demo", "generate", "chat", "status", "top", "gateway", "serve", "replay", "explain",
    "trace", "load", "probe", "hydrate",
)  # fmt: skip


class Commands(click.Group):
    """Imports a subcommand when it is looked up; turns TknpError into one line and a code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tknp.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        from tknp.cli.output import exit_code, report

        try:
            return super().invoke(ctx)
        except TknpError as error:
            if ctx.params["debug"]:
                raise
            report(error)
            ctx.exit(exit_code(error))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="tknp")
@click.option(
    "--debug", is_flag=True, envvar="TKNP_DEBUG", show_envvar=True,
    help="Show the traceback of an error.",
)  # fmt: skip
def main(debug: bool) -> None:
    """Serve a language model from a pool of nodes with decode token parallelism.

    \b
    tknp up --model smollm2                 start a pool on this machine
    tknp chat                               talk to it
    tknp demo                               see it work, from start to end

    Settings come from flags, then TKNP_* environment variables, then the pool file.
    """


if __name__ == "__main__":
    main()
