"""AdamW over fp32 master weights; the model itself holds their bf16 copies.

A bf16 trainer keeps its weights twice: masters in high precision, which accumulate updates far below bf16's
resolution, and the bf16 copies that forward and backward use. On a CPU the copies are bf16 *values* in fp32
storage. After every step copy := bf16(master), in place, which also invalidates the quantized experts. Parameters may
be sharded over ranks; the state is always that of whole parameters, so it may be loaded on another number of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import round_bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one call of `MasterWeightAdamW.step` did."""

    norm: float
    """L2 norm over all gradients before clipping; not finite when a gradient is not."""
    is_taken: bool
    """False: the norm was not finite, so masters, moments and copies are as they were."""


class MasterWeightAdamW:
    """AdamW whose state and masters are fp32 (fp64 in control mode) and whose model weights are bf16 values."""

    MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """Names of what a checkpoint holds of a parameter beside its master and step."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        emulates_bf16: bool = True,
        decays_vectors: bool = False,
    ) -> None:
        """Take the model's trainable parameters; masters start as exact copies of them.

        Args:
            model: parameters already hold bf16 values (see `patching.apply`).
            lr: peak learning rate; `step(lr_scale)` multiplies it.
            betas: AdamW's moments.
            weight_decay: decoupled; applied to matrices (2-D and more).
            emulates_bf16: round the copies to bf16 values; False leaves it to the storage dtype.
            decays_vectors: decay norms and biases, too.
        """
        self.lr = lr
        self.emulates_bf16 = emulates_bf16
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.copies = [p for p in model.parameters() if p.requires_grad]
        if not self.copies:
            raise ConfigError("optimizer: the model has no trainable parameter.")
        self.masters = [self._master(p, _master_dtype(p)) for p in self.copies]
        self._copy_of = dict(zip(self.masters, self.copies, strict=True))
        self._least_decayed = 0 if decays_vectors else 2
        self.adamw = self._adamw(betas, weight_decay)

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return torch's parameter groups of the masters: those that decay, and those that do not."""
        decayed = [m for m in self.masters if m.dim() >= self._least_decayed]
        plain = [m for m in self.masters if m.dim() < self._least_decayed]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def _master(self, copy: Tensor, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(copy.detach().clone().to(dtype))

    def _adamw(self, betas: tuple[float, float], weight_decay: float) -> torch.optim.Optimizer:
        is_fused = all(master.is_cuda for master in self.masters)
        return torch.optim.AdamW(
            self.groups(weight_decay), lr=self.lr, betas=betas, fused=True if is_fused else None
        )

    def _set_rate(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr

    def step(self, *, lr_scale: float = 1.0, grad_clip: float = 0.0) -> StepResult:
        """Clip, update the masters, write the bf16 copies, clear the gradients.

        Args:
            lr_scale: multiplies the peak learning rate (the schedule's value).
            grad_clip: largest L2 norm over all gradients; 0 means no clipping.

        Returns:
            The gradient norm before clipping, and whether the step was taken: a non-finite norm skips the
            update (the caller counts it).
        """
        for master, copy in zip(self.masters, self.copies, strict=True):
            master.grad = None if copy.grad is None else copy.grad.to(master.dtype)
            copy.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, grad_clip if grad_clip > 0 else float("inf"))
        is_taken = bool(torch.isfinite(norm))
        if is_taken:
            self._set_rate(self.lr * lr_scale)
            self.adamw.step()
            self._write_copies()
        for master in self.masters:
            master.grad = None
        return StepResult(norm=float(norm), is_taken=is_taken)

    def forget_gradients(self) -> None:
        """Drop what backward passes have added up since the last step."""
        for copy in self.copies:
            copy.grad = None

    @torch.no_grad()
    def _write_copies(self) -> None:
        for master, copy in zip(self.masters, self.copies, strict=True):
            self._write_copy(copy, master)

    def _write_copy(self, copy: Tensor, master: Tensor) -> None:
        copy.copy_(round_bf16(master) if self.emulates_bf16 else master)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return masters and moments by name, for a checkpoint.

        Sharded ones are gathered: every rank must call, and gets what one process would have.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"master.{name}"] = _whole(master.detach())
            for key, value in self._moments(master).items():
                tensors[f"{key}.{name}"] = _whole(value)
        return tensors

    def _moments(self, master: nn.Parameter) -> dict[str, Tensor]:
        """Step and moments of a master; {} before its first step."""
        return {
            key: value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
            for key, value in self.adamw.state.get(master, {}).items()
        }

    def _restore_moments(self, master: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        # a fused step counts on the device, any other in host memory
        where = master.device if self.adamw.defaults.get("fused") else torch.device("cpu")
        self.adamw.state[master] = {
            key: (value.to(where) if key == "step" else value.to(master.device)).clone()
            for key, value in moments.items()
        }

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned, on any number of ranks, each of which is given the whole tensors.

        Every master must be there, and no unknown name.

        Raises:
            ConfigError: names are missing or unexpected (both are listed).
        """
        masters = {f"master.{name}" for name in self.names}
        found = {key for key in tensors if key.startswith("master.")}
        if masters != found:
            raise ConfigError(
                f"optimizer state does not fit the model: missing {sorted(masters - found)[:5]}, "
                f"unexpected {sorted(found - masters)[:5]}. Resume with the model that the run was started with."
            )
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(_laid_out(tensors[f"master.{name}"], like=master))
            moments = {
                key: _laid_out(tensors[f"{key}.{name}"], like=master)
                for key in self.MOMENTS
                if f"{key}.{name}" in tensors
            }
            if f"step.{name}" in tensors:
                moments["step"] = tensors[f"step.{name}"]
            if moments:
                self._restore_moments(master, moments)
        self._write_copies()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid_out(whole: Tensor, *, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`; the tensor itself where that is not sharded."""
    if not isinstance(like, DTensor):
        return whole
    # no source rank: every rank cuts its own copy, and nothing travels
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
