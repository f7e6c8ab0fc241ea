"""docs/cases.md and the tests: every named test exists, every test named after a case has its row."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([A-Z]{3}-\d+) \|(.*)$", TEXT, flags=re.M))
CLASSES = sorted({case[:3] for case in ROWS})
# The cases of each class; their numbers have gaps.
NUMBERS = {
    "ALN": [1, 3, 5, 6, 7],
    "BAT": [1, 3, 4],
    "CKP": [1, 3, 4, 5],
    "DST": [1, 3, 4, 5],
    "DTY": [1, 3, 4],
    "EXP": [1, 3, 4, 5, 7, 8],
    "KVQ": [1, 3, 4, 5],
    "LAY": [1, 3, 5, 6],
    "LGP": [1, 3, 4, 5],
    "LIF": [1, 3, 4, 5],
    "LOS": [1, 3, 5, 6, 7, 9],
    "MOE": [1, 3, 5],
    "OVF": [1, 2, 4, 6],
    "PAD": [1, 3, 5, 6],
    "RES": [1, 3, 4],
    "RFT": [1, 3, 5, 6],
    "RND": [1, 3, 5, 6, 7],
    "RPL": [1, 3, 5],
    "SHP": [1, 2, 4],
    "SHR": [1, 3, 5],
    "SPC": [1],
    "STE": [1, 3, 4],
    "UND": [1],
    "VER": [1, 3, 5],
    "ZER": [1, 2, 3],
}


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


def test_every_test_named_after_a_case_of_these_classes_has_its_row():
    name = re.compile(rf"test_({'|'.join(CLASSES)})_(\d+)_".lower())
    cases = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        cases |= {f"{match[1].upper()}-{match[2]}" for test in _tests(path) if (match := name.match(test))}
    assert cases <= set(ROWS)
    assert len(cases) > len(ROWS) / 2


def test_every_class_is_complete():
    for name in CLASSES:
        found = sorted(int(case[4:]) for case in ROWS if case[:3] == name)
        assert found == NUMBERS[name], name
