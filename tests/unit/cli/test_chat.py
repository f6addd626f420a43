from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from tknp.cli.main import main


def chat(target: str, stdin: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["chat", "--target", target, *arguments], input=stdin)


def history(request: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def test_each_line_is_a_message_and_history_grows(fake_pool: Any) -> None:
    result = chat(fake_pool.target, "one two\n\nthree\n", "--system", "be brief")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "two one \nthree \n"
    assert result.stderr.count("first after") == 2
    assert history(fake_pool.requests[1]) == [
        ("system", "be brief"), ("user", "one two"), ("assistant", "two one "), ("user", "three"),
    ]  # fmt: skip


def test_reset_forgets_all_but_the_system_message(fake_pool: Any) -> None:
    chat(fake_pool.target, "one\n/reset\ntwo\n", "--system", "be brief")
    assert history(fake_pool.requests[1]) == [("system", "be brief"), ("user", "two")]


def test_quit_leaves_and_commands_are_not_sent(fake_pool: Any) -> None:
    result = chat(fake_pool.target, "/help\n/nonsense\n/quit\nunheard\n")
    assert result.exit_code == 0
    assert fake_pool.requests == []
    assert "/reset forgets" in result.stderr
    assert "unknown command /nonsense" in result.stderr


def test_a_failed_turn_is_reported_and_forgotten(fake_pool: Any) -> None:
    result = chat(fake_pool.target, "refuse\nfine\n")
    assert result.exit_code == 1
    assert result.stdout == "fine \n"
    assert "error: INVALID_ARGUMENT: max_tokens=0" in result.stderr
    assert history(fake_pool.requests[1]) == [("user", "fine")]


def test_what_had_arrived_of_a_lost_answer_stays(fake_pool: Any) -> None:
    chat(fake_pool.target, "cut\nfine\n")
    assert history(fake_pool.requests[1]) == [
        ("user", "cut"), ("assistant", "cut "), ("user", "fine"),
    ]  # fmt: skip


def test_a_model_without_template_is_refused(fake_pool: Any) -> None:
    fake_pool.has_chat_template = False
    result = chat(fake_pool.target, "hello\n")
    assert result.exit_code == 1
    assert result.stderr == "error: tiny has no chat template; use `tknp generate --raw`\n"
