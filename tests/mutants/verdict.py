"""A pytest plugin (`-p tests.mutants.verdict`) that writes what happened to each test as lines of JSON.

An exit code cannot tell a test that noticed a fault from a module that no longer imports, so every failure is written
with its kind: "noticed" for an assertion or an error of tracefp4 raised in a test, "broken" for anything else."""

import json
from pathlib import Path

import pytest

FILE = "verdict.jsonl"
"""Written into the root directory of the run."""


def _write(config: pytest.Config, **fields: str) -> None:
    with (config.rootpath / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors inside a group (hypothesis reports several distinct failures as one)."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


def is_noticed(error: BaseException) -> bool:
    """Say whether an error in a test is a test's own judgement: an assertion, or an error class of tracefp4.

    A C file that does not compile is as little of a judgement as a Python module that does not import.
    """
    ours = any(kind.__name__ == "TraceFP4Error" for kind in type(error).__mro__)
    if ours and "cannot compile" in str(error):
        return False
    return ours or isinstance(error, AssertionError | pytest.fail.Exception)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to judge another tree than the one the run stands in (an editable install points elsewhere)."""
    import tracefp4

    found = Path(str(tracefp4.__file__)).resolve()
    if session.config.rootpath.resolve() not in found.parents:
        pytest.exit(f"tracefp4 comes from {found}, outside {session.config.rootpath}", returncode=4)


def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo[object], report: object
) -> None:
    """Write a failure: the test, whether it noticed or broke, and the first line of the error."""
    assert call.excinfo is not None
    errors = _leaves(call.excinfo.value)
    kind = "noticed" if isinstance(node, pytest.Item) and all(map(is_noticed, errors)) else "broken"
    first = (str(errors[0]).strip().splitlines() or [""])[0]
    _write(node.config, test=node.nodeid, outcome=kind, error=f"{type(errors[0]).__name__}: {first}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Write passes and skips."""
    report = yield
    if report.skipped or (report.passed and report.when == "call"):
        reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        _write(item.config, test=item.nodeid, outcome=report.outcome, error=reason)
    return report
