"""Where Adam's moments live and in how many bits: three kinds of one optimizer, told apart by their memory alone.

    float32   masters 4, moments 8 bytes a parameter on the device
    8bit      masters 4, moments 2 (blocks of 256 values share a scale; torchao's implementation)
    host      12 in pinned host memory, none on the device; every step streams them through it

All of them keep float32 masters. A checkpoint holds float32 moments, or the bytes of 8-bit ones: rounded once more they
would not be the same.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tracefp4.errors import ConfigError
from tracefp4.rl.optimizer import MasterWeightAdamW, StepResult

States = Literal["float32", "8bit", "host"]
_EPSILON = 1e-8
_NORM_EPSILON = 1e-6


def check_states(states: States, device: torch.device) -> None:
    """Refuse a kind that cannot be had here, before anything is loaded.

    Raises:
        ConfigError: `8bit` without torchao, or `host` where the model is in host memory itself.
    """
    if states == "8bit" and find_spec("torchao") is None:
        raise ConfigError(
            "train.optimizer_states: got '8bit', and torchao is not installed; allowed without it: 'float32', 'host'. "
            "Install the extra: pip install 'tracefp4[adam8bit]'."
        )
    if states == "host" and device.type == "cpu":
        raise ConfigError(
            "train.optimizer_states: got 'host' with a model on the CPU, whose memory that is already; allowed there: "
            "'float32', '8bit'. Set train.optimizer_states = \"float32\"."
        )


def build_optimizer(
    model: nn.Module,
    *,
    states: States,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    emulates_bf16: bool,
) -> MasterWeightAdamW:
    """Return the optimizer of one kind; arguments as `MasterWeightAdamW`.

    Raises:
        ConfigError: the model has no trainable parameter.
    """
    kinds = {"float32": MasterWeightAdamW, "8bit": EightBitAdamW, "host": HostAdamW}
    return kinds[states](model, lr=lr, betas=betas, weight_decay=weight_decay, emulates_bf16=emulates_bf16)


class EightBitAdamW(MasterWeightAdamW):
    """Moments of 8 bits, for tensors of at least 4096 values in whole blocks of 256; float32 for others."""

    MOMENTS = tuple(
        f"{name}{part}" for name in MasterWeightAdamW.MOMENTS for part in ("", "_codes", "_scale")
    )

    def _adamw(self, betas: tuple[float, float], weight_decay: float) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        made: torch.optim.Optimizer = AdamW8bit(self.groups(weight_decay), lr=self.lr, betas=betas)
        return made

    def _set_rate(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"].fill_(lr)  # its update is compiled, and would be again for another number

    def _moments(self, master: nn.Parameter) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        held: dict[str, Any] = dict(super()._moments(master))
        for name, value in held.items():
            if hasattr(value, "codes"):
                found |= {f"{name}_codes": value.codes, f"{name}_scale": value.scale}
            else:
                found[name] = value
        return found

    def _restore_moments(self, master: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        state = {"step": moments["step"].cpu().clone()}
        for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            # the library's own choice of 8 or 32 bits
            made = state[name] = self.adamw._new_buffer(master, is_signed)  # type: ignore[attr-defined]
            if name in moments:
                made.copy_(moments[name])
            else:
                made.codes.copy_(moments[f"{name}_codes"])
                made.scale.copy_(moments[f"{name}_scale"])
        self.adamw.state[master] = state


class HostAdamW(MasterWeightAdamW):
    """Masters and moments in pinned host memory: a step takes one parameter's at a time to its device and back."""

    def _master(self, copy: Tensor, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(_pinned(copy.detach().to(dtype=dtype, device="cpu"), copy.device))

    @torch.no_grad()
    def step(self, *, lr_scale: float = 1.0, grad_clip: float = 0.0) -> StepResult:
        """As `MasterWeightAdamW.step`; gradients are never held in float32 all at once."""
        norms = [
            torch.linalg.vector_norm(copy.grad, dtype=master.dtype)
            for copy, master in zip(self.copies, self.masters, strict=True)
            if copy.grad is not None
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), device="cpu")]))
        is_taken = bool(torch.isfinite(norm))
        if is_taken:
            limit = grad_clip if grad_clip > 0 else float("inf")
            scale = (limit / (norm + _NORM_EPSILON)).clamp(max=1.0)
            for group in self.adamw.param_groups:
                for master in group["params"]:
                    self._update(master, scale, lr=self.lr * lr_scale, group=group)
            if norm.is_cuda:
                torch.cuda.synchronize(norm.device)  # what comes back is whole before anyone reads it
        self.forget_gradients()
        return StepResult(norm=float(norm), is_taken=is_taken)

    def _update(self, master: nn.Parameter, scale: Tensor, *, lr: float, group: dict[str, object]) -> None:
        """Update one master, its moments, and the model's copy."""
        copy = self._copy_of[master]
        if copy.grad is None:
            return
        state = self.adamw.state[master]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"] = _pinned(torch.zeros_like(master), copy.device)
            state["exp_avg_sq"] = _pinned(torch.zeros_like(master), copy.device)
        held = (master.data, state["exp_avg"], state["exp_avg_sq"])
        there = [part.to(copy.device, non_blocking=True) for part in held]
        beta1, beta2 = group["betas"]  # type: ignore[misc]
        adamw(
            there[:1],
            [copy.grad.to(master.dtype).mul_(scale)],
            there[1:2],
            there[2:],
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=beta1,  # type: ignore[has-type]
            beta2=beta2,  # type: ignore[has-type]
            lr=lr,
            weight_decay=float(group["weight_decay"]),  # type: ignore[arg-type]
            eps=_EPSILON,
            maximize=False,
        )
        self._write_copy(copy, there[0])
        for part, new in zip(held, there, strict=True):
            part.copy_(new, non_blocking=True)

    def _restore_moments(self, master: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        device = self._copy_of[master].device
        self.adamw.state[master] = {
            name: value.clone() if name == "step" else _pinned(value.cpu(), device)
            for name, value in moments.items()
        }


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    """A copy in host memory; pinned where a GPU is to read it."""
    return values.pin_memory() if device.type == "cuda" else values.clone()
