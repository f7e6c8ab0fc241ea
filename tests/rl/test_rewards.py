"""Rewards: verifiers, the time limit, and a stated outcome for every failure."""

import contextlib
import math
import signal
import sys
import threading
import time
import types

import pytest
from reasoning_gym.utils import extract_answer as reference_extract

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.rewards import RewardConfig, Scorer, outcome_metrics
from tracefp4.rl.tasks import ReasoningGymTasks, Task
from tracefp4.rl.time_limit import RewardTimeout, call_with_timeout
from tracefp4.rl.verifiers import extract_answer, verify_math

# a timer of 0.2 s must end a loop well before this, on a loaded machine
SOON_S = 2.0
TASK = Task(source="file", index=3, prompt="q", answer="42")


@pytest.fixture
def module():
    """A module of reward functions under the name `reward_functions_for_test`."""
    made = types.ModuleType("reward_functions_for_test")

    def spin(prompt, completion, answer):
        while True:
            pass

    def stubborn(prompt, completion, answer):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    made.spin, made.stubborn = spin, stubborn
    made.exact = lambda prompt, completion, answer: completion == answer
    made.fails = lambda prompt, completion, answer: 1 / 0
    made.nothing = lambda prompt, completion, answer: None
    made.nan = lambda prompt, completion, answer: math.nan
    made.constant = 3
    sys.modules[made.__name__] = made
    yield made.__name__
    del sys.modules[made.__name__]


def scorer(module, name, **changes):
    return Scorer(RewardConfig(verifier="function", function=f"{module}:{name}", timeout_s=0.2, **changes))


@pytest.mark.parametrize(
    "text",
    [
        "<answer>4</answer>",
        "<answer> 4\n</answer>",
        "<answer>1</answer> no <answer>2\n3</answer>",
        "4",
        "<answer>4",
        "<answer></answer>",
        "<ANSWER>4</ANSWER>",
        "<answer><answer>4</answer></answer>",
    ],
)
def test_answers_are_extracted_as_reasoning_gym_does(text):
    assert extract_answer(text) == reference_extract(text)


def test_reasoning_gym_scores_by_the_tasks_own_dataset():
    task = ReasoningGymTasks("chain_sum", seed=1).item(0)
    scoring = Scorer(RewardConfig())
    assert scoring.score(task, completion=f"so <answer>{task.answer}</answer>").value == 1.0
    assert scoring.score(task, completion="<answer>x</answer>").value < 1.0
    found = scoring.score(task, completion=task.answer)
    assert (found.value, found.outcome) == (0.0, "no_answer")
    assert outcome_metrics(scoring.counts) == {
        "reward/scored": 2.0,
        "reward/no_answer": 1.0,
        "reward/timeout": 0.0,
        "reward/error": 0.0,
    }


def test_without_a_tag_the_whole_text_is_the_answer():
    task = ReasoningGymTasks("chain_sum", seed=1).item(0)
    assert Scorer(RewardConfig(answer_tag="")).score(task, completion=task.answer).value == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        ("42", "42", 1.0),
        ("42", "42.0", 1.0),
        ("42", "43", 0.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        ("1/2", r"$\frac{1}{2}$", 1.0),
        ("42", "so it is $42$", 1.0),
        ("42", "", 0.0),
        ("x^2+1", "1+x^2", 1.0),
    ],
)
def test_math_verify_compares_values_not_text(gold, answer, value):
    assert verify_math(answer, gold=gold) == value


def test_math_verify_scores_the_tagged_answer_under_our_timer():
    scoring = Scorer(RewardConfig(verifier="math_verify"))
    assert scoring.score(TASK, completion="41 then <answer>42</answer>").value == 1.0
    assert (
        signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
        or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    )


def test_a_dotted_function_gets_prompt_completion_and_answer(module):
    scoring = scorer(module, "exact")
    assert scoring.score(TASK, completion="42").value == 1.0
    assert scoring.score(TASK, completion="41").value == 0.0
    assert scoring.counts["scored"] == 2


@pytest.mark.parametrize("name", ["spin", "stubborn"])
def test_a_function_that_loops_is_stopped_and_counted(module, name):
    scoring = scorer(module, name)
    start = time.monotonic()
    found = scoring.score(TASK, completion="")
    assert time.monotonic() - start < SOON_S
    assert (found.value, found.outcome) == (0.0, "timeout")
    assert scoring.counts["timeout"] == 1


