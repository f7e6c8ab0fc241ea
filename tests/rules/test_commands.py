"""The command line is frozen: adding, renaming or removing an option is a deliberate change to this list."""

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tracefp4.cli import main

ROOT = Path(__file__).parents[2]

OPTIONS = {
    "demo": ["--out", "--seconds", "--seed", "--size"],
    "train": ["--resume", "--set", "RECIPE"],
    "eval": ["--items", "--json", "--mode", "--pass-at", "--recipe", "--set", "CHECKPOINT"],
    "generate": ["--chat", "--max-tokens", "--mode", "--samples", "--seed", "--temperature", "CHECKPOINT", "PROMPTS"],
    "plan": [
        "--all-modules", "--batch", "--card", "--codec", "--context", "--exclude", "--json", "--layers",
        "--sites", "MODEL",
    ],
    "report": ["--out", "RUN"],
    "quantize": [
        "--activations", "--calibration", "--exclude", "--include", "--json", "--layout", "--max-shard-size",
        "--method", "--overwrite", "--scheme", "CHECKPOINT", "OUT",
    ],
    "export": [
        "--activations", "--calibration", "--json", "--layout", "--max-shard-size", "--overwrite", "OUT", "RUN",
    ],
    "import": ["--dequantize", "--json", "--layout", "--max-shard-size", "--overwrite", "CHECKPOINT", "OUT"],
    "calibrate": ["--device", "--max-tokens", "--sequence-length", "CHECKPOINT", "OUT", "TEXTS"],
    "doctor": ["--json"],
    "study": ["--out", "--seeds", "--steps", "--warm-steps", "--workers", "WHICH"],
    "store serve": ["--bind", "--key", "--max-queue-mb", "--when-full", "PATH"],
    "store key": ["PATH"],
    "store check": ["--json", "--rebuild", "PATH"],
    "bench engine": [
        "--context", "--json", "--layers", "--memory", "--only", "--out", "--page-size", "--profile",
        "--random-weights", "--seconds", "--state-dtype", "--steps",
    ],
    "bench gates": ["--json", "--results"],
    "bench trainer": ["--device", "--json", "--layers", "--model", "--out", "--seed"],
    "bench kernels": ["--json", "--only", "--out", "--seconds"],
    "bench cpu": ["--json", "--out", "--rounds", "--rows", "--width"],
    "bench guidance": [
        "--codecs", "--json", "--model", "--no-sweep", "--out", "--save-model", "--seed", "--size",
        "--train-seconds", "--update",
    ],
}  # fmt: skip

MAX_HELP_S = 0.5
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
FENCE = re.compile(r"```(?:bash|sh|console|shell)?\n(.*?)```", flags=re.S)


def _commands() -> list[tuple[str, Any]]:
    """Every command by its name, those of a group as `group command`."""
    found = []
    for name, command in get_command(main.app).commands.items():  # type: ignore[attr-defined]
        parts = getattr(command, "commands", None)
        found += [(name, command)] if parts is None else [(f"{name} {part}", parts[part]) for part in parts]
    return found


def _options() -> dict[str, list[str]]:
    found = {}
    for name, command in _commands():
        names = []
        for parameter in command.params:
            flags = [flag for flag in parameter.opts if flag.startswith("--")]
            names += flags or [parameter.name.upper()]
        found[name] = sorted(n for n in names if n != "--help")
    return found


def test_options_are_frozen():
    assert _options() == {name: sorted(options) for name, options in OPTIONS.items()}


def test_help_answers_at_once():
    command = [sys.executable, "-m", "tracefp4", "--help"]
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0, result.stderr
    for name in OPTIONS:
        assert name.split()[0] in result.stdout
    # Processor time, the best of five: wall time would measure the neighbours on the same cores.
    assert min(seconds) < MAX_HELP_S, seconds


def _quoted_commands() -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        for block in FENCE.findall(path.read_text(encoding="utf-8")):
            for line in block.splitlines():
                text = line.strip().removeprefix("$ ")
                if text.startswith(("make ", "tracefp4 ")):
                    found.append((path.name, text.split("#")[0].strip()))
    return found


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


def test_readme_opens_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [command for name, command in _quoted_commands() if name == "README.md"]
    assert "make demo" in commands and "make test" in commands
    assert text.index("make demo") < text.index("tracefp4 train")


@pytest.mark.parametrize(
    ("document", "command"), _quoted_commands(), ids=lambda value: str(value).replace(" ", "_")
)
def test_quoted_commands_exist(document, command):
    words = command.split()
    if words[0] == "make":
        for word in words[1:]:
            assert word in _targets() or "=" in word or word.startswith("-"), (
                f"{document}: no target {word!r}"
            )
        return
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in OPTIONS else words[1]
    assert name in OPTIONS or name == "--help", f"{document}: no command {name!r}"
    for word in words[2:]:
        if word.startswith("--"):
            assert word.split("=")[0] in OPTIONS[name], f"{document}: {name} has no {word}"


def test_ci_runs_the_readme_commands():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert re.search(r"^make test$", text, flags=re.M) and re.search(r"^make test-slow$", text, flags=re.M)
