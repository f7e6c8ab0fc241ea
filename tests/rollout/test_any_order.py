"""Everything an engine offers, in any order: no page, host copy or log row is lost or left, and records stay right.

A state machine calls the engine at random. After every call all frames add up and the pages of every running sequence
hold the K and V of its record. At the end everything is run out, handed over and checked: nothing remains, and whatever
one version of the weights computed alone is compared with a fresh engine, position by position.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, sampled
from tests.rollout.recorded import (
    assert_frames_add_up,
    assert_nothing_left,
    assert_pages_hold_the_record,
    differing,
    forced_record,
)

from tracefp4.guidance import Site

HALF = (Site("x", 0), Site("x", 1), Site("k", 1), Site("v", 1))
MODELS = (tiny_model(), tiny_model(seed=9))
PROMPTS = ([7, 3, 9, 1, 4, 4, 2, 8, 5], [7, 3, 9, 1, 4, 4, 2, 6], [7, 3, 9, 1, 1], [2])
LONGEST = 24
COMPARED = 2  # completions that are compared with a fresh engine, per run


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(9, 20),
        max_batch=st.integers(1, 4),
        max_tokens=st.sampled_from([4, 7, 64]),
        prefix_cache=st.booleans(),
        max_swapped=st.sampled_from([None, 0, 2]),
        records=st.sampled_from([True, True, HALF, False]),
        max_log_rows=st.sampled_from([12, 1 << 20]),
    )
    def make(self, num_pages, max_batch, max_tokens, prefix_cache, max_swapped, records, max_log_rows):
        self.records = records
        self.engine = make_engine(
            MODELS[0],
            control=True,
            num_pages=num_pages,
            max_batch=max_batch,
            max_tokens_per_step=max_tokens,
            prefix_cache=prefix_cache,
            max_swapped_pages=max_swapped,
            records=records,
            max_log_rows=max_log_rows,
            decode=lambda ids: "".join(chr(65 + i) for i in ids),
        )
        self.paused = False
        self.taken, self.submitted, self.wanted = [], 0, 0

    @rule(
        prompt=st.sampled_from(PROMPTS), n=st.integers(1, 3), tokens=st.integers(1, 6), seed=st.integers(0, 3)
    )
    def submit(self, prompt, n, tokens, seed):
        params = sampled(tokens, n=n, seed=seed, stop=("A", "BC"), stop_token_ids=(9,))
        self.engine.submit(prompt, params, prompt_index=self.submitted)
        self.submitted += 1
        self.wanted += n

    def run(self, count):
        if self.paused:
            self.engine.resume()
            self.paused = False
        for _ in range(count):
            if self.engine.has_work:
                self.engine.step()
                self.pages_and_records_agree()

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 2))
    def step(self, count):
        self.run(count)

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(2, 5))
    def steps(self, count):
        self.run(count)

    @precondition(lambda self: self.engine.has_work)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine._scheduler.request_ids))))

    @precondition(lambda self: self.engine._scheduler.running)
    @rule(others=st.integers(0, 20))
    def pause(self, others):
        """Rest, while others take some frames and give them back."""
        self.engine.pause()
        self.paused = True
        allocator = self.engine._allocator
        pages = [allocator.allocate() for _ in range(min(others, allocator.num_available))]
        for page in pages:
            allocator.rest(page)
            allocator.drop(page)

    @precondition(lambda self: self.engine.has_work)
    @rule(recompute=st.booleans(), keeps=st.booleans())
    def update(self, recompute, keeps):
        version = self.engine.weight_version + 1
        state = MODELS[version % 2].state_dict()
        self.engine.update_weights(state, version=version, recompute=recompute, keep_prefixes=keeps)

    @precondition(lambda self: len(self.engine._ledger.finished) > 2)
    @rule()
    def take(self):
        self.keep(self.engine.take_finished())

    @precondition(lambda self: len(self.engine._scheduler.running) > 2)
    @rule()
    def suspend(self):
        self.keep(self.engine.suspend())

    @precondition(lambda self: any(len(c.token_ids) < LONGEST - 12 for c in self.taken))
    @rule(data=st.data(), added=st.lists(st.integers(0, 39), max_size=2), recompute=st.booleans())
    def go_on(self, data, added, recompute):
        short = [c for c in self.taken if len(c.token_ids) < LONGEST - 12]
        c = data.draw(st.sampled_from(short))
        self.engine.resubmit(c, added, sampled(3, seed=1), recompute=recompute)
        self.wanted += 1

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), cut=st.integers(0, 3))
    def begin_with(self, data, cut):
        """A new request whose prompt is what somebody else's trajectory holds, or most of it."""
        c = data.draw(st.sampled_from(self.taken))
        tokens = [*c.prompt_ids, *c.token_ids]
        self.engine.submit(tokens[: max(1, len(tokens) - cut)], sampled(2), prompt_index=self.submitted)
        self.submitted += 1
        self.wanted += 1

    def keep(self, completions):
        for c in completions:
            num = len(c.token_ids)
            assert len(c.logprobs) == len(c.weight_versions) == len(c.sampled_flags) == num
            assert [v == -1 for v in c.weight_versions] == [not flag for flag in c.sampled_flags]
            if c.record is not None:
                inputs = len(c.prompt_ids) + num - 1
                assert c.record.start == 0
                assert c.record.length == inputs or (c.finish_reason == "abort" and c.record.length < inputs)
                versions = c.record.versions().tolist()
                for i, version in enumerate(c.weight_versions):
                    assert version == -1 or version == versions[len(c.prompt_ids) - 1 + i]
        self.taken += completions
        self.wanted -= len(completions)

    @invariant()
    def pages_and_records_agree(self):
        if not hasattr(self, "engine"):
            return
        assert_frames_add_up(self.engine)
        for sequence in self.engine._scheduler.running:
            assert_pages_hold_the_record(self.engine, sequence)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.resume()
        while self.engine.has_work:
            self.engine.step()
            self.pages_and_records_agree()
        self.keep(self.engine.take_finished())
        assert self.wanted == 0, "every sample comes back once"
        assert_nothing_left(self.engine)
        compared = 0
        for c in reversed(self.taken):
            if c.record is None or compared == COMPARED or not c.token_ids:
                continue
            versions = c.record.versions().unique().tolist()
            if len(versions) == 1 and self.engine.stats.positions_recoded == 0:
                expected = forced_record(MODELS[versions[0] % 2], c, records=self.records)
                assert differing(c.record, expected, end=c.record.length) == []
                compared += 1


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
AnyOrder.TestCase.settings = settings(PATIENT, max_examples=14, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.slow
def test_at_length():
    run_state_machine_as_test(AnyOrder, settings=settings(PATIENT, max_examples=300, stateful_step_count=40))
