"""How long to soak."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-s", type=float, default=600.0, help="seconds under load")


@pytest.fixture
def soak_s(request: pytest.FixtureRequest) -> float:
    seconds: float = request.config.getoption("--soak-s")
    return seconds
