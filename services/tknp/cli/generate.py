"""`tknp generate`: prompts in, text or JSON out.

One prompt streams to standard output as it is sampled. Several run concurrently and are printed in
the order given. A prompt that fails is named on standard error; the others go on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
from rich.text import Text

from tknp.cli.options import UINT32, TokenIds, client_for, target_options
from tknp.cli.output import exit_code, out, printable, report
from tknp.cli.sampling import sampling_from, sampling_options
from tknp.client import GENERATE_TIMEOUT_S, Client, Completion, Prompt, request_for
from tknp.errors import TknpError
from tknp.v1.common_pb2 import FinishReason, Sampling
from tknp.v1.inference_pb2 import ChatMessage, GenerateRequest, GenerateResponse

TITLE_WIDTH = 60


def finish_text(completion: Completion) -> str:
    """stop or length."""
    if completion.finish is None:
        return ""
    name = FinishReason.Name(completion.finish.reason)
    return name.removeprefix("FINISH_REASON_").lower()


def record(completion: Completion, *, logprobs: bool = False) -> dict[str, Any]:
    """A finished completion for JSON. `ttft_s`, `total_s` are this client's measurement."""
    finish = completion.finish
    result: dict[str, Any] = {
        "request_id": completion.request_id,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": finish_text(completion),
        "owners": list(finish.owners) if finish else [],
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": finish.completion_tokens if finish else len(completion.token_ids),
        "timings": {
            "ttft_s": completion.ttft_s,
            "total_s": completion.total_s,
            "queue_s": finish.timings.queue_s if finish else None,
            "prefill_s": finish.timings.prefill_s if finish else None,
        },
    }
    if logprobs:
        result["logprobs"] = [
            {
                "token_id": token_id,
                "logprob": entry.chosen,
                "alternatives": [
                    {"token_id": other.token_id, "logprob": other.logprob}
                    for other in entry.alternatives
                ],
            }
            for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return result


async def complete(
    client: Client, request: GenerateRequest, timeout_s: float = GENERATE_TIMEOUT_S,
    on_message: Callable[[GenerateResponse], None] | None = None,
    completion: Completion | None = None,
) -> Completion:  # fmt: skip
    """Run one request to its end; `completion`, if given, is filled as messages arrive."""
    result = completion or Completion(time.perf_counter())
    async for response in client.generate(request, timeout_s):
        result.add(response, time.perf_counter())
        if on_message:
            on_message(response)
    return result


def write(text: str) -> None:
    """Model text to standard output, at once; harmless to a terminal."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


def write_message(response: GenerateResponse) -> None:
    write(response.text)


def heading(number: int, prompt: Prompt) -> Text:
    text = prompt if isinstance(prompt, str) else ",".join(str(item) for item in prompt)
    line = " ".join(text.split())
    shown = line if len(line) <= TITLE_WIDTH else line[: TITLE_WIDTH - 3] + "..."
    return Text(f"[{number}] ", style="cyan").append(shown, style="dim")


async def _requests(
    client: Client, prompts: Sequence[Prompt], chat: bool | None, sampling: Sampling
) -> list[GenerateRequest]:
    texts = any(isinstance(prompt, str) for prompt in prompts)
    if chat is None and texts:
        chat = (await client.model()).has_chat_template
    return [
        request_for([ChatMessage(role="user", content=p)] if chat and isinstance(p, str) else p,
                    sampling)
        for p in prompts
    ]  # fmt: skip


async def _generate(
    connect: Callable[[], Client], prompts: Sequence[Prompt], chat: bool | None, sampling: Sampling,
    as_json: bool, timeout_s: float,
) -> int:  # fmt: skip
    """Exit code: that of the first prompt that failed, or 0."""
    async with connect() as client:
        requests = await _requests(client, prompts, chat, sampling)
        stream = len(prompts) == 1 and not as_json
        show = write_message if stream else None
        tasks = [asyncio.create_task(complete(client, r, timeout_s, show)) for r in requests]
        code = 0
        for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True), 1):
            try:
                completion = await task
            except TknpError as error:
                if stream:
                    raise
                report(error, f"prompt {number}: ")
                code = code or exit_code(error)
                continue
            if as_json:
                wanted = sampling.HasField("logprobs")
                click.echo(json.dumps(record(completion, logprobs=wanted)))
            elif stream:
                click.echo()
            else:
                out().print(heading(number, prompt), soft_wrap=True)
                write(completion.text.strip("\n") + "\n\n")
        return code


@click.command("generate")
@target_options
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@click.option("--token-ids", type=TokenIds(), multiple=True, metavar="1,2,3",
              help="A prompt as token ids; may be given several times.")  # fmt: skip
@click.option("--chat/--raw", default=None,
              help="Through the model's chat template, or as it is. Default: chat, if it has one.",
              )  # fmt: skip
@sampling_options
@click.option("--logprobs", type=UINT32, help="Alternatives reported with each token (--json).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt, one a line.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True),
              default=GENERATE_TIMEOUT_S, show_default=True, metavar="SECONDS")  # fmt: skip
def command(
    target: str, tls_ca: str | None, token_file: str | None, prompts: tuple[str, ...],
    token_ids: tuple[tuple[int, ...], ...], chat: bool | None, as_json: bool, timeout_s: float,
    **sampling: Any,
) -> None:  # fmt: skip
    """Complete prompts; - reads one from standard input."""
    if sampling["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    read = [sys.stdin.read().rstrip("\n") if p == "-" else p for p in prompts]
    everything: list[Prompt] = [*read, *token_ids]
    if not everything:
        raise click.UsageError("give a PROMPT, - or --token-ids")
    message = sampling_from(sampling)
    connect = partial(client_for, target, tls_ca, token_file)
    code = asyncio.run(_generate(connect, everything, chat, message, as_json, timeout_s))
    raise click.exceptions.Exit(code)
