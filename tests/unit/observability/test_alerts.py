"""Alerts fire when they should and otherwise not, and each has a page that helps."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILE = ROOT / "charts" / "tknp" / "alerts" / "tknp.yaml"


def alerts(rules: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules(promtool: str) -> None:
    run(promtool, "check", "rules", str(FILE))


def test_alerts_fire_and_stay_silent(promtool: str) -> None:
    run(promtool, "test", "rules", "alerts_test.yaml")


def test_burn_rates_are_those_of_the_objectives() -> None:
    """The dashboards' own test shows the same of them."""
    source = ROOT / "charts" / "tknp" / "dashboards" / "source" / "objectives.py"
    spec = importlib.util.spec_from_file_location("tknp_objectives", source)
    assert spec is not None
    assert spec.loader is not None
    objectives = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = objectives  # where dataclasses look their annotations up
    spec.loader.exec_module(objectives)
    text = FILE.read_text()
    assert text == objectives.updated(text), f"run python {source}"


def test_every_alert_is_tested_to_fire(rules: dict[str, Any]) -> None:
    tests = yaml.safe_load((HERE / "alerts_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    assert fired == {alert["alert"] for alert in alerts(rules)}


def test_every_alert_says_what_to_do(rules: dict[str, Any]) -> None:
    for alert in alerts(rules):
        assert alert["labels"]["severity"] in ("critical", "warning"), alert["alert"]
        assert {"summary", "description", "runbook_url"} == alert["annotations"].keys()
        page = (ROOT / alert["annotations"]["runbook_url"]).read_text()
        for heading in ("# ", "## Meaning", "## Look at", "## Do"):
            assert re.search(rf"^{heading}", page, re.M), alert["alert"]
        assert alert["alert"] in page


def test_every_runbook_belongs_to_an_alert(rules: dict[str, Any]) -> None:
    pages = {path.name for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    named = {alert["annotations"]["runbook_url"].rpartition("/")[2] for alert in alerts(rules)}
    assert pages == named


def test_expressions_name_what_there_is(
    rules: dict[str, Any], check: Callable[[str], None]
) -> None:
    for group in rules["groups"]:
        for rule in group["rules"]:
            check(rule["expr"])


def test_targets_are_bounds_of_buckets(rules: dict[str, Any]) -> None:
    """A bound between two buckets would count nothing."""
    from tknp.metrics.table import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN

    text = FILE.read_text()
    bounds = re.findall(r'(\w+)_bucket\{le="([^"]+)"\}', text)
    assert bounds
    buckets = {metric.name: metric.buckets for metric in (TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY)}
    for name, bound in bounds:
        assert float(bound) in buckets[name]
        assert bound == str(float(bound))  # as prometheus_client writes it


def test_autoscalers_ask_for_what_is_recorded(rules: dict[str, Any]) -> None:
    """By the names that docs/autoscaling.md lets an adapter give, and by labels that are there."""
    from tknp_operator.api.service import parse
    from tknp_operator.build.autoscaling import autoscalers

    scaling = {"minReplicas": 1, "maxReplicas": 4}
    service = parse(
        {
            "apiVersion": "tknp.io/v1alpha1",
            "kind": "TokenParallelService",
            "metadata": {"name": "p", "namespace": "ai", "uid": "u", "generation": 1},
            "spec": {
                "image": "tknp",
                "model": {"name": "m", "source": {"builtin": "smollm2"}},
                "decode": {"nodes": 2, "device": "cpu"},
                "prefill": {"maxReplicas": 4, "autoscaling": scaling},
                "gateway": {"autoscaling": scaling},
            },
        }
    )
    page = (ROOT / "docs" / "autoscaling.md").read_text()
    adapter = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["rules"]["external"][0]
    names = {rule.get("record", "") for group in rules["groups"] for rule in group["rules"]}
    pattern, given = adapter["name"]["matches"], adapter["name"]["as"].replace("$1", r"\1")
    served = {re.sub(pattern, given, name) for name in names if re.match(pattern, name)}
    asked = {}
    for autoscaler in autoscalers(service):
        for metric in autoscaler["spec"]["metrics"]:
            asked[metric["external"]["metric"]["name"]] = metric["external"]
    assert asked.keys() == served
    for external in asked.values():
        assert external["metric"]["selector"]["matchLabels"] == {"namespace": "ai", "pool": "p"}
        assert external["target"]["type"] == "AverageValue"
