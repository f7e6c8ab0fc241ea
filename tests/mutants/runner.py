"""Apply every mutation to a copy of the tree, run the tests that it names, and print which one turned red.

    python -m tests.mutants.runner [NAME ...]        names are substrings; none means all

The named tests run once without any mutation, then each mutation has a pytest process of its own, in two workers that
each own a copy of the tree in a temporary directory and a process that forks it (`forking.py`), so that torch is
imported twice and not hundreds of times. The working tree is only read. Tests of faults in the Python definitions run
as on a machine without a compiler, since compiled kernels would stand in for the faulty code.

Exit code 0: every mutation died, by an assertion or an error of ours in a test; 1: one survived, broke the import,
cannot be applied, or its tests fail without it; 2: no mutation has such a name. A mutation whose tests are skipped
here without it (no compiler, say) is not judged and is counted as such. Some faults are races, which a busy machine may
hide: what did not die is tried once more, and a death at the second try is said to be one.
"""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import verdict
from tests.mutants.mutation import Mutation, mutated_text, problems
from tests.mutants.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "recipes", "docs", "pyproject.toml", "README.md")
NUM_WORKERS = 2
TIMEOUT_S = 300.0
NUM_TRIES = 2
PYTEST = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "tests.mutants.verdict",
          "-n", "0", "-m", "")  # fmt: skip

