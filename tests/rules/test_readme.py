"""The README is true: its Python runs, its tree is the source's, and every path that it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rules.readme_tree import ROOMS, ROOT, SLOT, rooms_in_source, tree

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"```python\n(.*?)```", flags=re.S)
PATHS = re.compile(r"\b(?:tests|docs|examples|recipes|src)/[\w./-]*\w")
LINKS = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
MAX_EXAMPLE_LINES = 25
# Guidance leaves a seventh to a tenth of the unguided difference on random tiny models; a third is far from both.
MAX_GUIDED_SHARE = 1 / 3


def _block() -> str:
    """The API example: the first Python block."""
    return PYTHON.findall(TEXT)[0]


def _checkpoint(path: Path) -> None:
    from tracefp4.rl.checkpoint import save_model
    from tracefp4.rl.tiny import TinyShape, build_model, build_tokenizer

    tokenizer = build_tokenizer(["What is 12 + 30 - 7?"])
    path.mkdir(parents=True)
    save_model(build_model(TinyShape(num_layers=3), tokenizer=tokenizer), tokenizer, path)


def test_python_block_is_short():
    assert len(_block().strip().splitlines()) <= MAX_EXAMPLE_LINES


def test_python_block_runs_and_guidance_shows(tmp_path):
    _checkpoint(tmp_path / "runs" / "demo" / "start")
    result = subprocess.run(
        [sys.executable, "-c", _block()], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = dict(re.findall(r"(\w+): mean \|d log p\| ([\d.]+)", result.stdout))
    assert 0 < float(found["guided"]) < MAX_GUIDED_SHARE * float(found["nearest"])


def test_tree_is_the_source():
    (written,) = SLOT.findall(TEXT)
    assert written == tree(), "the tree in README.md has drifted: python tests/rules/readme_tree.py"


def test_every_room_is_in_the_tree_and_in_the_architecture():
    assert rooms_in_source() == set(ROOMS)
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in [*ROOMS, "errors"] if f"| {room} |" not in architecture] == []


def test_architecture_shows_the_enforced_order():
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [found["layers"] for found in contracts["contracts"] if found["type"] == "layers"]
    rooms = [[name.strip(" ()") for name in layer.split("|")] for layer in layers]
    kept = [[name for name in layer if name in {*ROOMS, "errors"}] for layer in rooms]
    wanted = "\n".join(" | ".join(layer) for layer in kept if layer)
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"```\n{wanted}\n```" in architecture


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_exist(path):
    text = path.read_text(encoding="utf-8")
    named = [ROOT / found for found in PATHS.findall(text)]
    linked = [path.parent / found for found in LINKS.findall(text) if "://" not in found]
    assert [str(found) for found in [*named, *linked] if not found.exists()] == []


@pytest.mark.parametrize("name", ["figure", "demo", "tree"])
def test_slots_are_closed(name):
    assert TEXT.count(f"<!-- {name}:begin -->") == TEXT.count(f"<!-- {name}:end -->") == 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_ascii(path):
    assert path.read_bytes().isascii()
