"""How many layers of a chunk go into one call of the kernels. Pure.

Between two calls Python pushes KV and shows progress. A few layers a call, and it costs little; all
of them, and the KV of a prompt would travel when everything is computed, and a rank that computes
for long would look as if it hung. So a call takes about CALL_S, or one layer if that takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

CALL_S = 0.1


def in_calls(
    layers: range, call: Callable[[range], Sequence[float]], done: Callable[[int], None]
) -> list[float]:
    """Compute `layers` by `call(some of them)`, which returns the seconds of their parts.

    `done` is told of every layer, in order, after the call that computed it. Returns the seconds of
    all parts.
    """
    seconds: list[float] = []
    at, count = layers.start, 1  # the first tells how long a layer takes
    while at < layers.stop:
        some = range(at, min(at + count, layers.stop))
        spent = call(some)
        for layer in some:
            done(layer)
        seconds += spent
        at, count = some.stop, max(1, int(CALL_S * len(some) / max(sum(spent), 1e-9)))
    return seconds
