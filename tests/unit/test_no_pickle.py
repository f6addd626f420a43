"""Nothing that would run code found in bytes is imported or called, and no prompt is formatted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("services", "operator", "loadgen", "bench")
    for path in (ROOT / folder).rglob("*.py")
    if "v1" not in path.parts
)
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# Calls that unpickle, or move pickles between ranks.
CALLS = {
    "torch.load", "torch.save", "torch.package", "numpy.load", "np.load", "pandas.read_pickle",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec",
}  # fmt: skip
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
PROCESS_POOLS = {"multiprocessing", "ProcessPoolExecutor"}
LOGGED = {"debug", "info", "warning", "error", "exception", "critical", "log"}
PROMPT_NAMES = {"prompt", "prompts", "text", "content", "messages", "ids", "token_ids", "tokens"}


def _parts(module: str) -> set[str]:
    return set(module.split("."))


def _forbidden(tree: ast.AST) -> Iterator[str]:
    banned = MODULES | PROCESS_POOLS
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _parts(alias.name) & banned:
                    yield f"line {node.lineno}: import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if (_parts(node.module or "") | names) & (banned | OBJECT_COLLECTIVES):
                yield f"line {node.lineno}: from {node.module} import {', '.join(sorted(names))}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called.rpartition(".")[2] in OBJECT_COLLECTIVES:
                yield f"line {node.lineno}: {called}"
            if any(k.arg == "allow_pickle" for k in node.keywords):
                yield f"line {node.lineno}: allow_pickle"


def _logged_prompts(tree: ast.AST) -> Iterator[str]:
    """Log calls with an argument, or part of one, that is named as prompts and their ids are."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in LOGGED or ast.unparse(node.func.value) not in ("log", "_log"):
            continue
        sizes = [
            inner
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "len"
            for inner in ast.walk(call)
        ]
        for inner in ast.walk(node):
            if inner in sizes:  # a size says nothing
                continue
            name = getattr(inner, "id", getattr(inner, "attr", None))
            if name in PROMPT_NAMES:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 100


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles_or_logs_prompts(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [*_forbidden(tree), *_logged_prompts(tree)]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import torch.multiprocessing as mp", "from marshal import loads",
        "from multiprocessing import shared_memory", "from concurrent.futures import "
        "ProcessPoolExecutor", "torch.load(p)", "dist.all_gather_object(a, b)",
        "np.load(p, allow_pickle=True)", "yaml.load(p)", "eval(text)",
        "from torch.distributed import broadcast_object_list",
    ],
)  # fmt: skip
def test_the_look_finds_what_it_looks_for(source: str) -> None:
    assert list(_forbidden(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "log.info('%s of %d', prompt, len(ids))",
        "log.debug(f'{request.text}')",
        "_log.warning('x', list(m.ids))",
    ],
)
def test_the_look_finds_logged_prompts(source: str) -> None:
    assert list(_logged_prompts(ast.parse(source)))
