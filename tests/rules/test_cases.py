"""docs/cases.md and the tests: every named test exists, every test named after a case has its row."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([A-Z]{3}-\d+) \|(.*)$", TEXT, flags=re.M))
CLASSES = sorted({case[:3] for case in ROWS})


def _tests(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_every_row_names_a_test_that_exists_or_says_why_not():
    for case, row in ROWS.items():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named or "does not apply" in row, case
        for path, test in named:
            assert test in _tests(ROOT / path), f"{case}: {path}::{test}"


def test_every_test_named_after_a_case_is_in_its_row():
    name = re.compile(rf"test_({'|'.join(CLASSES)})_(\d+)_".lower())
    found = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test in _tests(path):
            match = name.match(test)
            if match:
                found += 1
                case = f"{match[1].upper()}-{match[2]}"
                assert f"`{path.relative_to(ROOT)}::{test}`" in ROWS.get(case, ""), f"{case}: {path}::{test}"
    assert found >= len(ROWS) - 2  # PAD-3 and LGP-3 have no test of their own


def test_the_six_classes_are_complete():
    assert CLASSES == ["ALN", "LGP", "LOS", "MOE", "PAD", "STE"]
    assert len(ROWS) == 5 + 4 + 4 + 6 + 3 + 3
