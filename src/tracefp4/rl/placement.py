"""Where a run computes and in which arithmetic: read from a recipe once, before anything is loaded.

Engine and trainer share both: a record says what one arithmetic rounded to. This module moves nothing itself.
"""

from dataclasses import dataclass

import torch

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED, NATIVE, Arithmetic
from tracefp4.rl.config import ModelConfig

LEAST_CAPABILITY = (8, 0)
"""The first GPUs with bf16 matrix units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Device and arithmetic of engine and trainer."""

    device: torch.device
    """Of every tensor that a model computes with; samples and records stay in host memory."""
    arithmetic: Arithmetic
    """EMULATED or NATIVE."""

    def summary(self) -> dict[str, str]:
        """Return what a manifest keeps: the kind of device and the arithmetic's name."""
        return {"device": self.device.type, "arithmetic": self.arithmetic.name}


ON_CPU = Placement(device=torch.device("cpu"), arithmetic=EMULATED)
"""What a machine without a GPU gets, and what manifests without an entry mean."""


def placement_of(config: ModelConfig) -> Placement:
    """Return device and arithmetic of a recipe's [model] table.

    Raises:
        ConfigError: a GPU that is not there, or `native` on one without bf16.
    """
    device = _device(config.device)
    if config.arithmetic == "auto":
        arithmetic = EMULATED if device.type == "cpu" else NATIVE
    else:
        arithmetic = NATIVE if config.arithmetic == "native" else EMULATED
    if arithmetic is NATIVE and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < LEAST_CAPABILITY:
            raise ConfigError(
                f"model.arithmetic: native needs bf16 matrix units; got compute capability {found[0]}.{found[1]} of "
                f"{device}. Allowed there is 'emulated'. Set model.arithmetic = \"emulated\", or use another GPU."
            )
    return Placement(device=device, arithmetic=arithmetic)


def check_resumed(before: dict[str, str] | None, now: Placement) -> None:
    """Refuse to continue a run elsewhere: its records, and what `auto` means, would be other ones.

    Args:
        before: `Placement.summary` in the run's manifest; None: it has none.
        now: of the process that resumes.

    Raises:
        ConfigError: another kind of device or arithmetic.
    """
    started = ON_CPU.summary() if before is None else before
    if started != now.summary():
        raise ConfigError(
            f"--resume: the run was started on {started['device']} in {started['arithmetic']} arithmetic; got "
            f"{now.device.type} and {now.arithmetic.name} here. Only the same is allowed. Resume on such a device, set "
            "model.device and model.arithmetic to what the run had, or start a new run."
        )


def _device(name: str) -> torch.device:
    num_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if num_found else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= num_found:
        allowed = "'cpu'" if num_found == 0 else f"'cpu', or 'cuda:0' to 'cuda:{num_found - 1}'"
        raise ConfigError(
            f"model.device: got {name!r}, and torch {torch.__version__} finds {num_found} CUDA devices; allowed: "
            f"'auto', {allowed}. Change it in the recipe or with --set, or install a torch with CUDA."
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
