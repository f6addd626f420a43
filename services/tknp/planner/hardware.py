"""What machines can do, a rank at a time: the constants of the cost model.

Sources: vendors' data sheets for peak numbers. `*_efficiency`, `operation_s` and the all-reduce
latency of the H100 profile are fitted to the eight latencies that Decode Token Parallelism,
section 3, publishes; its network latency is the textbook value. Tokens per second that follow from
these are uncertain by a third; ratios between strategies are the use of this model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tknp.errors import InvalidValue

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One rank and its two links; bytes and FLOP a second, one direction.

    `replica_bytes`, `pool_bytes`: weights plus KV that fit a rank of a self-contained node, and of
    a node of a pool. The paper's capacities need two budgets, 560 and 582 GiB on eight H100: the
    second is fitted to its Figure 5. `peak_flops`: dense, two bytes an operand; halved operands
    double it. `operation_s`: what an operation takes that moves nothing.
    """

    name: str
    replica_bytes: int
    pool_bytes: int
    memory_bandwidth: float
    peak_flops: float
    link_bandwidth: float
    link_latency_s: float
    network_bandwidth: float
    network_latency_s: float
    operation_s: float
    attention_efficiency: float = 0.9
    weight_efficiency: float = 0.8
    flops_efficiency: float = 0.7


_H100 = Hardware(
    name="h100",
    replica_bytes=70 * GIB,
    pool_bytes=int(72.75 * GIB),
    memory_bandwidth=3.35e12,
    peak_flops=0.989e15,
    link_bandwidth=450e9,
    link_latency_s=7e-6,
    network_bandwidth=50e9,
    network_latency_s=15e-6,
    operation_s=6e-6,
    attention_efficiency=0.95,
    weight_efficiency=0.78,
    flops_efficiency=0.72,
)
_GB200 = Hardware(
    name="gb200",
    replica_bytes=168 * GIB,
    pool_bytes=172 * GIB,
    memory_bandwidth=8e12,
    peak_flops=2.5e15,
    link_bandwidth=900e9,
    link_latency_s=5e-6,
    network_bandwidth=50e9,
    network_latency_s=15e-6,
    operation_s=5e-6,
)
# One core with AVX-512 BF16, ranks of one host: mailboxes in shared memory are both links.
_CPU = Hardware(
    name="cpu",
    replica_bytes=4 * GIB,
    pool_bytes=4 * GIB,
    memory_bandwidth=20e9,
    peak_flops=0.21e12,
    link_bandwidth=8e9,
    link_latency_s=3e-6,
    network_bandwidth=8e9,
    network_latency_s=3e-6,
    operation_s=4e-6,
    attention_efficiency=0.9,
    weight_efficiency=0.9,
    flops_efficiency=0.95,
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {machine.name: machine for machine in (_H100, _GB200, _CPU)}
)


def known_hardware(name: str) -> Hardware:
    """The profile called `name`; raises InvalidValue listing all names."""
    if name not in HARDWARE:
        raise InvalidValue("hardware", name, f"choose one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
