from __future__ import annotations

import pytest

from tknp.errors import InvalidValue
from tknp.model.footprint import footprint
from tknp.planner.hardware import known_hardware
from tknp.planner.models import MODELS, known_model


def _weights(name: str, tp: int = 1) -> int:
    model = MODELS[name]
    return footprint(model.config, model.dtype, tp, model.bytes_per_parameter).total * tp


def test_405b_in_fp8_weighs_454_gib() -> None:
    """cap.weights."""
    assert _weights("llama-3.1-405b", tp=8) / 2**30 == pytest.approx(454, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("smollm2-135m", 0.1345)],
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert _weights(name) / 2 / 1e9 == pytest.approx(billions, rel=0.002)


def test_nemotron_has_340_billion_parameters() -> None:
    config = MODELS["nemotron-4-340b"].config
    assert footprint(config, "bfloat16").total / 2 / 1e9 == pytest.approx(341, rel=0.003)


def test_kv_of_128_requests_at_32k_is_2016_gib() -> None:
    """cap.kv_b128_32k."""
    config = MODELS["llama-3.1-405b"].config
    assert 128 * 32_768 * 2 * config.layers * config.kv_width * 2 == 2016 * 2**30


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidValue, match=r"llama-3\.1-405b"):
        known_model("gpt-5")
    with pytest.raises(InvalidValue, match="h100, gb200, cpu"):
        known_hardware("abacus")
