"""Greedy decoding by transformers: the oracle of every strategy, node count and TP degree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Generate = Callable[[str, Sequence[tuple[Sequence[int], int]]], Awaitable[list[list[int]]]]
RECORDED = Path(__file__).with_name("smollm2_greedy.json")


class Greedy:
    """Greedy ids by one transformers model, without stopping at EOS; what is known is kept."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: Sequence[int], tokens: int) -> list[int]:
        return self.all([(prompt, tokens)])[0]

    def all(self, jobs: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        """The ids of every (prompt, tokens).

        Prompts are padded on the left and run as one batch, which takes a tenth of the time.
        """
        import torch

        new = [
            (tuple(prompt), tokens)
            for prompt, tokens in jobs
            if len(self._known.get(tuple(prompt), ())) < tokens
        ]
        if new:
            width, longest = max(len(prompt) for prompt, _ in new), max(n for _, n in new)
            pads = [[0] * (width - len(prompt)) for prompt, _ in new]
            ids = [[*pad, *prompt] for pad, (prompt, _) in zip(pads, new, strict=True)]
            mask = [[*pad, *[1] * (width - len(pad))] for pad in pads]
            out = self._model.generate(
                torch.tensor(ids), attention_mask=torch.tensor(mask), do_sample=False,
                min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            for (prompt, _), row in zip(new, out[:, width:].tolist(), strict=True):
                self._known[prompt] = row
        return [self._known[tuple(prompt)][:tokens] for prompt, tokens in jobs]


@pytest.fixture(scope="session")
def random_greedy() -> Callable[[Path], Greedy]:
    """The oracle of a checkpoint that `random_checkpoint` wrote."""
    made: dict[Path, Greedy] = {}

    def load(path: Path) -> Greedy:
        import torch
        from transformers import AutoModelForCausalLM

        if path not in made:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            made[path] = Greedy(model.eval())
        return made[path]

    return load


@pytest.fixture(scope="session")
def smollm2_greedy() -> list[tuple[list[int], list[int]]]:
    """Prompts and the forty ids with which the bundled SmolLM2 goes on, by transformers.

    Eleven short prompts, one of 206 tokens and one of 1,510. The answers are recorded, since
    generating them takes longer than a pool does; `test_model_llama.py` checks the record.
    """
    from tknp.model.checkpoint import open_checkpoint
    from tknp.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint("smollm2"))
    entries = json.loads(RECORDED.read_text("utf-8"))
    return [(tokenizer.encode(entry["text"]), entry["ids"]) for entry in entries]


@pytest.fixture(scope="session")
def smollm2_oracle() -> Any:
    """The bundled SmolLM2, its GGUF read and dequantized by transformers' own code.

    The parts of it, since `from_pretrained` takes five times as long for the same tensors.
    """
    import torch
    from gguf.constants import MODEL_ARCH
    from gguf.tensor_mapping import get_tensor_name_map
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.gguf.dequant import dequantize
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from tknp.model.checkpoint import open_checkpoint

    path = open_checkpoint("smollm2").path
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    header = GgufHeader.from_file(str(path))
    shapes = {info.name: info.shape for info in header.tensors}
    unpermute = LlamaTensorProcessor(config.to_dict())
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {
        names.get_name(name.removesuffix(".weight")): name
        for name in model.state_dict()
        if name != "lm_head.weight"
    }
    state = {}
    for name, lazy in load_gguf_state_dict(header).items():
        values = lazy[...]
        if values.dtype == torch.uint8:
            values = dequantize(values.flatten(), lazy.ggml_type).reshape(shapes[name])
        values = torch.from_numpy(unpermute.process(values.numpy(), name).weights.copy())
        state[stored[name.removesuffix(".weight")]] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


@pytest.fixture(scope="session")
def generate() -> Generate:
    """`await generate(target, jobs)`: ids of every (prompt, tokens), all requests at once."""
    from tknp.client import Client, request_for
    from tknp.rpc.ids import unpack_ids
    from tknp.v1.common_pb2 import Sampling

    async def run(target: str, jobs: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        async with Client(target) as client:

            async def one(prompt: Sequence[int], tokens: int) -> list[int]:
                ids: list[int] = []
                sampling = Sampling(max_tokens=tokens, ignore_eos=True)
                async for response in client.generate(request_for(prompt, sampling)):
                    ids += unpack_ids("token_ids", response.token_ids)
                return ids

            return await asyncio.gather(*(one(*job) for job in jobs))

    return run
