"""A run directory: resolved config, manifest, metrics as JSON lines, records; one owner, nothing overwritten.

Layout: config.json, manifest.json, metrics.jsonl, checkpoints/step_000010/, records/. A directory that already
holds a run is refused unless the run is resumed; resuming cuts metrics after the checkpoint's step, so a
killed step leaves no trace. config.json is written last when a run starts: a directory without it holds no run
yet, and a run that was killed that early starts again.
"""

import errno
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import tracefp4
from tracefp4.errors import ConfigError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "reasoning-gym")


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        """Create the directory, or open it to resume.

        Raises:
            ConfigError: it holds a run and `resume` is False; `resume` is True and it does not exist or holds
                something that is no run; it cannot be made.
        """
        self.path = Path(path)
        if resume and not self.path.is_dir():
            raise ConfigError(
                f"--resume: {self.path} holds no run (no such directory). Start it without --resume."
            )
        self.is_begun = (self.path / "config.json").exists()
        if self.is_begun and not resume:
            raise ConfigError(
                f"run.dir: {self.path} already holds a run. Use --resume to continue it, or name another "
                "directory."
            )
        others = _foreign_names(self.path) if not self.is_begun and self.path.is_dir() else []
        if others:
            raise ConfigError(
                f"run.dir: {self.path} holds no run (no config.json) but {', '.join(others[:3])}. Name the "
                "directory of the run, or a new or empty one for a new run."
            )
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(self.path, 0, error) from error
        self.checkpoints = self.path / "checkpoints"
        self.records = self.path / "records"

    @contextmanager
    def removed_if_refused(self) -> Iterator[None]:
        """Remove what this start made, if the run is refused before a file is in it; what was there stays."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                for path in self._made:
                    path.rmdir()
            raise

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        """Write one JSON file atomically: temporary file, fsync, rename."""
        write_atomically(self.path / name, (json.dumps(content, indent=2, default=str) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one JSON file of the run."""
        return dict(json.loads((self.path / name).read_text(encoding="utf-8")))

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Append one line to metrics.jsonl and flush it."""
        line = json.dumps(row, default=float) + "\n"
        try:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise disk_error(self.path / "metrics.jsonl", len(line), error) from error

    def cut_metrics(self, *, first_step: int) -> None:
        """Drop metrics of steps >= first_step (and a torn last line) before a run is resumed."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row.get("step", -1) < first_step:
                kept.append(line + "\n")
        write_atomically(path, "".join(kept).encode())


def _foreign_names(path: Path) -> list[str]:
    """What lies in a directory and was not left by a run that was killed before its config was written."""
    own = {"manifest.json", ".manifest.json.tmp", ".config.json.tmp", "metrics.jsonl"}
    own |= {"tensorboard", "wandb", "wandb.json", "records"}
    return sorted({entry.name for entry in path.iterdir()} - own)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it is either the old one or the new one, also after a crash or a full disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, len(data), error) from error


def is_disk_full(error: BaseException) -> bool:
    """Say whether an error means a full disk (or quota), also one that a library in Rust reports as text."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "No space left on device" in str(error)


def disk_error(path: Path, num_bytes: int, error: BaseException) -> ConfigError:
    """Turn a failed write into an error that says what could not be written and what to do."""
    cause = "the disk is full" if is_disk_full(error) else str(error)
    return ConfigError(
        f"{path} could not be written ({num_bytes} bytes): {cause}. What was written before is intact. "
        "Free space or fix the path, then continue with --resume."
    )


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version(), "tracefp4": tracefp4.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def hardware() -> dict[str, object]:
    """Return what the run was measured on."""
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [
            line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")
        ]
        model = lines[0].partition(":")[2].strip() if lines else model
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": model, "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(), "gpu": gpu}


def weights_hash(tensors: Mapping[str, object]) -> str:
    """Return 32 hex characters over named tensors (names, dtypes, shapes and bytes), in order of name."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        assert isinstance(tensor, torch.Tensor)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
