"""Sizes, names and characters of the source: what keeps every file readable in one sitting."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tracefp4"
FILES = sorted(SOURCE.rglob("*.py"))

MAX_FILE_LINES = 400
SHORT_FILES = {"loop.py": 250, "engine.py": 250, "scheduler.py": 250}
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
FORBIDDEN_MODULES = {"utils", "helpers", "common", "misc", "base", "core", "types", "lib"}
# Names that do not say which way a scale goes.
FORBIDDEN_NAMES = {"scale_inv", "qdata", "data_lp"}
# Signatures that torch, transformers or typer dictate.
DICTATED = {"forward", "backward", "setup_context", "update"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _where(path: Path, line: int | None = None) -> str:
    return str(path.relative_to(SOURCE)) + (f":{line}" if line else "")


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        for node in ast.walk(_tree(path)):
            yield path, node


def _public_functions() -> Iterator[tuple[Path, Function]]:
    """Yield the functions of modules and classes, nested ones left out."""
    for path in FILES:
        bodies = [_tree(path).body]
        bodies += [node.body for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]
        for body in bodies:
            for node in body:
                if isinstance(node, Function) and not node.name.startswith("_"):
                    yield path, node


def _is_command(path: Path, node: Function) -> bool:
    """Say whether a function is a command, whose parameters are its options, frozen by their own test."""
    return path.parent.name == "cli" and any(
        "typer" in ast.unparse(a) for a in node.args.args if a.annotation
    )


def _is_dictated(node: Function) -> bool:
    """Say whether another library dictates the parameters, by name or as the docstring says."""
    return node.name in DICTATED or "signature" in (ast.get_docstring(node) or "")


def _num_lines(path: Path, node: Function) -> int:
    """Count the lines of a function without its docstring (and without the options of a command)."""
    assert node.end_lineno is not None
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    signature = 1 if _is_command(path, node) else node.body[0].lineno - node.lineno
    return signature + node.end_lineno - body[0].lineno + 1


def test_there_is_something_to_check():
    assert len(FILES) > 40


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert [
        f"{_where(path)} has {length} lines"
        for path, length in lengths.items()
        if length > SHORT_FILES.get(path.name, MAX_FILE_LINES)
    ] == []


def test_functions_are_short():
    assert [
        f"{_where(path, node.lineno)} {node.name} has {_num_lines(path, node)} lines"
        for path, node in _nodes()
        if isinstance(node, Function) and _num_lines(path, node) > MAX_FUNCTION_LINES
    ] == []


def test_functions_take_few_parameters():
    problems = []
    for path, node in _public_functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        if count > MAX_PARAMETERS and not _is_dictated(node) and not _is_command(path, node):
            problems.append(f"{_where(path, node.lineno)} {node.name} takes {count}")
    assert problems == []


def test_public_functions_hide_nothing_in_kwargs():
    assert [
        f"{_where(path, node.lineno)} {node.name}"
        for path, node in _public_functions()
        if node.args.kwarg is not None and not _is_dictated(node)
    ] == []


def test_modules_are_named_for_things():
    assert [
        _where(path)
        for path in FILES
        if FORBIDDEN_MODULES & set(path.relative_to(SOURCE).with_suffix("").parts)
    ] == []


def test_identifiers_say_which_way_they_go():
    problems = []
    for path, node in _nodes():
        name = ""
        if isinstance(node, ast.Name):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, Function | ast.ClassDef):
            name = node.name
        if name in FORBIDDEN_NAMES or name.startswith("maybe_"):
            problems.append(f"{_where(path, node.lineno)} {name}")  # type: ignore[attr-defined]
    assert problems == []


def test_every_module_opens_with_a_paragraph():
    assert [_where(p) for p in FILES if _tree(p).body and not ast.get_docstring(_tree(p))] == []


def test_source_is_ascii_and_prints_nothing():
    problems = []
    for path in FILES:
        odd = {
            char
            for char in path.read_text(encoding="utf-8")
            if ord(char) > 126 or (ord(char) < 32 and char != "\n")
        }
        problems += [f"{_where(path)} holds {char!r}" for char in odd]
    for path, node in _nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            problems.append(f"{_where(path, node.lineno)} print")
    assert problems == []


def test_every_public_dataclass_field_is_explained():
    problems = []
    for path, node in _nodes():
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            problems += [f"{_where(path)} {node.name}.{name}" for name in _unexplained(node)]
    assert problems == []


def _unexplained(node: ast.ClassDef) -> list[str]:
    found = []
    for here, after in zip(node.body, [*node.body[1:], None], strict=True):
        if (
            not isinstance(here, ast.AnnAssign)
            or not isinstance(here.target, ast.Name)
            or here.target.id.startswith("_")
        ):
            continue
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if not (is_text and isinstance(after.value.value, str)):
            found.append(here.target.id)
    return found


def _documents() -> list[Path]:
    return [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "recipes").glob("*.toml"),
        ROOT / "Makefile",
    ]


@pytest.mark.parametrize("path", _documents(), ids=lambda path: path.name)
def test_documents_are_plain(path):
    text = path.read_text(encoding="utf-8")
    for name, char in (("em dash", "\u2014"), ("en dash", "\u2013"), ("arrow", "\u2192")):
        assert char not in text, f"{path.name} holds an {name}"
    assert not re.search(r"\bTODO\b", text)
