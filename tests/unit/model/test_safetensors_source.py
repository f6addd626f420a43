from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tknp.errors import CheckpointError
from tknp.model.checkpoint import open_checkpoint
from tknp.model.shard import Shard

RandomCheckpoint = Callable[..., Path]


@pytest.fixture
def copy(random_checkpoint: RandomCheckpoint, tmp_path: Path) -> Path:
    """A private single-file checkpoint, to be damaged."""
    return Path(shutil.copytree(random_checkpoint(), tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("sharded", [False, True])
def test_slices_equal_the_stored_tensors(
    random_checkpoint: RandomCheckpoint, sharded: bool
) -> None:
    path = random_checkpoint(sharded=sharded)
    assert (path / "model.safetensors.index.json").exists() == sharded
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    checkpoint = open_checkpoint(path)
    dh = checkpoint.config.head_dim
    for tp in (1, 2, 4):
        for rank in range(tp):
            shard = Shard(checkpoint.config, 1, 3, True, True, tp, rank)
            weights = checkpoint.load(shard, torch.float32)
            assert set(weights.layers) == {1, 2}
            q = stored["model.layers.2.self_attn.q_proj.weight"]
            v = stored["model.layers.2.self_attn.v_proj.weight"]
            down = stored["model.layers.2.mlp.down_proj.weight"]
            layer = weights.layers[2]
            first, last = shard.q_heads[0] * dh, (shard.q_heads[-1] + 1) * dh
            torch.testing.assert_close(layer.qkv[: shard.q_width], q[first:last], rtol=0, atol=0)
            first, last = shard.kv_heads[0] * dh, (shard.kv_heads[-1] + 1) * dh
            torch.testing.assert_close(layer.qkv[-shard.kv_width :], v[first:last], rtol=0, atol=0)
            torch.testing.assert_close(layer.down, down[:, list(shard.mlp_columns)], rtol=0, atol=0)
            head = stored["lm_head.weight"][list(shard.vocab)]
            torch.testing.assert_close(weights.head, head, rtol=0, atol=0)


def test_a_shard_reads_only_its_own_layers(copy: Path) -> None:
    checkpoint = open_checkpoint(copy)
    read: list[str] = []
    source = checkpoint._source
    original = source.read
    source.read = lambda name, *cut: (read.append(name), original(name, *cut))[1]  # type: ignore[method-assign]
    checkpoint.load(Shard(checkpoint.config, 1, 2, False, False), torch.float32)
    assert {name.split(".")[2] for name in read} == {"1"}


def test_progress_ends_at_the_bytes_held(random_checkpoint: RandomCheckpoint) -> None:
    checkpoint = open_checkpoint(random_checkpoint(tied=True))
    seen: list[tuple[int, int]] = []
    weights = checkpoint.load(
        Shard(checkpoint.config, 0, 3, True, True),
        torch.bfloat16,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (weights.size_bytes, weights.size_bytes)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert weights.layers[0].input_norm.dtype == torch.bfloat16


def remove(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            remove("model.layers.2.mlp.up_proj.weight"),
            ["model.layers.2.mlp.up_proj.weight", "missing", "[96, 64]"],
        ),
        (remove("lm_head.weight"), ["lm_head.weight", "missing", "[261, 64]"]),
        (
            put("model.norm.weight", torch.ones(63)),
            ["model.norm.weight", "[63]", "[64]"],
        ),
        (
            put("model.layers.0.self_attn.o_proj.weight", torch.ones(64, 64, dtype=torch.int8)),
            ["model.layers.0.self_attn.o_proj.weight", "I8"],
        ),
        (
            put("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
            ["model.layers.0.self_attn.q_proj.bias", "no place"],
        ),
    ],
    ids=["missing", "missing-head", "misshapen", "dtype", "alien"],
)
def test_tensors_that_do_not_fit_are_refused(
    copy: Path, change: Callable[[dict[str, torch.Tensor]], object], words: list[str]
) -> None:
    rewrite(copy, change)
    checkpoint = open_checkpoint(copy)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.validate()
    for word in ["model.safetensors", *words]:
        assert word in str(caught.value)


def test_stored_rope_frequencies_are_ignored(copy: Path) -> None:
    rewrite(copy, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    open_checkpoint(copy).validate()


def test_truncated_data_is_refused_by_tensor(copy: Path) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=rf"truncated.*the file has {len(data) - 100} bytes"):
        open_checkpoint(copy).validate()


def damage_header(entry: dict[str, Any] | None) -> bytes:
    header = json.dumps({"model.norm.weight": entry}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated: its header takes 8 bytes, the file has 0"),
        ((1 << 40).to_bytes(8, "little"), "truncated: its header"),
        ((4).to_bytes(8, "little") + b"{,,}", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        (damage_header(None), "model.norm.weight has a damaged header"),
        (damage_header({"shape": [64], "dtype": "F32"}), "model.norm.weight has a damaged header"),
        (
            damage_header({"shape": [64], "dtype": "F32", "data_offsets": [0, 10]}),
            "model.norm.weight spans 10 bytes; expected 256",
        ),
    ],
    ids=["empty", "length", "json", "list", "null", "no-offsets", "span"],
)
def test_damaged_headers_are_refused(copy: Path, data: bytes, message: str) -> None:
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copy)


def test_pickled_weights_are_never_loaded(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are never loaded"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json is not valid JSON"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "expected a plain file name"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors can't be read"),
        ('{"weight_map": {"a": "part.safetensors"}}', "part.safetensors: tensor a is missing"),
    ],
)
def test_damaged_indexes_are_refused(copy: Path, index: str, message: str) -> None:
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copy)


def test_any_damaged_byte_of_a_header_is_refused_or_harmless(copy: Path) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    random = Random(0)
    for _ in range(200):
        position = random.randrange(8 + int.from_bytes(data[:8], "little"))
        damaged = bytearray(data)
        damaged[position] ^= 1 << random.randrange(8)
        file.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            open_checkpoint(copy).validate()


def test_absurd_layer_count_is_refused_at_once(copy: Path) -> None:
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1 << 60}))
    with pytest.raises(CheckpointError, match=r"holds 30 tensors; 1152921504606846976 layers"):
        open_checkpoint(copy).validate()
