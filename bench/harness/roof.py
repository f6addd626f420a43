"""The fastest that a decode step can be on this machine, in this minute.

    step >= max(weights / bandwidth, FLOPs of the matrices / FLOP/s) + KV / bandwidth

Weights and KV are read once a step, matrices multiplied once a row; attention's arithmetic, norms
and activations are left out, so no engine reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.machine import multiply_rate, read_bandwidth
from tknp.kv.size import token_bytes
from tknp.model.checkpoint import open_checkpoint
from tknp.model.config import ITEM_BYTES
from tknp.model.footprint import footprint


@dataclass(frozen=True)
class Roof:
    """Of SmolLM2 in bfloat16. `read_gb_per_s`, `flop_per_s`: measured just now."""

    read_gb_per_s: float
    flop_per_s: float

    @classmethod
    def measure(cls, threads: int) -> Roof:
        return cls(read_bandwidth(threads), multiply_rate(threads))

    def step_s(self, context: float, batch: int) -> float:
        """Seconds of a step of `batch` rows with `context` tokens of KV each."""
        config = open_checkpoint("smollm2").config
        weights = footprint(config, "bfloat16").total
        kv = batch * context * token_bytes(config, "bfloat16")
        flop = 2 * batch * weights / ITEM_BYTES["bfloat16"]
        read = self.read_gb_per_s * 1e9
        return max(weights / read, flop / self.flop_per_s) + kv / read

    def tokens_per_s(self, context: float, batch: int) -> float:
        return batch / self.step_s(context, batch)
