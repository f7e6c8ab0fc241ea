"""States of sequences: every one keeps its bytes, wherever it is, until it is released."""

import random

import pytest
import torch
from tests.assertions import assert_bitwise

from tracefp4.errors import ConfigError
from tracefp4.kvcache import StatePool, StateShape

SHAPE = StateShape(layers=(0, 1, 3), num_slots=3, num_heads=2, value_dim=4, key_dim=8, width=24, num_taps=4)


def pool(**changes):
    sizes = {name: getattr(SHAPE, name) for name in StateShape.__slots__}
    return StatePool(StateShape(**sizes | changes), inputs=torch.bfloat16, matrices=torch.float32)


def write(states, state, number):
    for layer in SHAPE.layers:
        for part in states.layers[layer]:
            part[state.slot] = number + layer


def numbers(states, state):
    """What a running state holds, one number for every layer and part."""
    found = [part[state.slot].unique().tolist() for layer in SHAPE.layers for part in states.layers[layer]]
    assert all(len(values) == 1 for values in found)
    return [value for (value,) in found]


def holds(number):
    return [float(number + layer) for layer in SHAPE.layers for _ in range(2)]


def test_layers_are_views_that_kernels_take():
    states = pool()
    assert set(states.layers) == {0, 1, 3}
    for layer in states.layers.values():
        assert layer.conv.shape == (3, 3, 24) and layer.recurrent.shape == (3, 2, 4, 8)
        assert layer.conv.is_contiguous() and layer.recurrent.is_contiguous()
    assert states.state_bytes == 3 * (3 * 24 * 2 + 2 * 4 * 8 * 4)


def test_a_new_state_is_zero_whoever_had_the_slot():
    states = pool(num_slots=1)
    first = states.begin()
    write(states, first, 5)
    states.layers[0].recurrent[first.slot] = float("nan")
    states.release(first)
    assert numbers(states, states.begin()) == [0.0] * 6


def test_a_state_comes_back_with_its_bytes_whether_it_had_to_leave_or_not():
    states = pool(num_slots=2)
    first, second = states.begin(), states.begin()
    write(states, first, 10)
    write(states, second, 20)
    states.rest(first)
    states.resume(first)
    assert numbers(states, first) == holds(10) and states.num_swapped_out == 0
    states.rest(second)
    states.rest(first)
    third = states.begin()  # takes the slot of the one that rests longest
    assert second.slot is None and first.slot is not None and states.num_swapped_out == 1
    write(states, third, 30)
    states.rest(third)
    states.resume(second)  # now the first one rests longest
    assert first.slot is None and third.slot is not None and states.num_swapped_out == 2
    assert numbers(states, second) == holds(20) and second.saved is None
    states.release(second)
    states.resume(first)
    states.resume(third)
    assert (numbers(states, first), numbers(states, third)) == (holds(10), holds(30))


def test_states_outlive_the_memory_of_their_slots():
    states = pool(num_slots=2)
    first, second, size = states.begin(), states.begin(), states.state_bytes
    write(states, first, 10)
    states.rest(first)
    with pytest.raises(AssertionError, match="running"):
        states.give_back()
    states.release(second)
    states.give_back()
    assert states.layers == {} and states.state_bytes == size and states.num_available == 2
    assert not any(part.numel() for part in states._parts())
    (sibling,) = states.fork(first, 1)
    states.make_again()
    assert numbers(states, states.begin()) == [0.0] * 6
    states.resume(sibling)
    assert numbers(states, sibling) == holds(10)
    conv = states._conv
    states.make_again()
    assert states._conv is conv


def test_a_fork_is_a_copy_in_a_free_slot_or_in_host_memory():
    states = pool(num_slots=2)
    first = states.begin()
    write(states, first, 7)
    near, far, beyond = states.fork(first, 3)
    assert near.slot is not None and far.slot is None and not near.is_running
    assert far.saved is beyond.saved and states.fork(first, 0) == []
    write(states, first, 50)
    states.release(first)
    for copy in (far, near):
        states.resume(copy)
    assert numbers(states, near) == numbers(states, far) == holds(7)
    write(states, near, 60)
    assert numbers(states, far) == holds(7)


def test_siblings_in_host_memory_share_bytes_that_nobody_writes():
    states = pool(num_slots=1)
    first = states.begin()
    write(states, first, 7)
    (one,) = states.fork(first, 1)
    (other,) = states.fork(one, 1)
    assert other.saved is one.saved
    states.release(first)
    states.resume(one)
    write(states, one, 8)
    states.release(one)
    states.resume(other)
    assert numbers(states, other) == holds(7)


def test_released_states_leave_their_slots_and_their_bytes():
    states = pool()
    running, resting = states.begin(), states.begin()
    states.rest(resting)
    (away,) = states.fork(running, 1)
    for state in (running, resting, away):
        states.release(state)
        assert (state.slot, state.saved, state.is_running) == (None, None, False)
    assert states.num_available == 3 and len({states.begin().slot for _ in range(3)}) == 3


@pytest.mark.parametrize("seed", range(5))
def test_any_history_keeps_every_state(seed):
    chance, states, expected = random.Random(seed), pool(), {}
    for step in range(300):
        running = [state for state in expected if state.is_running]
        resting = [state for state in expected if not state.is_running]
        action = chance.choice(("begin", "fork", "rest", "resume", "release", "write"))
        if action == "begin" and states.num_available:
            expected[states.begin()] = None
        elif action == "fork" and expected:
            source = chance.choice(list(expected))
            expected |= dict.fromkeys(states.fork(source, chance.randrange(4)), expected[source])
        elif action == "rest" and running:
            states.rest(chance.choice(running))
        elif action == "resume" and resting and states.num_available:
            states.resume(chance.choice(resting))
        elif action == "release" and expected:
            gone = chance.choice(list(expected))
            states.release(gone)
            del expected[gone]
        elif action == "write" and running:
            state = chance.choice(running)
            write(states, state, step % 100)  # bf16 holds such numbers
            expected[state] = step % 100
        in_slots = [state.slot for state in expected if state.slot is not None]
        assert len(in_slots) == len(set(in_slots))
        assert states.num_available == 3 - sum(state.is_running for state in expected)
        for state, number in expected.items():
            if state.is_running:
                assert numbers(states, state) == ([0.0] * 6 if number is None else holds(number))


def test_bytes_are_kept_bit_for_bit():
    states = pool(num_slots=1)
    state = states.begin()
    for layer in states.layers.values():
        for part in layer:
            part.copy_(torch.randn(part.shape))
    states.layers[1].recurrent[0, 0, 0, 0] = float("nan")
    before = [part.clone() for layer in states.layers.values() for part in layer]
    states.rest(state)
    states.release(states.begin())
    states.resume(state)
    for part, was in zip((p for layer in states.layers.values() for p in layer), before, strict=True):
        assert_bitwise(part, was)


def test_sizes_that_are_none_are_refused():
    for wrong in ({"num_slots": 0}, {"num_taps": 1}, {"key_dim": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            pool(**wrong)
