"""No tensor is divided by a Python number, nor a Python number by a tensor, where the bytes of a scheme are made.

On CUDA torch multiplies by the rounded reciprocal of the number, on every device `number / tensor` is a reciprocal and
a product: both round twice, and the bytes differ from those of the CPU. `scaling.divided` divides tensors; dividing by
a power of two, or dividing one, is exact either way.
"""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tracefp4"
FILES = sorted([*(SOURCE / "formats").glob("*.py"), *(SOURCE / "ops").rglob("*.py")])
DIVIDING = {"div", "div_", "divide", "divide_", "true_divide", "true_divide_", "addcdiv", "addcdiv_"}
# Attributes that are Python numbers.
NUMBERS = {"bits", "scale_max", "block_size", "max_value", "smallest_value", "bits_per_value"}


def _names_of_numbers(tree: ast.AST) -> set[str]:
    """Names assigned from numbers, anywhere in the file, and parameters annotated as numbers."""
    names: set[str] = set()
    for _ in range(3):  # a number may be made of earlier ones
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _is_number(node.value, names):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
                names |= {node.arg} if node.annotation.id in ("float", "int") else set()
    return names


def _is_number(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr in NUMBERS
    if isinstance(node, ast.BinOp):
        return _is_number(node.left, names) and _is_number(node.right, names)
    return isinstance(node, ast.UnaryOp) and _is_number(node.operand, names)


def _is_power_of_two(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value > 0 and math.frexp(node.value)[0] == 0.5


def inexact_divisions(text: str) -> Iterator[int]:
    """Yield the lines where a division meets a Python number and something else."""
    tree = ast.parse(text)
    names = _names_of_numbers(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            above, below = node.left, node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            above, below = node.target, node.value
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DIVIDING
        ):
            below, above = node.args[-1], node.args[0] if len(node.args) > 1 else node.func.value
        else:
            continue
        is_mixed = _is_number(above, names) != _is_number(below, names)
        if is_mixed and not _is_power_of_two(above) and not _is_power_of_two(below):
            yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_numbers_divide_as_tensors(path):
    lines = list(inexact_divisions(path.read_text(encoding="utf-8")))
    assert not lines, f"{path.relative_to(SOURCE)}, lines {lines}: use scaling.divided"


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("raw = amax / 6.0", True),
        ("raw = (amax * k).div_(6.0)", True),
        ("raw = torch.div(amax, 6.0)", True),
        ("raw /= 6", True),
        ("limit = 6.0 * scheme.scale_max\ng = amax / limit", True),
        ("G = 2688.0 / amax", True),
        ("def f(target: float): return amax / target", True),
        ("half = amax / 2.0", False),
        ("inverse = 1.0 / g", False),
        ("sixth = 1.0 / 6.0", False),
        ("z = x / factor", False),
        ("raw = divided(amax, 6.0)", False),
        ("z = x.div_(factor)", False),
    ],
)
def test_the_search_finds_them(text, is_refused):
    assert bool(list(inexact_divisions(text))) == is_refused
