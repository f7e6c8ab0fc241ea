"""`tracefp4 train` as a real process, stopped at bad moments and resumed: the final bytes are an undisturbed run's.

Every process is our own child and is stopped by its handle. Nothing is injected: a kill during a checkpoint
write happens because the test watches for the write's temporary directory.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.rl.tiny_runs import changed, make_checkpoint, make_config, make_prompts, tables, write_recipe

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
POLL_S = 0.001
SETTINGS = {
    "task__reward": "tests.rl.tiny_runs:share_plain",
    "train__optimizer_steps_per_rollout": 2,
    "train__rollout_ahead": 1,
    "records__store": "directory",
}


class Trained:
    """One run directory, driven through the command line."""

    def __init__(self, folder, *, steps):
        checkpoint, prompts = make_checkpoint(folder / "start"), make_prompts(folder / "prompts.jsonl")
        self.path = folder / "run"
        settings = {**SETTINGS, "train__steps": steps}
        self.recipe = write_recipe(folder / "recipe.toml", tables(checkpoint, prompts, self.path, **settings))
        self.whole = make_config(checkpoint, prompts, folder / "whole", **settings)

    def start(self):
        arguments = [sys.executable, "-m", "tracefp4", "train", str(self.recipe)]
        arguments += ["--resume"] if (self.path / "config.json").exists() else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
        return subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self):
        process = self.start()
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        return self.manifest()["final"]

    def manifest(self):
        return json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))

    def rows(self):
        file = self.path / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def writes(self, *, since):
        """Temporary directories of checkpoint writes that began after a moment."""
        found = (self.path / "checkpoints").glob(".step_*.tmp")
        return [path for path in found if changed_at(path) >= since]

    def undisturbed(self):
        """The same run in this process, in one go and with as many threads."""
        return self._here(self.whole)

    def finish_here(self):
        """Resume in this process, which has loaded everything already."""
        return self._here(changed(self.whole, run__dir=str(self.path)), resume=True)

    def _here(self, config, *, resume=False):
        from tracefp4.rl.loop import train

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return train(config, resume=resume)["final"]
        finally:
            torch.set_num_threads(threads)


def changed_at(path):
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def wait_for(process, is_true):
    """Wait until something is so; the process must still be running then."""
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert process.poll() is None, f"the run ended by itself: {process.stdout.read()}"
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def wait_for_step(process, trained, *, count=1):
    """Wait until this process has finished `count` more steps."""
    started = time.time()
    file = trained.path / "metrics.jsonl"
    size = 0

    def has_written():
        nonlocal size, count
        if file.exists() and file.stat().st_mtime >= started and file.stat().st_size > size and size:
            count -= 1
        size = file.stat().st_size if file.exists() else 0
        return count <= 0 and size > 0

    wait_for(process, has_written)


def kill(trained, kind, draw):
    """Start or resume, kill with SIGKILL at a moment of this kind; returns whether a write was torn."""
    started = time.time()
    process = trained.start()
    try:
        if kind == "early":
            time.sleep(draw.uniform(0.0, 5.0))
        elif kind == "write":
            wait_for(process, lambda: trained.writes(since=started))
            time.sleep(draw.uniform(0.0, 0.01))
        else:
            wait_for_step(process, trained)
            time.sleep(draw.uniform(0.0, 0.2))
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    return bool(trained.writes(since=started))


def test_killed_in_a_write_interrupted_and_resumed(tmp_path):
    trained, draw = Trained(tmp_path, steps=8), random.Random(0)
    assert any(kill(trained, "write", draw) for _ in range(4)), "no kill met a checkpoint write"

    process = trained.start()
    wait_for_step(process, trained)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    assert "interrupted" in output
    finished = trained.rows()[-1]["step"] + 1
    assert (trained.path / "checkpoints" / f"step_{finished:06d}" / "state.json").is_file()
    assert finished < 8

    assert trained.finish_here() == trained.undisturbed()
    assert [row["step"] for row in trained.rows()] == list(range(8))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_change_no_byte(tmp_path):
    trained, draw = Trained(tmp_path, steps=90), random.Random(1)
    kinds = ["write"] * 8 + ["step"] * 8 + ["early"] * 4
    draw.shuffle(kinds)
    torn = sum(kill(trained, kind, draw) for kind in kinds)
    assert torn >= 3, "too few kills met a checkpoint write"
    assert trained.finish() == trained.undisturbed()
    assert [row["step"] for row in trained.rows()] == list(range(90))
    names = sorted(path.name for path in (trained.path / "checkpoints").iterdir())
    assert names == ["step_000089", "step_000090"], "leftovers of killed writes are cleared"