@pytest.mark.parametrize(
    ("name", "detail"), [("fails", "ZeroDivisionError"), ("nothing", "None"), ("nan", "nan")]
)
def test_a_function_that_fails_scores_zero_and_is_counted_or_stops_the_run(module, name, detail):
    scoring = scorer(module, name)
    found = scoring.score(TASK, completion="")
    assert (found.value, found.outcome) == (0.0, "error")
    assert detail in found.detail
    assert scoring.counts["error"] == 1
    with pytest.raises(RecordError, match=f"task 3 of 'file' .*{detail}"):
        scorer(module, name, on_error="raise").score(TASK, completion="")


def test_a_timeout_can_stop_the_run(module):
    with pytest.raises(RecordError, match="timeout"):
        scorer(module, "spin", on_error="raise").score(TASK, completion="")


def test_a_running_timer_is_continued_and_the_handler_restored():
    calls = []
    handler = signal.signal(signal.SIGALRM, lambda signum, frame: calls.append(signum))
    outer = signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        with pytest.raises(RewardTimeout):
            call_with_timeout(lambda: time.sleep(5), timeout_s=0.05)
        assert call_with_timeout(lambda: 3, timeout_s=1.0) == 3
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60.0
        assert not calls
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *outer)


def test_scoring_outside_the_main_thread_is_refused():
    errors = []

    def work():
        try:
            call_with_timeout(lambda: 1, timeout_s=1.0)
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


@pytest.mark.parametrize("path", ["no_colon", "absent_module_xyz:f", "math:absent", "math:pi", ":f", "math:"])
def test_paths_that_name_no_function_are_refused(path):
    with pytest.raises(ConfigError, match="Reward function"):
        Scorer(RewardConfig(verifier="function", function=path))


@pytest.mark.parametrize(
    "fields",
    [
        {"verifier": "llm"},
        {"verifier": "function"},
        {"function": "a:b"},
        {"on_error": "skip"},
        {"isolation": "thread"},
        {"timeout_s": 0.0},
        {"timeout_s": math.inf},
    ],
    ids=str,
)
def test_configs_outside_their_range_are_refused(fields):
    with pytest.raises(ConfigError, match=r"RewardConfig\."):
        RewardConfig(**fields)


def test_an_unparsable_gold_answer_is_an_error_not_a_zero():
    scoring = Scorer(RewardConfig(verifier="math_verify"))
    found = scoring.score(Task(source="f", index=0, prompt="q", answer=""), completion="<answer>4</answer>")
    assert found.outcome == "error"


WORKER_FUNCTIONS = """
import sys

def length(prompt, completion, answer):
    return len(completion)

def in_c(prompt, completion, answer):
    return sum(range(10**13))  # one call into C that never looks at signals

def stubborn(prompt, completion, answer):
    while True:
        try:
            in_c(prompt, completion, answer)
        except BaseException:
            pass

def fails(prompt, completion, answer):
    raise KeyError("k")

def leaves(prompt, completion, answer):
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("name", "outcome", "value"),
    [
        # each starts a Python with torch; one stands for all in the fast set
        ("stubborn", "timeout", 0.0),
        pytest.param("length", "scored", 2.0, marks=pytest.mark.slow),
        pytest.param("in_c", "timeout", 0.0, marks=pytest.mark.slow),
        pytest.param("fails", "error", 0.0, marks=pytest.mark.slow),
        pytest.param("leaves", "error", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_worker_process_ends_what_a_timer_cannot(tmp_path, monkeypatch, name, outcome, value):
    (tmp_path / "worker_functions_for_test.py").write_text(WORKER_FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    path = f"worker_functions_for_test:{name}"
    scoring = Scorer(RewardConfig(verifier="function", function=path, timeout_s=0.5, isolation="process"))
    try:
        found = scoring.score(TASK, completion="ab")
        assert (found.outcome, found.value) == (outcome, value), found.detail
        if name == "length":
            start = time.monotonic()
            assert scoring.score(TASK, completion="abc").value == 3.0
            assert time.monotonic() - start < SOON_S
    finally:
        scoring.close()


@pytest.mark.slow
def test_a_worker_process_scores_reasoning_gym_tasks_and_reports_unknown_datasets():
    task = ReasoningGymTasks("chain_sum", seed=1).item(0)
    scoring = Scorer(RewardConfig(isolation="process"))
    try:
        assert scoring.score(task, completion=f"<answer>{task.answer}</answer>").value == 1.0
        with pytest.raises(ConfigError, match="Unknown reasoning-gym dataset"):
            scoring.score(TASK, completion="<answer>1</answer>")
        assert scoring.score(task, completion=f"<answer>{task.answer}</answer>").value == 1.0
    finally:
        scoring.close()
