"""`tknp chat`: a conversation with a pool.

    read a line -> history -> Generate -> stream the answer -> history

Ctrl-C stops the answer, which cancels the call; what had arrived stays in the history. Without a
terminal each line of standard input is a message and standard output carries answers only.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import Any

import click
from rich.text import Text

from tknp.cli.generate import complete, write_message
from tknp.cli.options import client_for, target_options
from tknp.cli.output import err, plural, report, seconds_text
from tknp.cli.sampling import sampling_from, sampling_options
from tknp.client import Client, Completion, request_for
from tknp.errors import TknpError
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import ChatMessage, GetModelResponse

DEFAULTS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512}
HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"
# Readline counts what is between \001 and \002 as zero columns wide.
PROMPT = "\001\033[1;36m\002>\001\033[0m\002 "


def speed_text(completion: Completion) -> str:
    """Tokens, speed between tokens and TTFT of an answer."""
    parts = [plural(len(completion.token_ids), "token")]
    if completion.itl_s:
        parts.append(f"{1 / completion.itl_s:.1f} tokens/s")
    if completion.ttft_s is not None:
        parts.append(f"first after {seconds_text(completion.ttft_s)}")
    return " · ".join(parts)


class Conversation:
    """The history, and one turn at a time on one event loop."""

    def __init__(
        self, runner: asyncio.Runner, client: Client, sampling: Sampling, system: str | None
    ) -> None:
        self._runner = runner
        self._client = client
        self._sampling = sampling
        self._system = [ChatMessage(role="system", content=system)] if system else []
        self.answer = Completion(0.0)
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._system)

    def say(self, text: str) -> Completion:
        """Stream the answer to `text`; raises TknpError, or KeyboardInterrupt once cancelled.

        A turn without any answer leaves the history as it was.
        """
        before = list(self.messages)
        self.messages.append(ChatMessage(role="user", content=text))
        self.answer = completion = Completion(time.perf_counter())
        request = request_for(self.messages, self._sampling)
        try:
            self._runner.run(
                complete(self._client, request, completion=completion,
                         on_message=write_message)
            )  # fmt: skip
        finally:
            if completion.text:
                answer = ChatMessage(role="assistant", content=completion.text)
                self.messages.append(answer)
            else:
                self.messages = before
        return completion


def _read(interactive: bool) -> str | None:
    """The next message; None at the end of input."""
    if not interactive:
        return sys.stdin.readline() or None
    try:
        return input(PROMPT)
    except EOFError:
        click.echo()
        return None


def _turn(conversation: Conversation, text: str) -> bool:
    """Answer `text`; False when that failed."""
    note: Text | None = None
    failure: TknpError | None = None
    try:
        note = Text(speed_text(conversation.say(text)), style="dim")
    except KeyboardInterrupt:
        note = Text("stopped", style="dim")
    except TknpError as error:
        failure = error
    if conversation.answer.text or failure is None:
        click.echo()
    if failure is not None:
        report(failure)
    else:
        err().print(note)
    if sys.stdin.isatty():
        err().print()
    return failure is None


def _greet(model: GetModelResponse) -> None:
    line = Text("● ", style="green").append(model.name, style="bold")
    line.append(f"  contexts up to {plural(model.max_model_len, 'token')}", style="dim")
    err().print(line)
    err().print(Text(HELP, style="dim"), end="\n\n")


def _loop(conversation: Conversation, interactive: bool) -> bool:
    """Read and answer until the end of input; False when a turn failed."""
    good = True
    while True:
        try:
            line = _read(interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            click.echo()
            continue
        if line is None or line.strip() in ("/quit", "/exit"):
            return good
        text = line.strip()
        if text == "/reset":
            conversation.reset()
            err().print("[dim]the conversation is forgotten[/]")
        elif text == "/help":
            err().print(Text(HELP, style="dim"))
        elif text.startswith("/"):
            err().print(Text(f"unknown command {text}; {HELP}", style="dim"))
        elif text:
            good = _turn(conversation, text) and good


@click.command("chat", context_settings={"default_map": DEFAULTS})
@target_options
@click.option("--system", help="System message that opens the conversation.")
@sampling_options
def command(
    target: str, tls_ca: str | None, token_file: str | None, system: str | None, **sampling: Any
) -> None:
    """Talk to the model; the whole conversation is sent each time.

    Answers are drawn at temperature 0.7 with top-p 0.9, up to 512 tokens, unless told otherwise.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and history)
    with asyncio.Runner() as runner:
        client = runner.run(_open(target, tls_ca, token_file))
        try:
            model = runner.run(client.model())
            if not model.has_chat_template:
                raise TknpError(f"{model.name} has no chat template; use `tknp generate --raw`")
            if interactive:
                _greet(model)
            conversation = Conversation(runner, client, sampling_from(sampling), system)
            good = _loop(conversation, interactive)
        finally:
            runner.run(client.close())
    raise click.exceptions.Exit(0 if good or interactive else 1)


async def _open(*server: Any) -> Client:
    return client_for(*server)
