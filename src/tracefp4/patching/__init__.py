"""Turn an existing model into ours: which modules, under which names, by a plan that is data.

The names below are imported on first use: the rules and the arithmetic of a plan (`rules`, `shapes`, `budget`)
need no torch, and importing them must not import it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Applied": "tracefp4.patching.apply",
    "Plan": "tracefp4.patching.plan",
    "PlanRules": "tracefp4.patching.rules",
    "apply": "tracefp4.patching.apply",
    "calibrate": "tracefp4.patching.calibrate",
    "plan": "tracefp4.patching.plan",
}

__all__ = ["Applied", "Plan", "PlanRules", "apply", "calibrate", "plan"]

if TYPE_CHECKING:
    from tracefp4.patching.apply import Applied, apply
    from tracefp4.patching.calibrate import calibrate
    from tracefp4.patching.plan import Plan, plan
    from tracefp4.patching.rules import PlanRules


class _Room(ModuleType):
    """This package: `plan` and `apply` are the functions, although files have these names too.

    Importing a submodule assigns it to its package, which would hide a function imported on first use.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Room


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"tracefp4.patching has no name {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
