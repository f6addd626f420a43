"""`tknp demo`: start a pool, send it several prompts at once, show what each node did, stop it.

Exit code 0 only if every request completed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from tknp.cli.demo_view import View, owners_table, results_table, view_for
from tknp.cli.generate import complete, finish_text
from tknp.cli.local_pool import RunningPool, check, client_of, running
from tknp.cli.options import POSITIVE
from tknp.cli.output import NOTHING, err, out, plural, report
from tknp.cli.processes import Interrupted
from tknp.cli.status import title
from tknp.cli.up import local_pool, pool_options
from tknp.client import Client, Completion, request_for
from tknp.errors import TknpError
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import ChatMessage

STATUS_POLL_S = 0.1
PROMPTS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a short poem about a lighthouse in winter.",
    "List three uses of a paper clip other than holding paper.",
    "Explain to a ten-year-old what a neural network is.",
    "Continue this story: The last train had left, and on the platform stood only",
    "Summarize in one sentence: A language model reads a prompt once and then writes its answer "
    "token by token. For each new token it looks back at everything before it, which it keeps as "
    "keys and values in memory. The longer the text, the more memory that takes, and the more of "
    "it has to be read for every token. Spread over several machines, each of them keeps the "
    "memory of its own requests, while all of them share one copy of the weights.",
)


class PeakKv:
    """Follows the coordinator's status and keeps each owner's highest KV load in tokens."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.tokens: dict[int, int] = {}

    async def look(self) -> None:
        for node in (await self._client.status()).nodes:
            self.tokens[node.node] = max(self.tokens.get(node.node, 0), node.kv_tokens)

    async def follow(self) -> None:
        while True:
            with suppress(TknpError):  # a request's own call reports what is wrong
                await self.look()
            await asyncio.sleep(STATUS_POLL_S)


async def _ask(
    client: Client, view: View, index: int, text: str, chat: bool, max_tokens: int
) -> Completion | TknpError:
    prompt = [ChatMessage(role="user", content=text)] if chat else text
    request = request_for(prompt, Sampling(max_tokens=max_tokens))
    try:
        completion = await complete(
            client, request, on_message=lambda response: view.add(index, response.text)
        )
    except TknpError as error:
        view.end(index, str(error), good=False)
        return error
    owners = ", ".join(map(str, completion.finish.owners)) if completion.finish else NOTHING
    tokens = plural(len(completion.token_ids), "token")
    view.end(index, f"{tokens}, {finish_text(completion)}, owner {owners}", good=True)
    return completion


async def _converse(pool: RunningPool, max_tokens: int) -> bool:
    """Send all prompts at once and print the tables; False if any request failed."""
    console = out()
    view = view_for(console, PROMPTS)
    async with client_of(pool.pool) as client:
        chat = (await client.model()).has_chat_template
        peak = PeakKv(client)
        following = asyncio.create_task(peak.follow())
        started_s = time.perf_counter()
        try:
            with view:
                outcomes = await asyncio.gather(
                    *(_ask(client, view, i, text, chat, max_tokens)
                      for i, text in enumerate(PROMPTS))
                )  # fmt: skip
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        elapsed_s = time.perf_counter() - started_s
        status = await client.status()
    completed = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    console.print()
    console.print(results_table(completed, len(PROMPTS), elapsed_s))
    console.print()
    console.print(owners_table(status, completed, peak.tokens))
    console.print()
    for number, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, TknpError):
            report(outcome, f"prompt {number}: ")
    return len(completed) == len(PROMPTS)


async def _demo(
    values: dict[str, Any], ready_timeout_s: float, run_directory: Path | None, max_tokens: int
) -> int:
    """Exit code."""
    pool = local_pool(values).configure()
    check(pool)
    try:
        async with running(pool, err(), ready_timeout_s, run_directory) as pool_up:
            out().print(title(pool_up.status), end="\n\n")
            good = await pool_up.supervisor.guard(_converse(pool_up, max_tokens))
    except Interrupted as stop:
        return stop.exit_code
    return 0 if good else 1


@click.command("demo")
@pool_options(model="smollm2", port=0)
@click.option(
    "--max-tokens",
    type=POSITIVE,
    default=96,
    show_default=True,
    help="Of each answer.",
)
def command(
    ready_timeout_s: float, run_directory: Path | None, max_tokens: int, **values: Any
) -> None:
    """Start a pool, ask it several things at once, stop it.

    Shows the answers as they stream, then speed, latencies and what each node did. Takes the
    options of `tknp up`.
    """
    raise click.exceptions.Exit(
        asyncio.run(_demo(values, ready_timeout_s, run_directory, max_tokens))
    )
