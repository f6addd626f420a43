"""Layers of a chunk in calls of about a tenth of a second: each once, in order, told at once."""

import pytest

from tknp.prefill.layer_calls import CALL_S, in_calls


class Machine:
    """Computes a layer in `layer_s`."""

    def __init__(self, layer_s: float) -> None:
        self.layer_s = layer_s
        self.events: list[object] = []

    def call(self, layers: range) -> list[float]:
        self.events.append(layers)
        return [self.layer_s / 2, self.layer_s / 2] * len(layers)


@pytest.mark.parametrize("layer_s", [0.0, CALL_S / 100, CALL_S / 4, CALL_S, 10 * CALL_S])
@pytest.mark.parametrize("layers", [range(0), range(1), range(3, 33)])
def test_every_layer_once_in_order_and_told_after_its_call(layer_s, layers) -> None:
    machine = Machine(layer_s)
    seconds = in_calls(layers, machine.call, machine.events.append)
    assert seconds == [layer_s / 2] * (2 * len(layers))
    calls = [event for event in machine.events if isinstance(event, range)]
    assert [event for call in calls for event in (call, *call)] == machine.events
    assert [layer for call in calls for layer in call] == list(layers)


def test_calls_last_a_while_but_not_longer() -> None:
    lengths = {}
    for layer_s in (CALL_S / 4, 10 * CALL_S):
        machine = Machine(layer_s)
        in_calls(range(9), machine.call, lambda _: None)
        lengths[layer_s] = [len(e) for e in machine.events if isinstance(e, range)]
    assert lengths == {CALL_S / 4: [1, 4, 4], 10 * CALL_S: [1] * 9}
