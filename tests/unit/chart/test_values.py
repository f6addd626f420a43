"""README.md says every value as it is; monitors reach pools that the chart has not made."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts" / "tknp"
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tknp_chart_readme", CHART / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield before + key
        if isinstance(value, Mapping):
            yield from paths(value, f"{before}{key}.")


def test_readme_is_in_step_with_values(readme: ModuleType) -> None:
    remedy = "run python charts/tknp/readme.py > charts/tknp/README.md"
    assert (CHART / "README.md").read_text() == readme.text(), remedy


def test_every_value_has_a_row_and_every_row_says_something(readme: ModuleType) -> None:
    text = (CHART / "values.yaml").read_text()
    found = {name: (default, said) for name, default, said in readme.rows(text)}
    shown = {name for name in found if found[name][0]}
    every = set(paths(yaml.safe_load(text)))
    assert set(found) <= every
    for name in every:  # by itself, or within the mapping that is its parent's default
        above = {name.rsplit(".", n)[0] for n in range(name.count(".") + 1)}
        assert above & shown or any(other.startswith(f"{name}.") for other in shown), name
    assert not [name for name in shown if not found[name][1] and not name.endswith(".enabled")]


def test_pools_applied_by_hand_are_scraped_too(render: Render) -> None:
    pools = [{"name": "llama", "ranks": 4}, {"name": "other", "gatewayTls": True}]
    values = {"monitoring": {"podMonitor": {"enabled": True, "pools": pools}}}
    monitors = {o["metadata"]["name"]: o["spec"] for o in render(values)
                if o["kind"] == "PodMonitor"}  # fmt: skip
    assert set(monitors) == {"demo-tknp-operator", "llama-pool", "llama-gateway", "other-pool",
                             "other-gateway"}  # fmt: skip
    ports = [end["port"] for end in monitors["llama-pool"]["podMetricsEndpoints"]]
    assert ports == [f"metrics-{t}" for t in range(4)]
    (end,) = monitors["other-gateway"]["podMetricsEndpoints"]
    assert end["scheme"] == "https"


@pytest.mark.parametrize("theirs", ["", "mine"])
def test_load_trusts_the_ca_that_the_pool_shows(render: Render, theirs: str) -> None:
    values = {"enabled": True, "pool": "demo", "target": "grpc://demo-coordinator:50051",
              "traceConfigMap": "t", "resultsClaim": "r", "tlsSecret": theirs}  # fmt: skip
    (job,) = [o for o in render({"load": values}) if o["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "internal"]
    found = {item["path"]: (source["secret"]["name"], item["key"])
             for source in volume["projected"]["sources"]
             for item in source["secret"]["items"]}  # fmt: skip
    assert found == {"ca.crt": (theirs or "demo-internal", "ca.crt"),
                     "api-token": ("demo-internal", "api-token")}  # fmt: skip
    command = pod["containers"][0]["command"]
    assert {"--tls-ca=/etc/tknp/ca.crt", "--token-file=/etc/tknp/api-token"} <= set(command)
