"""What sequences remember in layers without K and V: one slot per running sequence, over all gated delta layers.

A state stands for all positions so far. Unlike pages it cannot be cut back to an earlier position, shared, or written
from a record: it is carried along, copied for a sibling, moved out to host memory while its sequence rests, or begun
again from zeros. A state that rests keeps its slot until another one needs it, longest rest first, and comes back with
the bytes that it had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import ConfigError
from tracefp4.ops.gated_delta import DeltaState

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """Sizes of a pool."""

    layers: tuple[int, ...]
    """Decoder layers that have a state."""
    num_slots: int
    """Sequences that can run at once."""
    num_heads: int
    """Hv, value heads."""
    value_dim: int
    """Dv."""
    key_dim: int
    """Dk."""
    width: int
    """W, channels of the convolution."""
    num_taps: int
    """K, tokens that the convolution sees."""

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in self.__slots__ if name != "layers"}
        wrong = {
            name: number for name, number in numbers.items() if number < (2 if name == "num_taps" else 1)
        }
        if wrong:
            raise ConfigError(
                f"A pool of states has positive sizes and at least 2 taps; got {wrong}. At least 1 each. Correct the "
                "engine's sizes."
            )


@dataclass(eq=False, kw_only=True, slots=True)
class State:
    """What one sequence remembers."""

    slot: int | None
    """Where it is in the pool, or None while its bytes are in host memory."""
    is_running: bool
    """True while it must stay in its slot."""
    saved: tuple[Tensor, ...] | None = None
    """Its bytes in host memory while `slot` is None; nobody writes them, so that siblings may have the same."""


class StatePool:
    """States of all layers, and who has which slot.

    Args:
        shape: sizes.
        inputs: dtype of the convolution's last inputs, that of the model's activations.
        matrices: dtype of the matrices: bfloat16 halves the bytes of a decode step, float32 is what a trainer computes
            with, float64 is for comparisons.
        device: where the states live; the device of the weights.
    """

    def __init__(
        self, shape: StateShape, *, inputs: torch.dtype, matrices: torch.dtype, device: torch.device = CPU
    ) -> None:
        self.shape = shape
        self.device = device
        self.num_swapped_out = 0
        """States moved to host memory so far."""
        count = (len(shape.layers), shape.num_slots)
        self._sizes = (
            ((*count, shape.num_taps - 1, shape.width), inputs),
            ((*count, shape.num_heads, shape.value_dim, shape.key_dim), matrices),
        )
        self.layers: dict[int, DeltaState] = {}
        """What the ops take, by decoder layer; empty while the memory is given back."""
        self.make_again()
        self._free = list(range(shape.num_slots - 1, -1, -1))
        self._resting: dict[
            State, None
        ] = {}  # those that have a slot, in the order in which they came to rest

    @property
    def num_available(self) -> int:
        """Slots that `begin` and `resume` can hand out; a state that resumes into its own slot takes one of them."""
        return len(self._free) + len(self._resting)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state over all layers."""
        return sum(math.prod(size) // size[1] * dtype.itemsize for size, dtype in self._sizes)

    def give_back(self) -> None:
        """Give the memory back to torch: every state moves to host memory; none may be running."""
        while self._resting:
            self._move_out()
        assert len(self._free) == self.shape.num_slots, "states of running sequences stay in their slots"
        self.layers = {}
        self._conv = self._matrices = torch.empty(0, device=self.device)

    def make_again(self) -> None:
        """Have memory for all slots; nothing happens where it is there."""
        if self.layers:
            return
        conv, matrices = (torch.zeros(size, dtype=dtype, device=self.device) for size, dtype in self._sizes)
        self._conv, self._matrices = conv, matrices
        self.layers = {
            layer: DeltaState(*parts)
            for layer, *parts in zip(self.shape.layers, self._conv, self._matrices, strict=True)
        }

    def begin(self) -> State:
        """Return a running state of no positions: zeros."""
        slot = self._take_slot()
        for part in self._parts():
            part[:, slot] = 0
        return State(slot=slot, is_running=True)

    def fork(self, state: State, count: int) -> list[State]:
        """Return resting copies, in free slots as long as there are any, the others in host memory, where they share
        their bytes.

        Args:
            state: in a slot or not.
            count: copies, at least 0.
        """
        copies = [self._copy(state) for _ in range(0 if state.slot is None else min(count, len(self._free)))]
        saved = state.saved
        if len(copies) < count and state.slot is not None:
            saved = self._save(state.slot)
        return copies + [State(slot=None, is_running=False, saved=saved) for _ in range(count - len(copies))]

    def rest(self, state: State) -> None:
        """Stop running: the state may leave its slot now, with its bytes."""
        assert state.is_running
        state.is_running = False
        self._resting[state] = None

    def resume(self, state: State) -> None:
        """Run again: the state is in a slot, with the bytes that it had."""
        assert not state.is_running
        state.is_running = True
        self._resting.pop(state, None)
        if state.slot is not None:
            return
        saved, state.saved = state.saved, None
        assert saved is not None, "a released state does not come back"
        state.slot = self._take_slot()
        for part, own in zip(self._parts(), saved, strict=True):
            part[:, state.slot] = own.to(self.device)

    def release(self, state: State) -> None:
        """Give the state up, running or not."""
        self._resting.pop(state, None)
        if state.slot is not None:
            self._free.append(state.slot)
        state.slot, state.saved, state.is_running = None, None, False

    def _copy(self, state: State) -> State:
        copy = State(slot=self._free.pop(), is_running=False)
        for part in self._parts():
            part[:, copy.slot] = part[:, state.slot]
        self._resting[copy] = None
        return copy

    def _take_slot(self) -> int:
        if not self._free:
            self._move_out()
        return self._free.pop()

    def _move_out(self) -> None:
        """Move the state that has rested longest to host memory."""
        assert self._resting, "callers ask num_available first"
        state = next(iter(self._resting))
        del self._resting[state]
        assert state.slot is not None
        state.saved = self._save(state.slot)
        self._free.append(state.slot)
        state.slot = None
        self.num_swapped_out += 1

    def _save(self, slot: int) -> tuple[Tensor, ...]:
        return tuple(part[:, slot].to("cpu", copy=True) for part in self._parts())

    def _parts(self) -> tuple[Tensor, Tensor]:
        return self._conv, self._matrices
