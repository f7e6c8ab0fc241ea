"""Recomputed decoder layers see the session of their own forward pass, whoever recomputes them, when and where.

Under activation checkpointing a layer's forward runs again during backward: after `with replay(...)` was left, while
another micro-batch is running, or on a thread of its own. Rounding to nearest there, or by another micro-batch's
record, would give gradients of a function that was never evaluated. So the session travels with the layer's
arguments: the model's first module puts the running session among the keyword arguments that reach every decoder
layer, a checkpoint keeps a layer's arguments for its recomputation whatever its kind (reentrant or not, transformers'
own or a wrapper's), and the layer runs under the session that it was given. The alternative, binding the checkpoint
function, depends on who installs it and when. This module never enables checkpointing and opens no session.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from tracefp4.errors import ConfigError
from tracefp4.guidance.session import current, resumed
from tracefp4.qat.opaque import opaque, opaque_frame

SESSION_ARGUMENT = "tracefp4_session"

Undo = Callable[[], None]


def carry_session(model: nn.Module) -> list[Undo]:
    """Make every decoder layer of `model` run under the session of the forward pass that called it.

    A layer that is called by itself, without its model, runs under the current session.

    Args:
        model: a transformers causal LM whose decoder passes unknown keyword arguments to its layers.

    Returns:
        Callables that take everything back.

    Raises:
        ConfigError: the model has no decoder layers, or no module whose list they are in; nothing was changed then.
    """
    layers = [module for module in model.modules() if _is_layer(module)]
    decoders = [
        module
        for module in model.modules()
        if not _is_layer(module)
        and any(_is_layer(layer) for child in module.children() for layer in child.children())
    ]
    if not layers or not decoders:
        raise ConfigError(
            f"Sessions cannot travel with the layers of {type(model).__name__}; got {len(layers)} modules whose class "
            f"ends in DecoderLayer and {len(decoders)} decoders with a list of them. There must be at least one of "
            "each, or layers that are recomputed would round to nearest. Patch a transformers causal LM of a supported "
            "family."
        )
    undo: list[Undo] = []
    for layer in layers:
        layer.forward = opaque_frame(_layer_forward).__get__(layer)
        undo.append(lambda m=layer: delattr(m, "forward"))  # type: ignore[misc]
    for decoder in decoders:
        hook = decoder.register_forward_pre_hook(opaque(_give_session), with_kwargs=True)
        undo.append(hook.remove)
    return undo


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DecoderLayer")


def _give_session(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, SESSION_ARGUMENT: current()}


def _layer_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if SESSION_ARGUMENT not in kwargs:
        return type(self).forward(self, *args, **kwargs)
    with resumed(kwargs.pop(SESSION_ARGUMENT)):
        return type(self).forward(self, *args, **kwargs)
