"""Other engines on the same checkpoint, in bfloat16, on as many threads.

Each is used if it is there and left out if not:

    llama.cpp        `llama-batched-bench` and `llama-quantize` in $LLAMA_CPP_BIN, else on PATH
    OpenVINO GenAI   `openvino_genai` in the Python that --peers-python names; needs llama-quantize
    transformers     in the Python that --peers-python names, else in this one

llama.cpp reads a GGUF in BF16 and OpenVINO one in F16, made once by `llama-quantize` from the
package's file; both compute in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.report import note
from tknp.model.checkpoint import open_checkpoint

_ANSWER = "peer: "
_MODELS = Path(__file__).parents[2] / "build/bench/models"
_BENCH, _QUANTIZE = "llama-batched-bench", "llama-quantize"


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a batch: of its prompts, and decoded once all have a first token."""

    prefill: float
    decode: float


class Peer(Protocol):
    """An engine that runs `batch` prompts of `context` tokens and `tokens` more of each."""

    name: str

    def measure(self, context: int, batch: int, tokens: int) -> Speed: ...


class Absent(Exception):
    """A peer that isn't there, or doesn't run; says why."""


def speed_of(peer: Peer, context: int, batch: int, tokens: int) -> Speed | None:
    """What `peer` measures; None, with a note, if it fails at that."""
    try:
        return peer.measure(context, batch, tokens)
    except (Absent, OSError, subprocess.CalledProcessError) as error:
        note(f"  {peer.name} failed with {batch} x {context} tokens: {error}")
        return None


class LlamaCpp:
    """One run of `llama-batched-bench` a measurement."""

    def __init__(self, programs: Path, model: Path, threads: int) -> None:
        self._command = [
            str(programs / _BENCH), "-m", str(model), "--output-format", "jsonl",
            "-t", str(threads), "-tb", str(threads), "-b", "2048", "-ub", "512",
        ]  # fmt: skip
        self._environment = _libraries(programs)
        self.name = f"llama.cpp {_llama_version(programs)}"

    def measure(self, context: int, batch: int, tokens: int) -> Speed:
        cells = batch * (context + tokens)
        shape = ["-npp", str(context), "-ntg", str(tokens), "-npl", str(batch), "-c", str(cells)]
        done = subprocess.run(
            self._command + shape, env=self._environment, capture_output=True, text=True, check=True
        )
        result = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))
        return Speed(result["speed_pp"], result["speed_tg"])


class Scripted:
    """A Python peer: a process that has loaded the model and answers one measurement a line."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        command = [python, str(Path(__file__).with_name(script)), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            self.name = str(self._answer()["name"])
        except Absent:
            self.close()
            raise

    def measure(self, context: int, batch: int, tokens: int) -> Speed:
        print(context, batch, tokens, file=self._process.stdin, flush=True)
        answer = self._answer()
        return Speed(float(answer["prefill"]), float(answer["decode"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if line.startswith(_ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
                return answer
        words = self._process.stderr.read().split("\n") if self._process.stderr else []
        raise Absent(next((line for line in reversed(words) if line.strip()), "it ended"))


@contextmanager
def peers(options: argparse.Namespace) -> Iterator[list[Peer]]:
    """Those that --peers names and that are there; notes the others."""
    python, threads = options.peers_python or sys.executable, options.threads
    found: list[Peer] = []
    with ExitStack() as stack:
        for name in options.peers:
            try:
                peer: LlamaCpp | Scripted
                if name == "llama.cpp":
                    programs = _programs()
                    peer = LlamaCpp(programs, _converted(programs, "BF16"), threads)
                elif name == "openvino":
                    model = str(_converted(_programs(), "F16"))
                    peer = Scripted(python, "peer_openvino.py", model, str(threads))
                else:
                    model = str(open_checkpoint("smollm2").path)
                    peer = Scripted(python, "peer_transformers.py", model, str(threads))
            except Absent as error:
                note(f"{name} is left out: {error}")
                continue
            if isinstance(peer, Scripted):
                stack.callback(peer.close)
            found.append(peer)
        yield found


def _programs() -> Path:
    """The folder of llama.cpp's programs."""
    named = os.environ.get("LLAMA_CPP_BIN")
    found = shutil.which(_BENCH, path=named)
    if found is None:
        raise Absent(f"no {_BENCH} {'in LLAMA_CPP_BIN' if named else 'on PATH'}")
    return Path(found).parent


def _converted(programs: Path, dtype: str) -> Path:
    target = _MODELS / f"smollm2-{dtype.lower()}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        source = open_checkpoint("smollm2").path
        command = [
            str(programs / _QUANTIZE),
            "--allow-requantize",
            str(source),
            str(partial),
            dtype,
        ]
        try:
            subprocess.run(command, env=_libraries(programs), capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Absent(f"{_QUANTIZE} failed: {error}") from error
        partial.rename(target)
    return target


def _libraries(programs: Path) -> dict[str, str]:
    """The environment in which programs find the shared libraries that lie beside them."""
    paths = [str(programs), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}


def _llama_version(programs: Path) -> str:
    command = [str(programs / _BENCH), "--version"]
    done = subprocess.run(command, env=_libraries(programs), capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    found = next((line for line in lines if line.startswith("version:")), "version: unknown")
    return found.removeprefix("version:").strip()
