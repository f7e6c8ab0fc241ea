"""What a mutation is: one deliberate fault, given as a replacement of text that occurs once, and the tests that must
turn red under it. The lists are in `in_<room>.py`; `runner.py` applies them to copies of the tree, never in place."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """A fault that a careful person could make."""

    name: str
    """Unique; what `make mutants MUTANTS=...` selects by."""
    fault: str
    """What goes wrong, in words."""
    path: str
    """File, relative to the root of the repository."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Pytest node ids, the likeliest first; at least one must fail. All must pass without the mutation."""

    @property
    def is_compiled(self) -> bool:
        """True for faults in C or CUDA and in what calls it; False for faults in the definitions, whose tests run where
        no compiler is found, because a correct kernel would hide them."""
        return self.path.endswith((".c", ".h", ".cu", ".cuh", "compiled.py", "kernels.py", "compiler.py"))


def problems(mutation: Mutation, root: Path) -> list[str]:
    """Say why a mutation cannot be tried on the tree at `root`; an empty list if it can."""
    found = []
    file = root / mutation.path
    count = file.read_text(encoding="utf-8").count(mutation.old) if file.is_file() else -1
    if count != 1:
        found.append(
            f"{mutation.path}: the text occurs {count} times" if count >= 0 else f"no {mutation.path}"
        )
    elif file.suffix == ".py":
        try:
            ast.parse(mutated_text(mutation, root))
        except SyntaxError as error:
            found.append(f"{mutation.path}: the mutated file is no Python ({error.msg}, line {error.lineno})")
    if mutation.old == mutation.new or not mutation.tests:
        found.append("a mutation changes something and names a test")
    for test in mutation.tests:
        path, _, name = test.partition("::")
        function = name.partition("[")[0]
        text = (root / path).read_text(encoding="utf-8") if (root / path).is_file() else ""
        is_whole = name.endswith("]") == ("[" in name)
        if (
            not is_whole
            or not re.search(rf"^def {function}\b" if function else "", text, re.MULTILINE)
            or not text
        ):
            found.append(f"no test {test}")
    return found


def mutated_text(mutation: Mutation, root: Path) -> str:
    """Return the file's text with the fault in it."""
    return (root / mutation.path).read_text(encoding="utf-8").replace(mutation.old, mutation.new)
