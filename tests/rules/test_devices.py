"""No tensor is made on torch's default device: what a call makes lives where its neighbours live, and it says where.

With a CUDA default a tensor without a device would meet the CPU's records, or hand a device address to a C kernel.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tracefp4"

FACTORIES = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "randperm", "tensor", "zeros",
}  # fmt: skip
ROOMS = ("formats", "ops", "guidance", "diagnostics", "kvcache", "qat", "models", "rollout", "rl")


@pytest.mark.parametrize("room", ROOMS)
def test_every_tensor_is_made_on_a_named_device(room):
    # Mutation: torch.tensor(starts) without a device in guidance/gather.py.
    unnamed = []
    for path in sorted((SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _is_factory(node.func):
                names = {keyword.arg for keyword in node.keywords}
                if not names & {"device", None}:
                    unnamed.append(f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}")
    assert unnamed == []


def _is_factory(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in FACTORIES
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
    )
