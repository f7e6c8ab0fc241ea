"""Prompts from reasoning-gym and JSONL: reproducible by index, resumable, with errors that say where."""

import json

import pytest
from reasoning_gym import create_dataset as create_reference

from tracefp4.errors import ConfigError
from tracefp4.rl.tasks import (
    HELD_OUT_OFFSET,
    JsonlTasks,
    ReasoningGymTasks,
    Task,
    TaskStream,
    encode_prompt,
)

OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


class Letters:
    """A tokenizer of single characters, with or without a chat template."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def encode(self, text, *, add_special_tokens=True):
        return ([1] if add_special_tokens else []) + [ord(letter) for letter in text]

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def test_item_i_is_reasoning_gyms_item_i_and_does_not_depend_on_history():
    source = ReasoningGymTasks("chain_sum", seed=5, config=OPTIONS)
    expected = create_reference("chain_sum", seed=5, **OPTIONS)[7]
    task = source.item(7)
    source.item(0)
    assert (task.prompt, task.answer) == (expected["question"], expected["answer"])
    assert ReasoningGymTasks("chain_sum", seed=5, config=OPTIONS).item(7) == task
    assert task.source_config == OPTIONS


def test_items_go_on_beyond_the_datasets_nominal_size():
    assert ReasoningGymTasks("chain_sum", seed=5).item(100_000).prompt


def test_the_held_out_split_moves_the_seed_and_training_cannot_reach_it():
    source = ReasoningGymTasks("chain_sum", seed=5, config=OPTIONS)
    held_out = source.held_out()
    assert (
        held_out.item(0).prompt
        == create_reference("chain_sum", seed=5 + HELD_OUT_OFFSET, **OPTIONS)[0]["question"]
    )
    assert held_out.digest != source.digest
    with pytest.raises(ConfigError, match="held-out"):
        source.item(HELD_OUT_OFFSET)
    with pytest.raises(ConfigError, match="training split"):
        held_out.held_out()


def test_neighbouring_seeds_share_all_items_but_one():
    source = ReasoningGymTasks("chain_sum", seed=5, config=OPTIONS)
    shifted = ReasoningGymTasks("chain_sum", seed=6, config=OPTIONS)
    assert [source.item(i + 1).prompt for i in range(10)] == [shifted.item(i).prompt for i in range(10)]


def test_unknown_datasets_and_options_are_refused_with_what_is_known():
    with pytest.raises(ConfigError, match="'chain_sum'"):
        ReasoningGymTasks("chainsum", seed=0)
    with pytest.raises(ConfigError, match=r"Allowed are .*min_terms"):
        ReasoningGymTasks("chain_sum", seed=0, config={"terms": 2})
    with pytest.raises(ConfigError, match="refuses its options"):
        ReasoningGymTasks("chain_sum", seed=0, config={"min_terms": 5, "max_terms": 2})
    with pytest.raises(ConfigError, match="seed"):
        ReasoningGymTasks("chain_sum", seed=0, config={"seed": 2})
    with pytest.raises(ConfigError, match="seed >= 0"):
        ReasoningGymTasks("chain_sum", seed=-1)


@pytest.fixture
def task_file(tmp_path):
    rows = [{"prompt": f"q{index}", "answer": index} for index in range(5)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_jsonl_items_repeat_in_file_order(task_file):
    source = JsonlTasks(task_file)
    assert [source.item(index).prompt for index in range(7)] == ["q0", "q1", "q2", "q3", "q4", "q0", "q1"]
    assert source.item(2).answer == "2"
    assert source.item(2).source == str(task_file)


def test_jsonl_shuffling_is_a_new_permutation_each_epoch_and_repeatable(task_file):
    source = JsonlTasks(task_file, shuffle_seed=3)
    prompts = [source.item(index).prompt for index in range(20)]
    epochs = [prompts[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(epoch) == ["q0", "q1", "q2", "q3", "q4"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [JsonlTasks(task_file, shuffle_seed=3).item(index).prompt for index in (17, 2)] == [
        prompts[17],
        prompts[2],
    ]


def test_a_resumed_stream_continues_with_the_next_item(task_file):
    stream = TaskStream(JsonlTasks(task_file, shuffle_seed=1))
    stream.take(3)
    state = json.loads(json.dumps(stream.state()))
    expected = stream.take(4)
    resumed = TaskStream(JsonlTasks(task_file, shuffle_seed=1))
    resumed.restore(state)
    assert resumed.take(4) == expected
    with pytest.raises(ConfigError, match="belongs to source"):
        TaskStream(JsonlTasks(task_file)).restore(state)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ("[1]", "JSON list"),
        ('{"answer": "1"}', "exactly one of"),
        ('{"prompt": "q", "messages": [], "answer": "1"}', "exactly one of"),
        ('{"prompt": "q"}', "answer None"),
        ('{"prompt": 3, "answer": "1"}', "type int"),
        ('{"messages": [], "answer": "1"}', "malformed messages"),
        ('{"messages": [{"role": "user"}], "answer": "1"}', "malformed messages"),
        ('{"prompt": "q", "answer": null}', "answer None"),
    ],
)
def test_malformed_lines_are_refused_with_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "q", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:3 .*{complaint}"):
        JsonlTasks(path)


def test_missing_and_empty_files_and_negative_indices_are_refused(tmp_path, task_file):
    with pytest.raises(ConfigError, match="cannot be read"):
        JsonlTasks(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no tasks"):
        JsonlTasks(tmp_path / "empty.jsonl")
    for source in (JsonlTasks(task_file), ReasoningGymTasks("chain_sum", seed=0)):
        with pytest.raises(ConfigError, match="got -1"):
            source.item(-1)


def text_of(ids):
    return "".join(chr(index) for index in ids)


def test_plain_prompts_are_encoded_with_the_tokenizers_special_tokens():
    task = Task(source="s", index=0, prompt="2+2=")
    assert encode_prompt(task, tokenizer=Letters(), system_prompt="Add: ") == [1, *map(ord, "Add: 2+2=")]


def test_chat_prompts_are_rendered_once_without_further_special_tokens():
    letters = Letters(chat_template="t")
    task = Task(source="s", index=0, prompt="2+2=")
    found = encode_prompt(task, tokenizer=letters, system_prompt="Add", uses_chat_template=True)
    assert text_of(found) == "<system>Add<user>2+2=<assistant>"
    turns = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "q"},
    )
    assert text_of(
        encode_prompt(Task(source="s", index=0, prompt="q", messages=turns), tokenizer=letters)
    ) == ("<user>hi<assistant>yo<user>q<assistant>")


def test_messages_without_a_template_and_empty_prompts_are_refused():
    task = Task(source="s", index=4, prompt="q", messages=({"role": "user", "content": "q"},))
    with pytest.raises(ConfigError, match="Task 4 of 's' needs a chat template"):
        encode_prompt(task, tokenizer=Letters())

    class Silent(Letters):
        def encode(self, text, *, add_special_tokens=True):
            return []

    with pytest.raises(ConfigError, match="empty prompt"):
        encode_prompt(Task(source="s", index=0, prompt=""), tokenizer=Silent())
