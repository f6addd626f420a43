"""GuideLLM, another load generator, on the same schedule and the same server.

`$GUIDELLM`, else `guidellm` on PATH. It replays our trace with `schedule_turn: timestamp`, the mode
in which it keeps to a schedule, and makes prompts of as many tokens itself. Its report holds for
each request when it was due and when it was sent; the processor time is that of its processes,
less what a run of a few requests takes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from harness.peers import Absent

FEW = 10
LONGEST_S = 240.0


@dataclass(frozen=True)
class Lateness:
    """How late requests left, in ms in ascending order, and seconds of CPU that one costs."""

    lag_ms: Sequence[float]
    cpu_s: float

    def percentile(self, percent: float) -> float:
        return self.lag_ms[min(int(len(self.lag_ms) * percent / 100), len(self.lag_ms) - 1)]


class GuideLlm:
    """`directory` takes the trace, a tokenizer and reports."""

    def __init__(self, directory: Path) -> None:
        program = os.environ.get("GUIDELLM") or shutil.which("guidellm")
        if program is None:
            raise Absent("no guidellm on PATH or in $GUIDELLM")
        self._program, self._directory = program, directory
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        version = said.stdout.strip().rpartition(" ")[2]
        self.name = f"GuideLLM {version}"
        _write_tokenizer(directory / "tokenizer")

    def measure(self, url: str, arrivals_s: Sequence[float], inputs: int, outputs: int) -> Lateness:
        """Send a request of `inputs` and `outputs` tokens at each of `arrivals_s` to `url`."""
        _, idle_s = self._run(url, arrivals_s[:FEW], inputs, outputs)
        lag_ms, used_s = self._run(url, arrivals_s, inputs, outputs)
        return Lateness(lag_ms, (used_s - idle_s) / (len(arrivals_s) - FEW))

    def _run(
        self, url: str, arrivals_s: Sequence[float], inputs: int, outputs: int
    ) -> tuple[list[float], float]:
        trace, plan, report = (self._directory / n for n in ("t.jsonl", "plan.yaml", "out.json"))
        trace.write_text("".join(
            json.dumps({"timestamp": at, "input_length": inputs, "output_length": outputs}) + "\n"
            for at in arrivals_s
        ))  # fmt: skip
        source = {"kind": "json_file", "path": str(trace)}
        plan.write_text(yaml.safe_dump({"spec": {
            "backend": {"kind": "openai_http", "target": url.removesuffix("/v1"), "model": "echo",
                        "request_format": "/v1/completions", "validate_backend": False},
            "profile": {"kind": "replay", "schedule_turn": "timestamp"},
            "data": [{"kind": "trace_synthetic", "source": source}],
            "tokenizer": {"kind": "hf_auto", "model": str(self._directory / "tokenizer")},
        }}))  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [self._program, "run", "-c", str(plan), "--output", f"kind=json,path={report}",
             "--disable-console"],
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, check=True,
            timeout=LONGEST_S,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        times = [request["info"]["timings"] for request in benchmark["requests"]["successful"]]
        if len(times) < len(arrivals_s):
            raise Absent(f"only {len(times)} of {len(arrivals_s)} requests succeeded")
        lag_ms = sorted((t["request_start"] - t["targeted_start"]) * 1e3 for t in times)
        return lag_ms, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _write_tokenizer(directory: Path) -> None:
    """The small model's own, in the form that transformers loads."""
    from transformers import AutoTokenizer

    from tknp.model.checkpoint import open_checkpoint

    path = Path(open_checkpoint("smollm2").path)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)
