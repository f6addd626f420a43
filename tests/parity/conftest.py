"""Greedy decoding by transformers: the oracle of every strategy, node count and TP degree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

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
def smollm2_greedy(greedy_of: Callable[[Any], Greedy]) -> Greedy:
    """The oracle of the bundled SmolLM2, read from its GGUF by transformers' own code."""
    import torch
    from transformers import AutoModelForCausalLM

    from tknp.model.checkpoint import open_checkpoint

    path = open_checkpoint("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return greedy_of(model.eval())
