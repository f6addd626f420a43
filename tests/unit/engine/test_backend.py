"""Which implementation a rank takes, and what it says where that is not the fast one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tknp.engine.backend import Backend, KernelBackend, choose_backend
from tknp.kernels import build
from tknp.kernels.isa import best_isa, cpu_features
from tknp.kernels.library import available, load
from tknp.model.config import ModelConfig
from tknp.model.shard import Shard

MODEL = ModelConfig(100, 64, 96, 1, 4, 2, 64, 512)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """What one test finds out about this machine is not what the next one is told."""
    load.cache_clear()
    yield
    load.cache_clear()


@pytest.fixture
def chosen(caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[Backend, str]]:
    """`chosen(model, dtype)`: the backend, and what was logged about it."""

    def choose(
        model: ModelConfig = MODEL, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Backend, str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            backend = choose_backend(
                Shard(model, 0, 1, True, True), page_size=16, max_positions=32, dtype=dtype,
                device=torch.device("cpu"),
            )  # fmt: skip
        return backend, caplog.text

    return choose


def without_compiler(patch: pytest.MonkeyPatch, place: Any) -> None:
    patch.setenv("PATH", str(place))
    patch.delenv("CXX", raising=False)


def without_instructions(patch: pytest.MonkeyPatch, place: Any) -> None:
    patch.setattr("tknp.kernels.isa.cpu_features", lambda: frozenset({"sse2"}))


def switched_off(patch: pytest.MonkeyPatch, place: Any) -> None:
    patch.setenv("TKNP_KERNELS", "off")


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        (without_compiler, r"no C++ compiler: install g++"),
        (without_instructions, "this processor lacks avx2 and fma"),
        (switched_off, "TKNP_KERNELS=off"),
    ],
)
def test_the_twin_is_taken_with_the_reason(
    lacking: Callable[..., None], reason: str, chosen: Callable[..., tuple[Backend, str]],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing was built before
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    if lacking is without_compiler and best_isa(cpu_features()) is None:
        pytest.skip("this processor lacks more than a compiler")
    lacking(monkeypatch, tmp_path)
    backend, logged = chosen()
    assert backend.name == "torch"
    assert not isinstance(backend, KernelBackend)
    assert "bfloat16 runs on torch, which is slow on CPUs" in logged
    assert reason in logged


def test_the_kernels_are_taken_without_a_word_where_they_are(
    chosen: Callable[..., tuple[Backend, str]],
) -> None:
    found = available()
    if not found:
        pytest.skip(found.reason)
    backend, logged = chosen()
    assert backend.name == f"kernels ({found.isa})"
    assert not logged


def test_a_head_size_that_was_not_compiled_is_named(
    chosen: Callable[..., tuple[Backend, str]],
) -> None:
    found = available()
    if not found:
        pytest.skip(found.reason)
    backend, logged = chosen(replace(MODEL, head_dim=48))
    assert backend.name == "torch"
    assert "head_dim=48" in logged


def test_float32_is_torch_s_without_a_word(chosen: Callable[..., tuple[Backend, str]]) -> None:
    backend, logged = chosen(dtype=torch.float32)
    assert (backend.name, logged) == ("torch", "")
