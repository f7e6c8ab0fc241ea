"""The list of mutations cannot rot, the judge can say no, and every mutation dies."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants import runner, verdict
from tests.mutants.mutation import Mutation, mutated_text, problems
from tests.mutants.mutations import MUTATIONS

from tracefp4.errors import FormatError

ROOT = Path(__file__).parents[2]
EXAMPLE = MUTATIONS[0]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_mutation_can_be_applied_and_names_tests_that_exist(mutation):
    assert problems(mutation, ROOT) == []


def test_names_are_unique_and_faults_are_sentences():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    assert [m.name for m in MUTATIONS if not m.fault.endswith(".")] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "no such text"}, "occurs 0 times"),
        ({"old": "self"}, "occurs [0-9]+ times"),
        ({"path": "src/tracefp4/nothing.py"}, "no src/tracefp4/nothing.py"),
        ({"new": "if:"}, "no Python"),
        ({"new": EXAMPLE.old}, "changes something"),
        ({"tests": ()}, "names a test"),
        ({"tests": ("tests/formats/test_nothing.py::test_x",)}, "no test"),
        ({"tests": ("tests/formats/test_element.py::test_x",)}, "no test"),
        ({"tests": ("tests/formats/test_element.py::test_e4m3_values[1",)}, "no test"),
    ],
)
def test_a_mutation_that_cannot_be_tried_is_a_problem(change, problem):
    assert re.search(problem, "; ".join(problems(dataclasses.replace(EXAMPLE, **change), ROOT)))


def event(outcome: str, test: str = "t.py::test_a") -> dict[str, str]:
    return {"test": test, "outcome": outcome, "error": "why"}


@pytest.mark.parametrize(
    ("events", "result"),
    [
        ([event("passed"), event("noticed")], "died"),
        ([event("passed"), event("passed")], "survived"),
        ([event("broken"), event("noticed")], "unclear"),
        ([event("skipped"), event("skipped")], "survived"),
        ([event("skipped"), event("passed")], "survived"),
        ([], "unclear"),
    ],
)
def test_the_judge(events, result):
    assert runner.judge(events)[0] == result


def test_only_a_judgement_of_a_test_counts_as_noticed():
    assert verdict.is_noticed(AssertionError()) and verdict.is_noticed(FormatError("x"))
    with pytest.raises(pytest.fail.Exception) as missing, pytest.raises(ValueError):
        pass
    assert verdict.is_noticed(missing.value)
    assert not any(
        verdict.is_noticed(error) for error in (ImportError(), SyntaxError(), TypeError(), ValueError())
    )


def test_a_node_id_covers_its_parameters_and_a_file_its_tests():
    assert runner.names_test("t.py::test_a", "t.py::test_a[1]") and runner.names_test("t.py::test_a", "t.py")
    assert not runner.names_test("t.py::test_a", "t.py::test_ab")


def test_tests_must_pass_without_the_mutation():
    id_ = EXAMPLE.tests[0]
    assert runner.obstacles(dataclasses.replace(EXAMPLE, tests=(id_,)), [event("passed", id_)]) == []
    assert "without the mutation" in runner.obstacles(EXAMPLE, [event("noticed", id_)])[0]
    assert "did not run" in runner.obstacles(EXAMPLE, [])[0]


HARMLESS = Mutation(
    name="harmless",
    fault="Nothing that a test could notice.",
    path=EXAMPLE.path,
    old=EXAMPLE.old,
    new=EXAMPLE.old.replace("exponent == 0", "0 == exponent"),
    tests=EXAMPLE.tests,
)


@pytest.mark.alone
@pytest.mark.slow
def test_the_runner_tells_death_from_survival_and_from_a_broken_import(capsys):
    broken = dataclasses.replace(HARMLESS, name="broken", new="nothing\n        " + EXAMPLE.old)
    unimportable = dataclasses.replace(
        HARMLESS, name="unimportable", old='name="E2M1",', new='name="E2M1", colour=1,'
    )
    outcomes = {o.mutation.name: o.result for o in runner.run([EXAMPLE, HARMLESS, broken, unimportable])}
    assert outcomes == {
        EXAMPLE.name: "died", "harmless": "survived", "broken": "unclear", "unimportable": "unclear",
    }  # fmt: skip
    assert "[4/4]" in capsys.readouterr().out
    assert (ROOT / EXAMPLE.path).read_text(encoding="utf-8") != mutated_text(
        EXAMPLE, ROOT
    )  # read, never written


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_mutation_dies():
    result = subprocess.run(
        [sys.executable, "-m", "tests.mutants.runner"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    told = [line for line in result.stdout.splitlines() if " died " not in line]
    assert result.returncode == 0, "\n".join([*told, result.stderr[-2000:]])


def test_an_unknown_name_is_refused(capsys):
    assert runner.main(["no_such_mutation"]) == 2
    assert EXAMPLE.name in capsys.readouterr().out
