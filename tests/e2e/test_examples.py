"""The examples run as a reader would run them, and print what the README says they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 80
# Guidance leaves a seventh to a tenth of the unguided difference on random tiny models; a third is far from both.
MAX_GUIDED_SHARE = 1 / 3


def _run(name: str, directory: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True, text=True, timeout=240, check=False, cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_there_are_five_examples():
    assert [path.name[:3] for path in EXAMPLES] == ["01_", "02_", "03_", "04_", "05_"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_fit_on_a_page(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_quantize_a_tensor(tmp_path):
    text = _run("01_quantize_a_tensor.py", tmp_path)
    assert "256 values in 148 bytes" in text
    assert "exact in bf16:             True" in text
    assert [line.split()[-1] for line in text.splitlines()[-4:-1]] == ["72", "48", "72"]


def test_record_and_replay(tmp_path):
    text = _run("02_record_and_replay.py", tmp_path)
    nearest, guided = _numbers(r"mean \|d log p\| ([\d.]+)", text)
    assert 0 < guided < nearest * MAX_GUIDED_SHARE
    moved = _numbers(r"values moved ([\d.]+)%", text)
    assert moved[0] == 0 and 0 < moved[1] < 5


def test_fp4_checkpoint(tmp_path):
    text = _run("04_fp4_checkpoint.py", tmp_path)
    assert text.count("True") == 2 and "False" not in text
    before, after = _numbers(r"([\d.]+) MB", text)
    assert after < before / 2


def test_grpo_tiny_moe(tmp_path):
    text = _run("03_grpo_tiny_moe.py", tmp_path, str(tmp_path / "work"))
    assert _numbers(r"step (\d+):", text) == [float(step) for step in range(6)]
    assert all(0 < value < 0.1 for value in _numbers(r"mean \|d log p\| ([\d.]+)", text))
    # x of 64, K and V of 32 values in two layers: each a syndrome in three bytes, and its scales' bits in one
    assert set(_numbers(r"guidance (\d+) bytes", text)) == {2 * 3 * (3 + 1)}
    assert sorted(path.name for path in (tmp_path / "work" / "run" / "checkpoints").iterdir())


def test_multi_turn(tmp_path):
    text = _run("05_multi_turn.py", tmp_path, str(tmp_path / "work"))
    assert _numbers(r"step (\d+):", text) == [float(step) for step in range(6)]
    # two or three terms, so a policy that learned from demonstrations calls once or twice
    assert all(0.5 < calls <= 3 for calls in _numbers(r"calls ([\d.]+)", text))
    assert all(reward > 0 for reward in _numbers(r"reward ([\d.]+)", text))
    assert all(0 < value < 0.1 for value in _numbers(r"mean \|d log p\| ([\d.]+)", text))
