"""docs/schemes.md is made from the schemes, and every fault that it tells of is run."""

import ast
import re

from tests.rules.schemes_table import DOCUMENT, SLOT, tables

from tracefp4.formats.schemes import SCHEMES

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_tables_are_current():
    (written,) = SLOT.findall(TEXT)
    assert written == tables(), "docs/schemes.md has drifted: python -m tests.rules.schemes_table"


def test_every_scheme_has_its_row_and_every_name_is_a_scheme():
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.M)) == set(SCHEMES)
    named = set(re.findall(r"`((?:NV|MX)FP4_\w+)`", TEXT))
    assert named <= set(SCHEMES)


def test_every_fault_names_its_test_and_every_test_its_fault():
    source = (DOCUMENT.parents[1] / "tests" / "peers" / "test_faults.py").read_text(encoding="utf-8")
    tests = [
        n.name
        for n in ast.parse(source).body
        if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    ]
    assert sorted(set(re.findall(r"`(test_\w+)`", TEXT))) == sorted(tests)
