"""Directions of import, and that importing does nothing: no device, no output, nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tracefp4"

LIGHT_MODULES = ["tracefp4", "tracefp4.errors", "tracefp4.store", "tracefp4.cli.main", "tracefp4.cli.options"]
HEAVY = ("torch", "transformers", "matplotlib", "numpy", "reasoning_gym", "math_verify", "sympy")


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_import_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = _python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_store_works_where_torch_is_absent():
    blocked = "import sys; sys.modules['torch'] = None; import tracefp4.store as s; print(s.__name__)"
    result = _python(blocked)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "tracefp4.store"


def test_importing_every_module_has_no_side_effects():
    code = """
import importlib, logging, pathlib, pkgutil, random, sys, threading, warnings
warnings.simplefilter("ignore")
import numpy, torch, transformers
level, handlers, filters = logging.root.level, list(logging.root.handlers), list(warnings.filters)
state, threads, torch_state = random.getstate(), threading.active_count(), torch.get_rng_state()
settings = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled())
import tracefp4
for found in pkgutil.walk_packages(tracefp4.__path__, "tracefp4."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
assert not torch.cuda.is_initialized(), "CUDA"
assert (logging.root.level, list(logging.root.handlers)) == (level, handlers), "logging"
assert random.getstate() == state and torch.equal(torch.get_rng_state(), torch_state), "random state"
assert threading.active_count() == threads, "threads"
assert settings == (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
                    torch.are_deterministic_algorithms_enabled()), "torch settings"
print("quiet")
"""
    before = {path for path in ROOT.iterdir() if path.name != "__pycache__"}
    result = _python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().splitlines()[-1:] == ["quiet"]
    assert {path for path in ROOT.iterdir() if path.name != "__pycache__"} == before


def test_every_public_name_can_be_had():
    import tracefp4

    for name in tracefp4.__all__:
        assert getattr(tracefp4, name) is not None
    with pytest.raises(AttributeError, match="no public name"):
        _ = tracefp4.nothing_of_the_kind


def test_references_are_pure_torch():
    for path in SOURCE.glob("ops/*/reference.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] in ("triton", "cuda", "cupy")], path


def test_nobody_inside_imports_from_the_root():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "tracefp4", (
                    f"{path}:{node.lineno}: import from the room, not from the root"
                )


def test_import_directions_hold():
    result = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
