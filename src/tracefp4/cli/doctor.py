"""`tracefp4 doctor`: versions, devices, and which backend every op would use, and why."""

import os
import platform

import typer

from tracefp4.cli.options import JsonOption

PACKAGES = (
    "tracefp4",
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "reasoning-gym",
    "math-verify",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "pyzmq",
    "tensorboard",
    "wandb",
)
"""Distributions that the project imports; from `cuda-core` on, those of its extras."""


def doctor(as_json: JsonOption = False) -> None:
    """Show versions, device capability and the backend of every op."""
    import json

    from tracefp4.cli.progress import print_table
    from tracefp4.diagnostics.report import Table

    findings = {"versions": _versions(), "devices": _devices(), "ops": _ops()}
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
        return
    for title, rows in findings.items():
        header = tuple(rows[0]) if rows else ("nothing found",)
        print_table(Table(title=title, header=header, rows=tuple(tuple(row.values()) for row in rows)))


def _versions() -> list[dict[str, str]]:
    import importlib.metadata

    found = [{"package": "python", "version": platform.python_version()}]
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        found.append({"package": name, "version": version})
    return found


def _devices() -> list[dict[str, str]]:
    import torch

    cpu = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    capability = torch.backends.cpu.get_cpu_capability()
    found = [{"device": "cpu", "name": cpu, "capability": capability, "memory": ""}]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        memory = f"{card.total_memory / 1024**3:.1f} GiB"
        found.append(
            {
                "device": f"cuda:{index}",
                "name": card.name,
                "capability": f"{card.major}.{card.minor}",
                "memory": memory,
            }
        )
    return found


def _ops() -> list[dict[str, str]]:
    import torch

    from tracefp4.ops.backend import explain

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [row for device in devices for row in explain(device)]
