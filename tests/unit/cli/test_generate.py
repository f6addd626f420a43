from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tknp.cli.main import main


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", *arguments], input=stdin)


def test_one_prompt_streams_its_text_alone(fake_pool: Any) -> None:
    result = run("--target", fake_pool.target, "one two three")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "three two one \n", "")


def test_chat_template_is_used_when_the_model_has_one(fake_pool: Any) -> None:
    run("--target", fake_pool.target, "hello")
    [message] = fake_pool.requests[0].chat.messages
    assert (message.role, message.content) == ("user", "hello")


@pytest.mark.parametrize("has_template", [True, False])
def test_raw_sends_text_as_it_is(fake_pool: Any, has_template: bool) -> None:
    fake_pool.has_chat_template = has_template
    run("--target", fake_pool.target, *(["--raw"] if has_template else []), "hello")
    assert fake_pool.requests[0].text == "hello"


def test_several_prompts_are_printed_in_order(fake_pool: Any) -> None:
    result = run("--target", fake_pool.target, "--token-ids", "5,6", "a b", "c")
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    assert lines == ["[1] a b", "b a", "[2] c", "c", "[3] 5,6", "ids by"]
    ids = {r.token_ids for r in fake_pool.requests if r.WhichOneof("prompt") == "token_ids"}
    assert ids == {b"\5\0\0\0\6\0\0\0"}


def test_json_reports_every_fact(fake_pool: Any) -> None:
    result = run("--target", fake_pool.target, "--json", "--logprobs", "1", "x y z")
    record = json.loads(result.stdout)
    timings = record.pop("timings")
    entry = {"logprob": -0.5, "alternatives": [{"token_id": 7, "logprob": -2.5}]}
    assert record == {
        "request_id": "r-1", "token_ids": [0, 1, 2], "text": "z y x ", "finish_reason": "stop",
        "owners": [1], "prompt_tokens": 5, "completion_tokens": 3,
        "logprobs": [{"token_id": i, **entry} for i in range(3)],
    }  # fmt: skip
    assert 0 < timings["ttft_s"] <= timings["total_s"]
    assert (timings["queue_s"], timings["prefill_s"]) == (0.5, 0.25)


def test_sampling_fields_are_sent_only_when_given(fake_pool: Any) -> None:
    run("--target", fake_pool.target, "a")
    run(
        "--target", fake_pool.target, "--seed", "0", "--top-p", "0.5", "--stop-token-id", "3",
        "--stop-token-id", "4", "--ignore-eos", "--max-tokens", "0", "--temperature", "0.25", "a",
    )  # fmt: skip
    plain, full = (request.sampling for request in fake_pool.requests)
    assert not plain.ListFields()
    assert {field.name: value for field, value in full.ListFields()} == {
        "seed": 0, "top_p": 0.5, "stop_token_ids": [3, 4], "ignore_eos": True, "max_tokens": 0,
        "temperature": 0.25,
    }  # fmt: skip


def test_a_schema_is_sent_and_goes_with_no_other(fake_pool: Any, tmp_path: Path) -> None:
    schema, broken = tmp_path / "schema.json", tmp_path / "broken.json"
    schema.write_text('{ "type": "integer",\n "title": "\u00e9" }\n')
    broken.write_text("{")
    for flags in (("--json-schema", str(schema)), ("--json-object",)):
        assert run("--target", fake_pool.target, *flags, "a").exit_code == 0
    assert [request.sampling.json_schema for request in fake_pool.requests] == [
        '{"type":"integer","title":"\u00e9"}', '{"type":"object"}',
    ]  # fmt: skip
    for refused, message in (
        (["--json-object", "--json-schema", str(schema)], "not both"),
        (["--json-schema", str(schema), "--json-object"], "not both"),
        (["--json-schema", str(broken)], "broken.json' is not JSON"),
        (["--json-schema", str(tmp_path / "absent")], "can't be read: No such file"),
    ):
        result = run("--target", fake_pool.target, *refused, "a")
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
    assert len(fake_pool.requests) == 2


def test_prompt_from_standard_input(fake_pool: Any) -> None:
    result = run("--target", fake_pool.target, "-", stdin="from a pipe\n")
    assert result.stdout == "pipe a from \n"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("refuse", "error: INVALID_ARGUMENT: max_tokens=0: must be at least 1\n"),
        ("drain", "error: UNAVAILABLE: the pool is draining\n"),
        ("cut", "error: the stream ended without a finish reason\n"),
    ],
)
def test_failures_are_one_line_with_the_servers_words(
    fake_pool: Any, prompt: str, message: str
) -> None:
    result = run("--target", fake_pool.target, prompt)
    assert (result.exit_code, result.stderr) == (1, message)


def test_a_failed_prompt_is_named_and_others_go_on(fake_pool: Any) -> None:
    result = run("--target", fake_pool.target, "--json", "a", "refuse", "b")
    assert result.exit_code == 1
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["a ", "b "]
    assert result.stderr.startswith("error: prompt 2: INVALID_ARGUMENT: ")


def test_a_deadline_ends_a_request(fake_pool: Any) -> None:
    result = run("--target", fake_pool.target, "--timeout", "0.2", "hang")
    assert result.exit_code == 1
    assert "DEADLINE_EXCEEDED" in result.stderr
    assert fake_pool.cancelled.wait(timeout=10)


def test_no_server_says_how_to_start_one(free_port: int) -> None:
    result = run("--target", f"127.0.0.1:{free_port}", "a")
    assert result.exit_code == 1
    assert f"no server answers at 127.0.0.1:{free_port}: start one with `tknp up" in result.stderr
    assert result.stderr.count("\n") == 1


def test_target_comes_from_the_environment_unless_a_flag_names_one(
    fake_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TKNP_TARGET", fake_pool.target)
    assert run("a").exit_code == 0
    assert run("--target", "nowhere", "a").stderr.startswith("error: target='nowhere': write HOST")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--logprobs", "1", "a"], ["--max-tokens", "-1", "a"], ["--token-ids", "1,x"],
     ["--token-ids", str(2**32)], ["--seed", str(2**64), "a"], ["--target", "nowhere", "a"]],
)  # fmt: skip
def test_wrong_usage_is_refused_with_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


def test_debug_raises_the_error_itself(fake_pool: Any) -> None:
    arguments = ["--debug", "generate", "--target", fake_pool.target, "refuse"]
    result = CliRunner().invoke(main, arguments)
    assert type(result.exception).__name__ == "RequestFailed"
