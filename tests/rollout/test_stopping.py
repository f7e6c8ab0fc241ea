"""Stop texts: found wherever they end, and tokens, log-probs, versions and record are cut together."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, sampled
from tests.rollout.recorded import assert_nothing_left, assert_recorded, differing, forced_record

from tracefp4.errors import ConfigError
from tracefp4.rollout import SamplingParams
from tracefp4.rollout.stopping import stop_cut

# a vocabulary of byte strings, as byte-level tokenizers have: letters, parts of characters, tokens of several bytes
VOCABULARY = [
    b"a", b"b", b"<", b"/", b">", b"</", b"a>", b"ab<", b"/a>b", b"\n\n",
    "\u00e9".encode(), b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"", b" a", b"\xa9</a>",
]  # fmt: skip


def decode(ids):
    return b"".join(VOCABULARY[i] for i in ids).decode("utf-8", errors="replace")


def encode(*texts):
    return [VOCABULARY.index(text if isinstance(text, bytes) else text.encode()) for text in texts]


def cut(tokens, *stops, keeps=False):
    return stop_cut(tokens, SamplingParams(max_tokens=9, stop=stops, keeps_stop=keeps), decode=decode)


@pytest.mark.parametrize(
    ("tokens", "stop", "without", "with_stop"),
    [
        (["b", "<", "/", "a>"], "</a>", 1, 4),  # spans three tokens, ends with the last
        (["b", "<", "/a>b"], "</a>", 1, 3),  # ends inside a token
        (["ab<", "/a>b"], "</a>", 1, 2),  # begins inside a token, which stays whole
        (["ab<", "/a>b"], "b</a>b", 1, 2),
        (["a", "b", "\n\n"], "\n\n", 2, 3),
        (["a", "b", "\n\n"], "\n", 2, 3),
        (["</", "a>"], "</a>", 0, 2),  # nothing before it
        (["a", b"\xc3", b"\xa9", "<"], "\u00e9", 1, 3),  # the character is complete at its second byte only
        (["a", b"\xc3", b"\xa9</a>"], "</a>", 3, 3),  # the newest token ends a character, then the stop text
        (["b", b"\xf0\x9f", b"\x98\x80", "a"], "\U0001f600a", 1, 4),
        (["a", b"", b"", "b", b"", "<"], "b<", 1, 6),  # tokens without text in between
        ([" a", "b"], "b", 1, 2),
    ],
)
def test_where_a_completion_ends(tokens, stop, without, with_stop):
    # Mutations: count characters of single tokens; cut at the token in which the stop text begins.
    ids = encode(*tokens)
    assert cut(ids, stop) == without
    assert cut(ids, stop, keeps=True) == with_stop


@pytest.mark.parametrize("tokens", [[], ["a"], ["<", "a>"], ["a", b"\xc3"], ["</", "b"]])
def test_no_stop_text_no_cut(tokens):
    assert cut(encode(*tokens), "</a>") is None
    assert cut(encode(*tokens), "</a>", "\u00e9") is None


def test_half_a_character_is_no_stop_text():
    # U+FFFD stands for what is not there yet; a stop text of that very character would need it whole.
    assert cut(encode("a", b"\xc3"), "\u00e9") is None
    assert cut(encode("a", b"\xc3", b"\xa9"), "\u00e9") == 1


def test_the_first_and_then_the_shortest_stop_text_counts():
    ids = encode("b", "<", "/", "a>")
    assert cut(ids, "a>", "</a>") == 1 and cut(ids, "a>") == 3
    assert cut(ids, "</a>", "<", keeps=True) == 2


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40),
    st.sampled_from(["</a>", "b", "\u00e9", "a\n\n"]),
)
def test_a_cut_comes_with_the_first_token_that_shows_the_stop_text(ids, stop):
    """Token by token as an engine asks: the window finds what the whole text holds, and never anything else."""
    for count in range(1, len(ids) + 1):
        text, kept = decode(ids[:count]), cut(ids[:count], stop)
        assert (kept is not None) == (stop in text)
        if kept is not None:
            begin = text.index(stop)
            assert decode(ids[:kept]).startswith(text[:begin])
            assert kept == 0 or not decode(ids[: kept - 1]).startswith(text[:begin])
            return


PAIRS = [chr(ord("A") + i % 20) + chr(ord("a") + i % 7) for i in range(40)]


def pairs(ids):
    """Two characters a token, so that a stop text can begin and end inside one."""
    return "".join(PAIRS[i] for i in ids)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(8, 10), (9, 11), (9, 12), (7, 12)])
def test_tokens_log_probs_versions_and_record_are_cut_together(model, keeps, begin, end):
    engine = make_engine(model, control=True, decode=pairs)
    prompts = [[1, 2, 3], [4, 5]]
    free = [row[0] for row in engine.generate(prompts, sampled(9, seed=3))]
    text = pairs(free[0].token_ids)
    stop = text[begin:end]
    found = [row[0] for row in engine.generate(prompts, sampled(9, seed=3, stop=(stop,), keeps_stop=keeps))]
    at = text.index(stop)
    kept = -(-(at + len(stop)) // 2) if keeps else -(-at // 2)
    c = found[0]
    assert c.finish_reason == "stop" and c.token_ids == free[0].token_ids[:kept]
    assert c.logprobs == free[0].logprobs[:kept] and len(c.weight_versions) == kept
    # the last kept token was an input of those that went, and still has no row: no later token reads it
    assert c.record.length == 3 + kept - 1 and c.record.valid.all()
    assert differing(c.record, forced_record(model, free[0]), end=c.record.length) == []
    assert_nothing_left(engine)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("cuts", [(4,), (5,), (4, 5)])
def test_a_stop_text_may_begin_before_a_suspension(model, keeps, cuts):
    # Mutation: the text of the tokens since the suspension alone, in which the stop text is not whole.
    engine = make_engine(model, control=True, decode=pairs)
    ((free,),) = engine.generate([[1, 2, 3]], sampled(9, seed=3))
    params = sampled(9, seed=3, stop=(pairs(free.token_ids)[7:11],), keeps_stop=keeps)
    ((whole,),) = engine.generate([[1, 2, 3]], params)
    assert len(whole.token_ids) == (6 if keeps else 4), "characters 7 to 10 are in tokens 3 to 5"
    engine.submit([1, 2, 3], params)
    for i in range(cuts[-1]):
        engine.step()
        if i + 1 in cuts:
            (part,) = engine.suspend()
            assert part.finish_reason == "abort" and len(part.token_ids) == i + 1
            engine.resubmit(part, [], replace(params, max_tokens=9 - i - 1))
    while engine.has_work:
        engine.step()
    (c,) = engine.take_finished()
    assert c.finish_reason == "stop" and c.token_ids == whole.token_ids and c.logprobs == whole.logprobs
    assert c.weight_versions == whole.weight_versions and c.sampled_flags == whole.sampled_flags
    assert c.record.length == whole.record.length and differing(c.record, whole.record) == []
    assert_nothing_left(engine)


def test_a_turn_that_ended_and_the_environments_tokens_are_no_part_of_the_next_stop_text(model):
    engine = make_engine(model, control=True, decode=pairs)
    ((first,),) = engine.generate([[1, 2, 3]], sampled(3, seed=3))
    (free,) = engine.extend([first], [[]], sampled(3, seed=3))
    over_the_end = (pairs(free.token_ids)[5:7],)
    (c,) = engine.extend([first], [[]], sampled(3, seed=3, stop=over_the_end))
    assert first.finish_reason == "length" and c.token_ids == free.token_ids


def test_a_stop_text_may_end_with_the_last_allowed_token_and_a_stop_token_goes_first(model):
    engine = make_engine(model, control=True, decode=pairs)
    ((free,),) = engine.generate([[1, 2, 3]], sampled(4, seed=3))
    last, third = pairs(free.token_ids[-1:]), free.token_ids[2]
    ((c,),) = engine.generate([[1, 2, 3]], sampled(4, seed=3, stop=(last,), keeps_stop=True))
    assert c.finish_reason == "stop" and c.token_ids == free.token_ids
    ((c,),) = engine.generate(
        [[1, 2, 3]], sampled(4, seed=3, stop=(pairs([third]),), stop_token_ids=(third,))
    )
    assert c.token_ids == free.token_ids[:3]


def test_a_completion_that_begins_with_the_stop_text_is_empty(model):
    engine = make_engine(model, control=True, decode=pairs)
    ((free,),) = engine.generate([[1, 2, 3]], sampled(2, seed=3))
    ((c,),) = engine.generate([[1, 2, 3]], sampled(2, seed=3, stop=(pairs(free.token_ids[:1]),)))
    assert c.token_ids == c.logprobs == c.weight_versions == [] and c.record.length == 2
    (longer,) = engine.extend([c], [[7]], sampled(2, seed=3))
    assert longer.token_ids[0] == 7 and longer.record.length == 3 + 3 - 1
    assert differing(longer.record, forced_record(model, longer)) == []


def test_stop_texts_need_a_decoder_and_some_text(model):
    with pytest.raises(ConfigError, match="decode=tokenizer.decode"):
        make_engine(model).generate([[1]], sampled(2, stop=("x",)))
    for wrong in (("",), "text"):
        with pytest.raises(ConfigError, match=r"SamplingParams\.stop"):
            sampled(2, stop=wrong)


def test_a_decoder_that_fails_harms_no_other_request():
    model, is_broken = tiny_model(), []

    def breaking(ids):
        assert not is_broken, "broken"
        return "".join(chr(65 + i) for i in ids)

    engine = make_engine(model, control=True, decode=breaking)
    texts = engine.submit([4, 5], sampled(6, stop=("zz",)))
    engine.submit([1, 2, 3], sampled(2, seed=1), prompt_index=1)  # ends in the step that fails
    engine.submit([1, 2, 3, 4], sampled(6, seed=1), prompt_index=2)
    engine.step()
    is_broken.append(True)
    with pytest.raises(AssertionError, match="broken"):
        engine.step()
    is_broken.clear()
    engine.abort(texts)
    while engine.has_work:
        engine.step()
    found = engine.take_finished()
    assert [(c.prompt_index, c.finish_reason) for c in found] == [(0, "abort"), (1, "length"), (2, "length")]
    for c in found:
        assert_recorded(c, model)
    assert_nothing_left(engine)
