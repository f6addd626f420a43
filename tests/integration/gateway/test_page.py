"""The page in Debian's Chromium, by its own debugging protocol over a pair of pipes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tknp.local import InProcessPool

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]  # fmt: skip
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
DESK = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}


class Page:
    """One tab. `failures`: errors that scripts or the network had."""

    def __init__(self, reader: asyncio.StreamReader, write: int) -> None:
        self._reader, self._write = reader, write
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.failures: list[str] = []
        self.requested: list[str] = []
        self._task = asyncio.create_task(self._read())

    async def open(self) -> None:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        answer = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> Any:
        name = next(self._ids)
        message = {"id": name, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._answers[name] = asyncio.get_running_loop().create_future()
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(self._answers[name], 60)

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until `expression` is true; while the page loads it may fail."""
        wrapped = f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"
        async with asyncio.timeout(60):
            while not await self.value(wrapped):  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.02)

    async def key(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **text if kind == "keyDown" else {},
            )  # fmt: skip

    async def picture(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def _read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if "error" in message:
                    answer.set_exception(RuntimeError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            elif message["method"] == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
            elif message["method"] == "Runtime.exceptionThrown" or (
                message["method"] == "Log.entryAdded"
                and message["params"]["entry"]["level"] in ("warning", "error")
            ):
                self.failures.append(json.dumps(message["params"]))

    def close(self) -> None:
        self._task.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    open_speaker: Callable[..., Any], serving: Callable[..., Any]
) -> AsyncIterator[SimpleNamespace]:
    pool = open_speaker()
    async with InProcessPool(pool), serving(pool.config.coordinator) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def page(tmp_path: Path, served: SimpleNamespace) -> AsyncIterator[Page]:
    commands, write = os.pipe()
    read, answers = os.pipe()
    script = f'exec "$@" 3<&{commands} 4>&{answers}'
    nowhere = asyncio.subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(
        "bash", "-c", script, "bash", str(CHROMIUM), "--headless=new", "--no-sandbox",
        "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
        f"--user-data-dir={tmp_path / 'profile'}", "about:blank",
        pass_fds=(commands, answers), stdout=nowhere, stderr=nowhere, start_new_session=True,
    )  # fmt: skip
    os.close(commands)
    os.close(answers)
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
    )
    opened = Page(reader, write)
    try:
        await opened.open()
        yield opened
    finally:
        opened.close()
        os.killpg(browser.pid, signal.SIGKILL)
        await browser.wait()
        os.close(write)


def pictures(tmp_path: Path) -> Path:
    """Where pictures are kept: TKNP_PICTURES, for whoever wants to look."""
    kept = Path(os.environ.get("TKNP_PICTURES", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    return kept


async def test_a_chat_by_keyboard_while_the_pool_moves(
    page: Page, served: SimpleNamespace, words: str, tmp_path: Path
) -> None:
    await page.call("Emulation.setDeviceMetricsOverride", **DESK)
    await page.call("Page.navigate", url=served.url)
    await page.until("document.querySelectorAll('.node').length === 2")
    await page.until("document.activeElement.id === 'say'")
    for layer in (0, 1):
        shown = f"roots layer {layer};"
        await page.until(f"document.querySelector('.pool').innerText.includes('{shown}')")
    await page.until("document.getElementById('model').value === 'speaker'")

    await page.call("Input.insertText", text="hi x")
    await page.key("Enter")
    await page.until("document.querySelectorAll('.turn').length === 2")
    await page.until("document.querySelector('.turn.assistant').textContent.length > 3")
    assert await page.value("document.querySelector('.turn.user').textContent") == "hi x"
    await page.until("document.getElementById('send').textContent === 'Stop'")
    await page.until("Number(document.getElementById('rate').textContent) > 0")
    await page.picture(pictures(tmp_path) / "desk.png")
    await page.key("Escape")
    await page.until("document.getElementById('send').textContent === 'Send'")
    await page.until(
        f"document.querySelector('.turn.assistant').textContent.includes('{words[:3]}')"
    )
    await page.until("document.activeElement.id === 'say'")
    await page.until("Number(document.getElementById('running').textContent) === 0")

    for expected in ("send", "new"):
        await page.key("Tab")
        await page.until(f"document.activeElement.id === '{expected}'")
    await page.key("Enter")
    await page.until("document.querySelectorAll('.turn').length === 0")

    await page.call("Input.insertText", text="again x")  # and a new one while an answer comes
    await page.key("Enter")
    await page.until("document.querySelector('.turn.assistant').textContent.length > 3")
    await page.value("document.getElementById('new').click()")
    await page.until("document.getElementById('send').textContent === 'Send'")
    assert await page.value("messages.length") == 0
    assert await page.value("document.getElementById('notice').textContent") == ""
    assert all(url.startswith((served.url, "data:")) for url in page.requested)
    assert page.failures == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_phone(page: Page, served: SimpleNamespace, tmp_path: Path, scheme: str) -> None:
    await page.call("Emulation.setDeviceMetricsOverride", **PHONE)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    await page.call("Emulation.setEmulatedMedia", features=[feature])
    await page.call("Page.navigate", url=served.url)
    await page.until("document.querySelectorAll('.node').length === 2")
    await page.until("document.getElementById('model').value === 'speaker'")
    await page.until("document.activeElement.id === 'say'")
    await page.call("Input.insertText", text="On a phone")
    await page.value("document.getElementById('send').click()")
    await page.until("(document.querySelector('.turn.assistant')?.textContent ?? '').length > 3")
    await page.picture(pictures(tmp_path) / f"phone-{scheme}.png")
    assert await page.value("document.documentElement.scrollWidth") <= PHONE["width"]
    assert (
        await page.value("document.getElementById('send').getBoundingClientRect().bottom")
        <= (PHONE["height"])
    )
    dark = await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert dark == (scheme == "dark")
    assert page.failures == []


async def test_errors_are_shown(page: Page, served: SimpleNamespace) -> None:
    await page.call("Page.navigate", url=served.url)
    await page.until("document.getElementById('model').options.length === 1")
    await page.until("document.activeElement.id === 'say'")
    await page.value("document.getElementById('model').options[0].value = 'absent'")
    await page.call("Input.insertText", text="hello")
    await page.key("Enter")
    await page.until("document.querySelector('.turn.failed') !== null")
    await page.until("document.getElementById('say').value === 'hello'")
    await page.until(
        "document.querySelector('.turn.failed').textContent.includes('no pool serves it')"
    )


async def test_a_key_is_asked_for(
    page: Page, served: SimpleNamespace, serving: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- {name: a, key: key-0123456789abcdef}\n")
    notice = "document.getElementById('notice').textContent"
    async with serving(*served.gateway.settings.pools, keys_file=str(keys)) as closed:
        await page.call("Page.navigate", url=closed.url)
        await page.until(f"{notice}.startsWith('This gateway asks for a key')")
        for key, shown in (("wrong", "startsWith('The key is not known')"),
                           ("key-0123456789abcdef", "length === 0")):  # fmt: skip
            await page.value(f"key.value = '{key}'; key.dispatchEvent(new Event('change'))")
            await page.until(f"{notice}.{shown}")
        await page.until("document.getElementById('model').value === 'speaker'")
        await page.until("document.querySelectorAll('.node').length === 2")
    await page.until(f"{notice} === 'The gateway does not answer.'")
