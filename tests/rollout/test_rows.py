"""Rows of decoding sequences: what they hold is what the sequences say, after any joining and leaving."""

import pytest
import torch
from tests.rollout.engines import make_engine, make_prompts, sampled

from tracefp4.errors import ConfigError
from tracefp4.rollout.options import EngineOptions
from tracefp4.rollout.rows import FORCED, KEY, NUM_COLUMNS, POSITION, SLOT, TEMPERATURE, TOKEN, TOP_K, TOP_P
from tracefp4.rollout.sizing import Room, pages_in


def assert_rows_are_their_sequences(engine):
    """Every column and page of every row, and padding beyond."""
    rows, size = engine._scheduler.rows, engine.pool.shape.page_size
    decoding = [s for s in engine._scheduler.running if s.is_decoding]
    assert sorted(map(id, rows.sequences)) == sorted(map(id, decoding))
    for row, sequence in zip(rows.buffer, rows.sequences, strict=False):
        params, position, frames = sequence.request.params, sequence.num_cached, sequence.table.frames
        assert row[TOKEN] == sequence.ids[-1] and row[POSITION] == position == len(sequence.ids) - 1
        assert row[KEY] == sequence.noise_key and row[TOP_K] == params.top_k
        floats = row.view(torch.float64)
        assert floats[TEMPERATURE] == params.temperature and floats[TOP_P] == params.top_p
        assert row[FORCED] == (-1 if sequence.forced_token is None else sequence.forced_token)
        assert row[NUM_COLUMNS : NUM_COLUMNS + len(frames)].tolist() == frames
        assert (row[NUM_COLUMNS + len(frames) :] == engine.pool.null_frame).all()
    assert (rows.buffer[len(rows) :] == rows.padding).all()
    return {
        s: s.table.frames[s.num_cached // size] * size + s.num_cached % size
        for s in decoding
        if s.table.pages
    }


@pytest.mark.parametrize("changes", [{}, {"num_pages": 9}, {"max_batch": 3}, {"prefix_cache": True}])
def test_rows_hold_what_their_sequences_say_at_every_step(changes):
    # Mutations: the last row not moved into a gap; a page that is turned written to another row.
    engine = make_engine(control=True, **changes)
    schedule, slots = engine._scheduler.schedule, []

    def checked():
        chunks, rows = schedule(), engine._scheduler.rows
        expected = assert_rows_are_their_sequences(engine)
        found = dict(zip(rows.sequences, rows.buffer[: len(rows), SLOT].tolist(), strict=True))
        assert found == expected
        slots.append(len(found))
        return chunks

    engine._scheduler.schedule = checked
    prompts = make_prompts(5, shortest=6, longest=10)
    engine.generate(prompts, sampled(11, n=2, top_k=5, top_p=0.8, stop_token_ids=(1, 2, 3)))
    engine.force(prompts, [[[4, 5, 6], [7] * 9]] * 5)
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, sampled(9), prompt_index=index)
        engine.step()
    engine.pause()
    assert len(engine._scheduler.rows) == 0
    engine.resume()
    engine.step()
    engine.abort(engine._scheduler.rows.sequences[0].request.request_id)
    while engine.has_work:
        engine.step()
    assert sum(slots) > 100 and (engine._scheduler.rows.buffer == engine._scheduler.rows.padding).all()


def test_sequences_longer_than_allowed_are_refused_before_anything_runs():
    engine = make_engine(max_length=12)
    with pytest.raises(ConfigError, match="has 13 positions. At most 12"):
        engine.generate([[1] * 5, [1] * 6], sampled(8))
    assert not engine.has_work
    assert len(engine.generate([[1] * 5], sampled(8))[0][0].token_ids) == 8
    assert engine._scheduler.rows.max_length == 12


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_pages": None}, "num_pages None.*Give num_pages"),
        ({"memory_share": 1.5}, "memory_share 1.5"),
        ({"max_length": 0}, "max_length 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        make_engine(**changes)


def options(**changes):
    settings = {
        "precision": (),
        "arithmetic": None,
        "plan_digest": "",
        "max_batch": 1,
        "max_tokens_per_step": 1,
    }
    return EngineOptions(**(settings | changes))


def test_pages_are_what_memory_leaves_beside_weights_and_passes():
    room = Room(total=1000, used=200, workspace=100)
    # 0.9 of 1000 less 300 is 600: sixty pages of 10, one of them the null frame
    assert pages_in(room, 10, options=options(), needed=59) == 59
    assert pages_in(room, 10, options=options(memory_share=0.5), needed=1) == 19
    with pytest.raises(ConfigError, match="Not even one sequence fits.*room for 59 pages.*At least 60"):
        pages_in(room, 10, options=options(), needed=60)
    with pytest.raises(ConfigError, match="room for 0 pages"):
        pages_in(room, 10, options=options(memory_share=0.2), needed=1)
