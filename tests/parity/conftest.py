"""Greedy decoding by transformers: the oracle of every strategy, node count and TP degree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Generate = Callable[[str, Sequence[tuple[Sequence[int], int]]], Awaitable[list[list[int]]]]
Greedy = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="session")
def greedy_of() -> Callable[[Any], Greedy]:
    """`greedy_of(transformers_model)(prompt_ids, tokens)`: ids, without stopping at EOS."""
    import torch

    def make(model: Any) -> Greedy:
        done: dict[tuple[tuple[int, ...], int], list[int]] = {}

        @torch.inference_mode()
        def greedy(prompt: Sequence[int], tokens: int) -> list[int]:
            key = tuple(prompt), tokens
            if key not in done:
                out = model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
                ids = [int(out.logits[0, -1].argmax())]
                while len(ids) < tokens:
                    step = torch.tensor([[ids[-1]]])
                    out = model(step, past_key_values=out.past_key_values, use_cache=True)
                    ids.append(int(out.logits[0, -1].argmax()))
                done[key] = ids
            return done[key]

        return greedy

    return make


@pytest.fixture(scope="session")
def random_greedy(greedy_of: Callable[[Any], Greedy]) -> Callable[[Path], Greedy]:
    """The oracle of a checkpoint that `random_checkpoint` wrote."""
    made: dict[Path, Greedy] = {}

    def load(path: Path) -> Greedy:
        import torch
        from transformers import AutoModelForCausalLM

        if path not in made:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            made[path] = greedy_of(model.eval())
        return made[path]

    return load


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
def smollm2_answers(
    smollm2_oracle: Any,
) -> Callable[[Sequence[Sequence[int]], int], list[list[int]]]:
    """`(prompts, tokens)` -> ids of the bundled SmolLM2 by transformers.

    Prompts are padded on the left and run as one batch, which takes a tenth of the time.
    """
    import torch

    done: dict[str, list[list[int]]] = {}

    def batch(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = smollm2_oracle.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=tokens, pad_token_id=0,
            max_new_tokens=tokens, eos_token_id=None,
        )  # fmt: skip
        return out[:, width:].tolist()

    @torch.inference_mode()
    def answers(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        key = repr((prompts, tokens))
        if key not in done:
            # The longest alone: padding the others to it would cost more than it saves.
            order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
            found = batch([prompts[i] for i in order[:-1]], tokens)
            found += batch([prompts[order[-1]]], tokens)
            done[key] = [ids for _, ids in sorted(zip(order, found, strict=True))]
        return done[key]

    return answers


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
