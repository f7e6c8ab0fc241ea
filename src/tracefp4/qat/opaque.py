"""What torch.compile must call and not look into.

Sites ask an ambient session that no graph can hold, count what they did, and keep copies of the weights; a compiler
that traced them would freeze one pass's answers into a graph, or repeat them in the backward where another session
runs. So attention, router and experts of a patched model are opaque, and so is the entry into a layer's session: a
compiled model breaks its graph there (four times a decoder layer), runs them as they are, and gives the same bytes.
What lies between (linears, norms, rotary embedding, residual additions, emulated bf16 rounding) is compiled, once for
all layers. In native bf16 a code generator that keeps the intermediates of a fused kernel in float32 computes another
function, as any other kernel does; inductor keeps bf16's roundings with `emulate_precision_casts`. This module never
compiles anything itself.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F) -> F:
    """Return `function` as compilers see it: called, never traced, with everything that it calls.

    Args:
        function: any callable; the same one gives the same result, so guards on it hold from layer to layer.
    """
    return _disabled(function, True)  # type: ignore[return-value]


def opaque_frame(function: F) -> F:
    """Return `function` never traced itself, while what it calls is compiled; otherwise as `opaque`."""
    return _disabled(function, False)  # type: ignore[return-value]


@cache
def _disabled(function: Callable[..., Any], is_recursive: bool) -> Callable[..., Any]:
    # called while a model is patched, not at import: it loads the compiler, which takes a second
    return torch.compiler.disable(function, recursive=is_recursive, reason="it asks the running session")
