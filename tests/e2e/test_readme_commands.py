"""The `tracefp4` commands of the README, run in its order on tiny files in the places that it names."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tests.e2e.test_demo import MINIATURE
from typer.testing import CliRunner

from tracefp4.cli.main import app
from tracefp4.study.demo import run_demo

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"```bash\n(.*?)```", flags=re.S)
# what makes a quoted run small; everything else stands as the README and its recipes have it
SMALL = (
    "train.steps=2",
    "run.eval_items=2",
    "rollout.num_prompts=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_tokens=8",
    "rollout.num_pages=256",
    "run.tensorboard=false",
)


def quoted_commands() -> list[str]:
    """Every `tracefp4` command of the README's shell blocks, in order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.strip() for block in FENCE.findall(text) for line in block.splitlines()]
    return [line for line in lines if line.startswith("tracefp4 ")]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the README speaks of: the demo's, a checkpoint, a JSONL task, the recipes."""
    wide = replace(MINIATURE.shape, expert_size=32)  # a whole MXFP4 block
    run_demo(tmp_path / "runs" / "demo", settings=replace(MINIATURE, shape=wide))
    start = tmp_path / "runs" / "demo" / "start"
    (tmp_path / "checkpoints").mkdir()
    for name in ("my-model", "my-qwen3-moe"):
        (tmp_path / "checkpoints" / name).symlink_to(start)
    (tmp_path / "data").mkdir()
    for name in ("train", "held_out"):
        rows = [json.dumps({"prompt": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(8)]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    texts = [json.dumps({"text": f"{i} + {j} = {i + j}"}) for i in range(16) for j in range(16)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts), encoding="utf-8")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_quoted_command_runs_in_order(places: Path) -> None:
    commands = quoted_commands()
    assert {shlex.split(command)[1] for command in commands} >= {
        "plan",
        "train",
        "eval",
        "generate",
        "report",
    }
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] in ("train", "eval"):
            words += [word for setting in SMALL for word in ("--set", setting)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"
    assert (places / "runs" / "tiny_arithmetic" / "report.html").exists()
    assert {path.name for path in (places / "checkpoints").iterdir()} >= {"trained-nvfp4", "my-model-w4a4"}
