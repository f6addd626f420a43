"""`tknp-load`: finds the subcommand's module when it is needed and turns errors into exit codes.

Exit codes are `errors.Exit`: 0 good, 1 failed, 2 bad input, 3 SLO missed, 4 the client was the
bottleneck, 5 errors above the limit, 130 interrupted.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from tknp_loadgen.errors import LoadError

# Each name is a module of this package whose `command` is the click command.
COMMANDS = ("gen", "run", "sweep", "report", "compare", "merge", "validate", "echo")


class Commands(click.Group):
    """Imports a subcommand when it is looked up; turns LoadError into one line and a code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tknp_loadgen.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LoadError as error:
            click.echo(f"tknp-load: {error}", err=True)
            ctx.exit(int(error.exit))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def main() -> None:
    """Load an LLM server and report what its users would have seen.

    \b
    tknp-load gen --arrivals poisson --request-rate 1 --num-prompts 128 --output t.jsonl
    tknp-load run --trace t.jsonl --target http://127.0.0.1:8000/v1 --model M --output DIR
    tknp-load report DIR

    Works with TKNP's gRPC API and with any OpenAI-compatible HTTP server.
    """


if __name__ == "__main__":
    main()
