"""Accuracy, its standard error and pass@k, against hand-worked numbers."""

import math

import pytest
from tests.rl.tiny_runs import REWARD

from tracefp4.errors import ConfigError
from tracefp4.rl.evaluation import evaluate, pass_at_k, standard_error
from tracefp4.rl.rewards import RewardConfig, Scorer
from tracefp4.rl.tasks import JsonlTasks
from tracefp4.rollout import Completion, SamplingParams


class ScriptedEngine:
    """Gives each prompt its scripted completions."""

    def __init__(self, texts):
        self.texts = texts

    def generate(self, prompts, params):
        return [
            [
                Completion(
                    prompt_index=i,
                    sample_index=j,
                    prompt_ids=prompts[i],
                    token_ids=[ord(letter) for letter in text],
                    logprobs=[-1.0] * len(text),
                    finish_reason="stop",
                    weight_versions=[0] * len(text),
                    record=None,
                )
                for j, text in enumerate(self.texts[i])
            ]
            for i in range(len(prompts))
        ]


class Letters:
    """A tokenizer whose ids are character codes."""

    chat_template = None

    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, ids, *, skip_special_tokens):
        return "".join(chr(i) for i in ids)


def run(texts, tiny, num_items):
    return evaluate(
        ScriptedEngine(texts),
        tokenizer=Letters(),
        source=JsonlTasks(tiny[1]),
        scorer=Scorer(RewardConfig(verifier="function", function=REWARD)),
        params=SamplingParams(max_tokens=4, n=len(texts[0])),
        num_items=num_items,
    )


def test_accuracy_standard_error_and_pass_at_k(tiny):
    found = run([["9", "1", "1", "1"], ["99", "9", "1", "19"], ["1", "1", "1", "1"]], tiny, 3)
    assert found.accuracy == pytest.approx((0.25 + 0.5 + 0.0) / 3)
    assert found.standard_error == pytest.approx(0.25 / math.sqrt(3))
    assert found.pass_at_k[1] == pytest.approx(found.accuracy)
    assert found.pass_at_k[2] == pytest.approx((0.5 + 5 / 6 + 0) / 3)
    assert found.pass_at_k[4] == pytest.approx(2 / 3)
    assert found.outcomes["scored"] == 12
    assert found.mean_tokens == pytest.approx(14 / 12)


def test_a_partial_reward_is_not_right(tiny):
    assert run([["19"]], tiny, 1).accuracy == 0.0


def test_no_items_is_refused(tiny):
    with pytest.raises(ConfigError, match="at least 1 item"):
        run([["9"]], tiny, 0)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 0, 4, 0.0), (4, 4, 1, 1.0), (4, 1, 1, 0.25), (4, 1, 4, 1.0), (5, 2, 2, 0.7), (1, 0, 1, 0.0)],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_standard_error():
    assert standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))
    assert standard_error([1.0]) == 0.0
