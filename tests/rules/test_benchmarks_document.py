"""docs/benchmarks.md says what the gates are and what stored results reach: its tables are made from both."""

import re

from tests.rules.gates_table import DOCUMENT, ROOT, SLOT, tables

from tracefp4.bench.kernel_jobs import KernelSizes
from tracefp4.bench.kernels import all_cases, groups_of


def test_the_tables_are_those_of_the_gates_and_the_stored_results():
    (found,) = SLOT.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert found == tables(), "run python -m tests.rules.gates_table"


def test_outside_the_tables_no_figure_is_claimed():
    text = SLOT.sub("", DOCUMENT.read_text(encoding="utf-8"))
    claims = re.findall(r"[\d.,]+ ?(?:x\b|%|us\b|ms\b|TB/s|GB/s|Melem/s|tokens/s)", text)
    assert claims == ["1%"]  # of a graph's time, by its length


def test_every_group_of_kernels_is_explained():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in groups_of(all_cases(KernelSizes())) if f"| `{name}` |" not in text] == []


def test_every_stored_result_is_listed():
    text = DOCUMENT.read_text(encoding="utf-8")
    stored = sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(stored) >= 3 and [name for name in stored if f"`{name}`" not in text] == []
