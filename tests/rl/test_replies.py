"""What an environment says, as token ids: text, ids, and messages around a turn that is never encoded again."""

import pytest
from tests.rl.worlds import Letters, World, says, tasks

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.replies import encode_reply, first_prompt
from tracefp4.rl.tiny import build_tokenizer

REPLY = [{"role": "tool", "content": "7"}, {"role": "user", "content": "on"}]
# as many chat models write it: every message has an end mark and a line break after it
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# as some templates do it: what the assistant thought is dropped once a user has answered
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}<|user|>"
    "{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["one", "two 2"], vocab_size=262)


def test_text_and_ids_follow_as_they_are():
    assert encode_reply("abX", tokenizer=Letters(), last_id=3) == [7, Letters().encode("X")[0]]
    assert encode_reply([5, 2, 39], tokenizer=Letters(), last_id=2) == [5, 2, 39]
    assert (
        encode_reply("", tokenizer=Letters(), last_id=3)
        == encode_reply([], tokenizer=Letters(), last_id=3)
        == []
    )
    for content, message in (([40], "unknown token ids"), ([-1], "unknown token ids"), ([1.5], "needed"),
                             ([True], "needed"), ([{"role": "user"}], "needed")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            encode_reply(content, tokenizer=Letters(), last_id=3)


def test_messages_come_with_what_the_template_writes_around_them(tokenizer, monkeypatch):
    end = tokenizer.eos_token_id
    found = encode_reply(REPLY, tokenizer=tokenizer, last_id=end)
    assert tokenizer.decode(found) == "<|tool|>7<|user|>on<|assistant|>"
    monkeypatch.setattr(tokenizer, "chat_template", MARKED)
    text = "\n<|tool|>7<|end|>\n<|user|>on<|end|>\n<|assistant|>"
    # the policy sampled the end mark itself, or was cut before it
    assert tokenizer.decode(encode_reply(REPLY, tokenizer=tokenizer, last_id=end)) == text
    assert tokenizer.decode(encode_reply(REPLY, tokenizer=tokenizer, last_id=5)) == "<|end|>" + text


def test_a_template_that_hides_the_policys_message_is_refused(tokenizer, monkeypatch):
    with pytest.raises(ConfigError, match="no chat template"):
        encode_reply(REPLY, tokenizer=Letters(), last_id=3)
    monkeypatch.setattr(tokenizer, "chat_template", FORGETFUL)
    with pytest.raises(ConfigError, match="0 times"):
        encode_reply(REPLY, tokenizer=tokenizer, last_id=3)


def test_a_prompt_is_the_tasks_or_the_environments(tokenizer):
    (task,) = tasks("two 2")
    world = World(says())

    def prompt(content):
        world.prompt = lambda asked: content
        return first_prompt(task, tokenizer=tokenizer, environment=world)

    own = first_prompt(task, tokenizer=tokenizer, environment=None)
    assert prompt(None) == own and tokenizer.decode(own) == "<|user|>two 2<|assistant|>"
    assert tokenizer.decode(prompt("one")) == "<|user|>one<|assistant|>"
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "one"}]
    assert tokenizer.decode(prompt(messages)) == "<|system|>be<|user|>one<|assistant|>"
    assert prompt([9, 8]) == [9, 8]
    for content, message in (([], "is empty"), ([0.5], "ValueError"), (3, "TypeError")):
        with pytest.raises(RecordError, match=message):
            prompt(content)
