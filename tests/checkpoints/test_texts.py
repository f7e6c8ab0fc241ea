"""Texts to calibrate on: every token once, in order, and every line that is no document named.

Mutations that must die: the last short sequence dropped, no end-of-sequence token between documents, more tokens than
asked for (all in `_documents_are_joined`).
"""

import json
from types import SimpleNamespace

import pytest

from tracefp4.checkpoints.texts import read_documents, token_sequences
from tracefp4.errors import ConfigError


class LetterTokenizer(SimpleNamespace):
    """One token a letter, 0 ends a sequence."""

    eos_token_id = 0
    chat_template = "template"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, tokenize):
        return "".join(f"<{m['content']}>" for m in messages)


def write(path, *rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8"
    )
    return path


def letters(sequences):
    return ["".join("|" if i == 0 else chr(i) for i in sequence.tolist()) for sequence in sequences]


@pytest.mark.parametrize(
    ("max_tokens", "wanted"),
    [(100, ["abc|", "de|<", "hi>|", "yo"]), (6, ["abc|", "de"]), (7, ["abc|", "de|"]), (1, ["a"])],
)
def test_documents_are_joined_and_cut(tmp_path, max_tokens, wanted):
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt": "not this one"}
    path = write(
        tmp_path / "t.jsonl",
        {"text": "abc", "prompt": "not this"},
        {"prompt": "de"},
        "",
        chat,
        {"text": "yo"},
    )
    found, digest = token_sequences(
        path, tokenizer=LetterTokenizer(), max_tokens=max_tokens, sequence_length=4
    )
    assert letters(found) == wanted
    assert (
        digest
        == token_sequences(path, tokenizer=LetterTokenizer(), max_tokens=max_tokens, sequence_length=3)[1]
    )


def test_a_text_file_is_one_document(tmp_path):
    path = write(tmp_path / "t.txt", "ab", "cd")
    assert list(read_documents(path)) == ["ab\ncd"]
    found, _ = token_sequences(path, tokenizer=LetterTokenizer(), max_tokens=100, sequence_length=100)
    assert letters(found) == ["ab\ncd"]


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("not json", 1),
        ({"answer": "x"}, 2),
        ({"text": 3}, 1),
        ({"messages": []}, 1),
        ({"messages": ["x"]}, 1),
        ([1], 1),
    ],
    ids=str,
)
def test_a_line_that_is_no_document_is_named(tmp_path, line, number):
    path = write(tmp_path / "t.jsonl", *[{"text": "fine"}] * (number - 1), line)
    with pytest.raises(ConfigError, match=rf"t.jsonl:{number} is no document"):
        list(read_documents(path))


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"not a .txt or .jsonl file"):
        list(read_documents(write(tmp_path / "t.csv", "a")))
    with pytest.raises(ConfigError, match=r"not a .txt or .jsonl file"):
        list(read_documents(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="holds no text"):
        empty = write(tmp_path / "t.jsonl", "")
        token_sequences(empty, tokenizer=LetterTokenizer(), max_tokens=4, sequence_length=4)
    without = LetterTokenizer(chat_template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        chat = write(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "hi"}]})
        token_sequences(chat, tokenizer=without, max_tokens=4, sequence_length=4)
