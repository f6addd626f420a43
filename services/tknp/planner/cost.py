"""What one operation takes on one rank: a roofline.

    dense       hypot(bytes of weights / bandwidth, FLOP / peak)
    attention   bytes of KV of the rank's rows and heads / bandwidth
    transfer    bytes / bandwidth of the link, then its latency
    all-reduce  2 (n - 1) / n operands over the slowest link, and its latency log2(n) times

each but transfers plus a constant. The 2-norm of the two roofs fits the published MLP latencies
better than their maximum or sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Transfer
from tknp.layout.rank import Rank
from tknp.model.config import ITEM_BYTES
from tknp.model.footprint import Part
from tknp.model.shard import Shard, mlp_parameters
from tknp.planner.hardware import Hardware
from tknp.planner.models import Model


@dataclass(frozen=True)
class Costs:
    """Prices of the steps of `layout`; see `tknp.planner.prices`.

    `tokens[s][i]`: tokens that rows [0, i) of stream s have on one of their owners, all told.
    """

    model: Model
    hardware: Hardware
    layout: Layout
    tokens: Sequence[Sequence[float]]

    def compute_s(self, rank: Rank, stream: int, op: Op) -> float:
        machine, shard = self.hardware, self._slices[rank]
        match op.kind:
            case Kind.EMBED:
                seconds = op.rows * self.model.config.hidden_size * 4 / machine.memory_bandwidth
            case Kind.PROJECT:
                parameters = self.model.config.hidden_size * shard.projected_width
                seconds = self._gemm(parameters, op.rows, "attention")
            case Kind.OUTPUT:
                parameters = self.model.config.hidden_size * len(shard.output_columns)
                seconds = self._gemm(parameters, op.rows, "attention")
            case Kind.MLP:
                seconds = self._mlp(shard, op)
            case Kind.FINISH:
                parameters = self.model.config.hidden_size * len(shard.output_columns)
                seconds = self._gemm(parameters, op.rows, "attention") + self._mlp(shard, op)
            case Kind.ATTEND:
                seconds = self._attention(shard, stream, op)
            case Kind.SAMPLE:
                parameters = self.model.config.hidden_size * len(shard.vocab)
                seconds = self._gemm(parameters, op.rows, "head")
            case _:  # merges: partial rows in, whole rows out
                moved = 2 * op.rows * shard.q_width * self.layout.item_bytes
                seconds = moved / machine.memory_bandwidth
        return machine.operation_s + seconds

    def all_reduce_s(self, op: Op) -> float:
        machine = self.hardware
        pool = op.scope == "pool"
        ranks = self.layout.nodes * self.layout.tp if pool else self.layout.tp
        if ranks == 1:
            return 0.0
        local = ranks <= self.layout.domain_ranks
        bandwidth = machine.link_bandwidth if local else machine.network_bandwidth
        latency = machine.link_latency_s if local else machine.network_latency_s
        moved = 2 * (ranks - 1) / ranks * op.operand_bytes
        return moved / bandwidth + latency * math.log2(ranks)

    def transfer_s(self, transfer: Transfer) -> tuple[float, float]:
        machine = self.hardware
        if transfer.crosses_nodes:
            return transfer.nbytes / machine.network_bandwidth, machine.network_latency_s
        return transfer.nbytes / machine.link_bandwidth, machine.link_latency_s

    @cached_property
    def _slices(self) -> dict[Rank, Shard]:
        """Slices of each rank, which are the same in every block."""
        return {rank: self.layout.heads(rank) for rank in self.layout.ranks()}

    def _mlp(self, shard: Shard, op: Op) -> float:
        edge = op.layer in (0, self.model.config.layers - 1)
        return self._gemm(mlp_parameters(shard), op.rows, "edge_mlp" if edge else "mlp")

    def _gemm(self, parameters: int, rows: int, part: Part) -> float:
        machine, given = self.hardware, self.model.bytes_per_parameter
        default = ITEM_BYTES[self.model.dtype]
        fallback = given.get("mlp", default) if part == "edge_mlp" else default
        item = given.get(part, fallback)
        read = parameters * item / (machine.memory_bandwidth * machine.weight_efficiency)
        peak = machine.peak_flops * 2 / item * machine.flops_efficiency
        return math.hypot(read, 2 * parameters * rows / peak)

    def _attention(self, shard: Shard, stream: int, op: Op) -> float:
        machine, before = self.hardware, self.tokens[stream]
        token = 2 * shard.kv_width * self.layout.item_bytes
        read = (before[op.stop] - before[op.start]) * token
        return read / (machine.memory_bandwidth * machine.attention_efficiency)
