"""Where metrics go: JSON lines in the run directory always, TensorBoard and Weights & Biases when asked for.

A resumed run continues in the same places: TensorBoard hides what a killed process wrote after the last
checkpoint, and W&B gets the id that lies in the run directory. W&B keeps the first value that it got for a
step, so steps taken twice show the killed process's numbers (equal ones, on a CPU).
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tracefp4.errors import ConfigError
from tracefp4.rl.config import RunConfig
from tracefp4.rl.rundir import RunDirectory

OnStep = Callable[[Mapping[str, Any]], None]


class MetricWriter:
    """Writes one row per step to every configured place."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, *, on_step: OnStep | None, first_step: int = 0
    ) -> None:
        """Open the writers.

        Args:
            config: names them in [run].
            directory: of the run.
            on_step: called with every row, or None.
            first_step: step of the first row, above 0 in a resumed run; TensorBoard events from there on that an
                earlier process wrote are hidden.

        Raises:
            ConfigError: TensorBoard or W&B was asked for and is not installed.
        """
        self._directory, self._on_step = directory, on_step
        self._tensorboard = _tensorboard(directory, first_step=first_step) if config.run.tensorboard else None
        self._wandb = _wandb(config, directory) if config.run.wandb else None

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one step's metrics; `step` is the 0-based index of the step."""
        self._directory.append_metrics(row)
        numbers = {
            key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"
        }
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=row["step"])
        if self._on_step is not None:
            self._on_step(row)

    def close(self) -> None:
        """Flush and close the optional writers."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tensorboard(directory: RunDirectory, *, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "run.tensorboard needs the tensorboard package: pip install tensorboard."
        ) from error
    return SummaryWriter(log_dir=str(directory.path / "tensorboard"), purge_step=first_step)


def _wandb(config: RunConfig, directory: RunDirectory) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("run.wandb needs the wandb package: pip install wandb, then log in.") from error
    return wandb.init(
        project="tracefp4",
        dir=str(directory.path),
        name=directory.path.name,
        id=_wandb_id(directory),
        resume="allow",
    )


def _wandb_id(directory: RunDirectory) -> str:
    """The W&B id of this run directory, drawn once; it lies in the directory, so it is moved and deleted with it."""
    if not (directory.path / "wandb.json").exists():
        directory.write_json("wandb.json", {"id": uuid.uuid4().hex})
    return str(directory.read_json("wandb.json")["id"])
