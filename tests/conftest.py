"""Fixtures that the whole suite shares: small random checkpoints with the real file formats."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell starts background jobs with SIGINT ignored, nohup those it starts with SIGHUP ignored, and
# ignored they would stay in every child.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("tknp", deadline=None)  # how long an example takes depends on the machine
settings.load_profile("tknp")


def _own_ports() -> None:
    """Workers of one run pick ports of ranges of their own, so that none takes another's."""
    from tknp.cli import ports

    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), worker + 1)
    size = (ports.highest_safe_port() - ports.LOWEST) // workers
    ports.LOWEST += worker * size
    ports.HIGHEST = ports.LOWEST + size - 1


_own_ports()
BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<s>", "</s>", "<unk>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect what the tests of a file made, not each time all that was ever imported: a second."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test marked `alone` while no other process of the suite runs one.

    The gate lets nobody in while it waits, so that it doesn't wait for ever.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    place = Path(tempfile.gettempdir())
    with open(place / f"{run}.gate", "w") as gate, open(place / f"{run}.running", "w") as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory of seeded random checkpoints, written by transformers itself.

    `random_checkpoint(layers=3, q_heads=4, kv_heads=2, ...)` returns a directory with config.json,
    safetensors (float32; `sharded=True` splits them under an index) and a byte-level tokenizer
    with a chat template: ids 0..255 are bytes, then <s>, </s>, <unk>. Equal arguments share one
    directory for the whole session, so treat it as read-only. Further keywords go to LlamaConfig,
    or to NemotronConfig with `family="nemotron"`.
    """
    made: dict[str, Path] = {}

    def make(
        *,
        layers: int = 3,
        q_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        hidden: int | None = None,
        intermediate: int = 96,
        vocab: int = 261,
        tied: bool = False,
        sharded: bool = False,
        seed: int = 0,
        std: float = 0.3,
        max_position: int = 512,
        family: str = "llama",
        **extra: Any,
    ) -> Path:
        values = {k: v for k, v in sorted(locals().items()) if k not in ("made", "extra")}
        key = json.dumps([values, extra], sort_keys=True, default=str)
        if key in made:
            return made[key]

        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            family,
            num_hidden_layers=layers,
            num_attention_heads=q_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=q_heads * head_dim if hidden is None else hidden,
            intermediate_size=intermediate,
            vocab_size=vocab,
            tie_word_embeddings=tied,
            max_position_embeddings=max_position,
            bos_token_id=BYTE_TOKENS,
            eos_token_id=BYTE_TOKENS + 1,
            **{"rms_norm_eps" if family == "llama" else "norm_eps": 1e-5},
            dtype="float32",
            **extra,
        )
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, std, generator=generator)
                else:  # a norm; Nemotron adds 1 to its scale and has a bias
                    center = 1.0 if family == "llama" else 0.0
                    parameter.normal_(center, 0.1, generator=generator)
        path = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(path, max_shard_size="64KB" if sharded else "5GB")
        if vocab >= BYTE_TOKENS + len(SPECIAL_TOKENS):
            _byte_tokenizer().save_pretrained(path)
        made[key] = path
        return path

    return make


def _byte_tokenizer() -> Any:
    """A tokenizer whose ids 0..255 are the bytes in their order, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocab = {letters[byte]: byte for byte in range(BYTE_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    bos, eos, unknown = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set torch's threads for the rest of the test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_pool() -> Callable[..., Any]:
    """Factory of pools on free loopback ports: `make_pool(model, nodes=2, tp=1, prefill_tp=1)`.

    Further keywords are settings of the pool file.
    """
    from tknp.cli.ports import free_ports
    from tknp.config import pool_from
    from tknp.pool import open_pool

    def make(
        model: Path | str,
        *,
        nodes: int = 2,
        tp: int = 1,
        prefill: int = 1,
        prefill_tp: int = 1,
        roles: tuple[str, ...] = (),
        **settings: Any,
    ) -> Any:
        ports = iter(free_ports(2 + nodes * tp + prefill * (prefill_tp + 1)))

        def addresses(count: int) -> list[str]:
            return [f"127.0.0.1:{next(ports)}" for _ in range(count)]

        values: dict[str, Any] = {
            "model": str(model),
            "coordinator": addresses(1)[0],
            "data_plane": addresses(1)[0],
            "nodes": [
                {"addresses": addresses(tp), "role": roles[n] if roles else "decode-node"}
                for n in range(nodes)
            ],
            "prefill": [
                {"addresses": addresses(prefill_tp), "data_plane": addresses(1)[0]}
                for _ in range(prefill)
            ],
            "dtype": "float32",
            "interface": "lo",
            "timeout_s": 60.0,
        }
        return open_pool(pool_from({**values, **settings}))

    return make


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Security settings of a pool on 127.0.0.1: a CA, one certificate for all, two tokens.

    `stranger.pem` and `stranger.key`, beside them, are signed by nobody whom the pool trusts.
    """
    directory = tmp_path_factory.mktemp("secured")
    extensions = directory / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    for name in ("ca", "stranger"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                "-nodes", "-subj", f"/CN={name}", "-days", "2",
                "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", "/CN=pool", "-keyout", "pool.key", "-out", "pool.csr")  # fmt: skip
    openssl("x509", "-req", "-in", "pool.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", "extensions",
            "-out", "pool.pem")  # fmt: skip
    (directory / "token").write_text("services-0123456789abcdef\n")
    (directory / "api-token").write_text("clients-0123456789abcdef\n")
    names = {
        "tls_cert": "pool.pem", "tls_key": "pool.key", "tls_ca": "ca.pem",
        "token_file": "token", "api_token_file": "api-token",
    }  # fmt: skip
    return {field: str(directory / name) for field, name in names.items()}