Event = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one mutation."""

    mutation: Mutation
    """The fault that was tried."""
    result: str
    """"died", "survived", "unclear" (it broke something, or its tests fail without it) or "skipped"."""
    detail: str
    """The first test that failed, or why there is no result."""
    seconds: float
    """Duration of the pytest process; 0 if there was none."""


def names_test(named: str, test: str) -> bool:
    """Say whether a node id as written in a mutation covers a test that ran, or lies in a file that did not import."""
    return test == named or test.startswith(named + "[") or named.startswith(test + "::")


def judge(events: Sequence[Event]) -> tuple[str, str]:
    """Return (result, detail) of a mutation from the events of its run."""
    if not events:
        return "unclear", "pytest wrote nothing: it crashed, hung or collected no test"
    for event in events:
        if event["outcome"] == "broken":
            return "unclear", f"{event['test']}: {event['error']}"
        if event["outcome"] == "noticed":
            return "died", event["test"]
    if all(event["outcome"] == "skipped" for event in events):
        return "survived", f"the tests were skipped: {events[0]['error']}"
    return "survived", f"{sum(event['outcome'] == 'passed' for event in events)} tests passed"


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)


class Worker:
    """A copy of the tree and the process that forks the runs of pytest in it."""

    def __init__(self, tree: Path) -> None:
        """Copy the tree into a new directory and start the process."""
        self.tree = tree
        tree.mkdir()
        copy_tree(tree)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'src'}",  # before the path of an editable install
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutation keeps size and second of a file: bytecode would be stale
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(tree / "cache"),
            "HYPOTHESIS_PROFILE": "fixed",  # what notices a mutation is not a matter of chance
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forking.py"))], cwd=tree, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run_tests(self, tests: Sequence[str], *options: str, is_compiled: bool) -> list[Event]:
        """Run tests and return what happened to each, with or without a compiler in sight."""
        written, log = self.tree / verdict.FILE, self.tree / "pytest.log"
        written.unlink(missing_ok=True)
        job = {
            "arguments": [*PYTEST, *options, *tests],
            "environment": {} if is_compiled else {"CC": "no-compiler"},
            "log": str(log),
            "timeout_s": TIMEOUT_S,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if json.loads(self._process.stdout.readline())["code"] is None:
            return []
        if not written.is_file():
            reasons = [
                line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("ERROR")
            ]
            return [{"test": "", "outcome": "broken", "error": reason} for reason in reasons]
        return [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=TIMEOUT_S)


def obstacles(mutation: Mutation, baseline: Sequence[Event]) -> list[str]:
    """Say why a mutation cannot be judged, given what its tests do without it."""
    found = problems(mutation, ROOT)
    for test in mutation.tests:
        events = [event for event in baseline if names_test(test, event["test"])]
        found += [
            f"{event['test']} is {event['outcome']} without the mutation: {event['error']}"
            for event in events
            if event["outcome"] in ("broken", "noticed")
        ]
        found += [] if events else [f"{test} did not run"]
    return found


def try_mutation(mutation: Mutation, free: "queue.Queue[Worker]", baseline: Sequence[Event]) -> Outcome:
    """Apply one mutation in a free copy, run its tests, and put the text back."""
    wrong = obstacles(mutation, baseline)
    mine = [e for e in baseline if any(names_test(test, e["test"]) for test in mutation.tests)]
    if wrong:
        return Outcome(mutation=mutation, result="unclear", detail="; ".join(wrong), seconds=0.0)
    if all(event["outcome"] == "skipped" for event in mine):
        return Outcome(mutation=mutation, result="skipped", detail=mine[0]["error"], seconds=0.0)
    worker = free.get()
    tree = worker.tree
    start, original = time.perf_counter(), (tree / mutation.path).read_text(encoding="utf-8")
    try:
        (tree / mutation.path).write_text(mutated_text(mutation, tree), encoding="utf-8")
        for again in range(NUM_TRIES):
            result, detail = judge(worker.run_tests(mutation.tests, "-x", is_compiled=mutation.is_compiled))
            if result == "died":
                detail += f" (at try {again + 1})" if again else ""
                break
    finally:
        (tree / mutation.path).write_text(original, encoding="utf-8")
        free.put(worker)
    return Outcome(mutation=mutation, result=result, detail=detail, seconds=time.perf_counter() - start)


def run_baseline(
    mutations: Sequence[Mutation], workers: Sequence[Worker], pool: ThreadPoolExecutor, *, is_compiled: bool
) -> list[Event]:
    """Run the named tests of one kind of mutations without any, a share of them in each copy."""
    chosen = [m for m in mutations if m.is_compiled == is_compiled]
    tests = list(dict.fromkeys(test for m in chosen for test in m.tests))
    shares = [tests[index :: len(workers)] for index in range(len(workers))]
    runs = [
        pool.submit(worker.run_tests, share, "--continue-on-collection-errors", is_compiled=is_compiled)
        for worker, share in zip(workers, shares, strict=True)
        if share
    ]
    return [event for run in runs for event in run.result()]


def say(text: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(mutations: Sequence[Mutation]) -> list[Outcome]:
    """Try mutations in two workers, printing one line each as it ends."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(NUM_WORKERS) as pool:
        workers = [Worker(Path(folder) / f"tree{index}") for index in range(NUM_WORKERS)]
        start = time.perf_counter()
        baseline = {kind: run_baseline(mutations, workers, pool, is_compiled=kind) for kind in (False, True)}
        outcomes_without = [event["outcome"] for events in baseline.values() for event in events]
        say(
            f"without mutations: {outcomes_without.count('passed')} of {len(outcomes_without)} tests passed, "
            f"{outcomes_without.count('skipped')} were skipped ({time.perf_counter() - start:.0f} s)"
        )
        for event in (event for events in baseline.values() for event in events if not event["test"]):
            say(f"  {event['error']}")
        free: queue.Queue[Worker] = queue.Queue()
        for worker in workers:
            free.put(worker)
        jobs = [pool.submit(try_mutation, m, free, baseline[m.is_compiled]) for m in mutations]
        for done in as_completed(jobs):
            outcome = done.result()
            outcomes.append(outcome)
            place = f"[{len(outcomes):{len(str(len(mutations)))}}/{len(mutations)}]"
            say(f"{place} {outcome.result:8} {outcome.mutation.name}  ({outcome.mutation.path})  "
                f"{outcome.detail}  {outcome.seconds:.1f} s")  # fmt: skip
        for worker in workers:
            worker.close()
    return outcomes


def main(arguments: Sequence[str]) -> int:
    """Run the mutations whose names hold one of the arguments; return the exit code."""
    chosen = [m for m in MUTATIONS if not arguments or any(a in m.name for a in arguments)]
    if not chosen:
        say(f"No mutation is named {' '.join(arguments)!r}. Names: {', '.join(m.name for m in MUTATIONS)}.")
        return 2
    start = time.perf_counter()
    outcomes = run(chosen)
    counts = {r: sum(o.result == r for o in outcomes) for r in ("died", "survived", "unclear", "skipped")}
    say(f"{len(outcomes)} mutations: " + ", ".join(f"{n} {r}" for r, n in counts.items())
        + f" ({time.perf_counter() - start:.0f} s)")  # fmt: skip
    for result in ("survived", "unclear", "skipped"):
        for outcome in outcomes:
            if outcome.result == result:
                say(f"  {result}: {outcome.mutation.name}: {outcome.mutation.fault}")
    return 1 if counts["survived"] + counts["unclear"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
