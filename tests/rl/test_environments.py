"""Trajectories of several turns: records, masks and versions by position, limits, failures, and order."""

import math
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.models.tiny_models import tiny_model
from tests.rl.worlds import END_ID, Letters, World, drawn, make_episodes, says, tasks
from tests.rollout.engines import make_engine
from tests.rollout.recorded import assert_nothing_left, assert_recorded, differing, forced_record

from tracefp4.errors import ConfigError, RecordError
from tracefp4.rl.advantages import AdvantageConfig
from tracefp4.rl.batching import pad
from tracefp4.rl.config import TaskConfig
from tracefp4.rl.environments import End, EpisodeLimits, Reply, build_environment
from tracefp4.rl.rollouts import RolloutMaker
from tracefp4.rl.update import mismatch_of

PROMPTS = tasks("CAT", "DO", "BIRDS")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def flat(groups):
    return [played for group in groups for played in group]


def samples_of(episodes, asked, params):
    maker = RolloutMaker(
        engine=episodes.engine,
        tokenizer=episodes.tokenizer,
        scorer=episodes.scorer,
        advantage=AdvantageConfig(normalize="none"),
        truncated="mask",
        codec="none",
        episodes=episodes,
    )
    return maker.make(asked, params, step=5)


def turns_of(world, seed):
    return [turn for _, own, turn in world.turns if own == seed]


def test_every_position_has_the_record_of_a_recomputation(model):
    # Mutation: the record of the last turn alone; an added token forgotten; a record that is off by one.
    world = World(says("XYZ", "", "AB"))
    episodes = make_episodes(world, model=model, turn_tokens=4)
    played = flat(episodes.play(PROMPTS, drawn(40)))
    assert [(one.completion.prompt_index, one.completion.sample_index) for one in played] == [
        (group, sample) for group in range(3) for sample in range(2)
    ]
    for one in played:
        c = one.completion
        assert one.num_turns == 4 and len(c.token_ids) == 4 * 4 + 5 and one.num_environment_tokens == 5
        assert c.sampled_mask == [True] * 4 + [False] * 3 + [True] * 8 + [False] * 2 + [True] * 4
        assert_recorded(c, model)
    assert world.num_opened == world.num_closed == 6 and episodes.counts["answered"] == 24
    assert_nothing_left(episodes.engine)


def test_only_new_positions_are_computed_after_a_turn(model):
    episodes = make_episodes(World(says("XYZ", "AB")), model=model, turn_tokens=4)
    rows, run = [], episodes.engine._runner.run
    decoding = episodes.engine._scheduler.rows
    episodes.engine._runner.run = lambda chunks: (
        rows.append(len(decoding) + sum(work.count for work in chunks)) or run(chunks)
    )
    played = flat(episodes.play(PROMPTS, drawn(40)))
    given = sum(len(Letters().encode(task.prompt)) for task in PROMPTS)
    # each prompt once for its two samples; then the last sampled token and the environment's, twice
    assert episodes.engine.stats.prefill_tokens == given + 6 * ((1 + 3) + (1 + 2))
    assert sum(rows) == given + sum(len(one.completion.token_ids) - 1 for one in played)
    assert episodes.engine.stats.positions_recomputed == 0


def test_lif_1_pages_that_move_to_host_memory_and_back_keep_their_rows(model):
    engine = make_engine(model, control=True, num_pages=10, decode=Letters().decode)
    episodes = make_episodes(World(says("XYZ", "AB")), engine=engine, turn_tokens=5)
    played = flat(episodes.play(PROMPTS, drawn(24)))
    assert engine.stats.preemptions > 0 and engine.stats.pages_swapped_out > 0
    for one in played:
        assert_recorded(one.completion, model)
    expected = flat(
        make_episodes(World(says("XYZ", "AB")), model=model, turn_tokens=5).play(PROMPTS, drawn(24))
    )
    assert [one.completion.token_ids for one in played] == [one.completion.token_ids for one in expected]
    assert_nothing_left(engine)


def test_aln_5_sampled_ids_are_never_encoded_again(model):
    world = World(says("ab", "ba"))
    episodes = make_episodes(world, model=model, turn_tokens=6)
    played = flat(episodes.play(PROMPTS, drawn(60, n=16, temperature=2.0)))
    tokenizer, changed = Letters(), 0
    by_seed = Counter(seed for _, seed, _ in world.turns)
    assert set(by_seed.values()) == {3} and len(by_seed) == 48
    seen = {tuple(turn.token_ids for turn in turns_of(world, seed)) for seed in by_seed}
    for one in played:
        ids, flags = one.completion.token_ids, one.completion.sampled_flags
        own = [token for token, is_sampled in zip(ids, flags, strict=True) if is_sampled]
        assert tuple(tuple(own[i : i + 6]) for i in (0, 6, 12)) in seen
        assert [t for t, is_sampled in zip(ids, flags, strict=True) if not is_sampled] == [7, 4, 3]
        changed += tokenizer.encode(tokenizer.decode(ids)) != ids
    assert changed > 0, "no completion of this test could have been harmed"


def test_aln_7_the_stop_token_of_every_turn_is_trained_and_what_the_environment_writes_is_not(model):
    # The environment writes stop and padding tokens itself: they neither end nor train anything.
    episodes = make_episodes(World(says([END_ID, END_ID, 9], [END_ID])), model=model)
    rollout = samples_of(episodes, PROMPTS, drawn(40, n=8, stop_token_ids=(END_ID, 7), temperature=1.5))
    batch = pad(rollout.samples, pad_id=END_ID)
    ended = 0
    for row, sample in enumerate(rollout.samples):
        begin, trained = len(sample.prompt_ids), sample.trained_flags
        mask = batch.loss_mask[row, begin : begin + len(trained)]
        assert mask.tolist() == list(trained) and batch.loss_mask[row].sum() == sample.num_trained
        for token, is_trained, following in zip(sample.token_ids, trained, trained[1:], strict=False):
            if is_trained and not following:
                assert token in (END_ID, 7)
                ended += 1
        assert all(v == -1 for v, own in zip(sample.weight_versions, trained, strict=True) if not own)
        if not sample.is_truncated:
            assert sample.token_ids[-1] in (END_ID, 7) and trained[-1]
    assert ended > 10


def test_environment_tokens_never_enter_mismatch(model):
    rollout = samples_of(make_episodes(World(says("XYZ")), model=model, turn_tokens=4), PROMPTS, drawn(20))
    own = [torch.tensor(sample.rollout_logprobs, dtype=torch.float64) - 0.01 for sample in rollout.samples]
    poisoned = [
        torch.where(torch.tensor(sample.trained_flags), row, torch.tensor(-1e6, dtype=torch.float64))
        for sample, row in zip(rollout.samples, own, strict=True)
    ]
    assert mismatch_of(rollout.samples, poisoned) == mismatch_of(rollout.samples, own)
    assert mismatch_of(rollout.samples, own)["mismatch/abs_mean"] == pytest.approx(0.01)


def test_a_trajectory_is_one_sample_with_one_record(model):
    rollout = samples_of(
        make_episodes(World(says("XYZ", "A")), model=model, turn_tokens=4), PROMPTS, drawn(40)
    )
    assert [s.trajectory for s in rollout.samples] == [f"5.{g}.{i}" for g in range(3) for i in range(2)]
    for sample in rollout.samples:
        assert sample.record.identity.trajectory == sample.trajectory
        assert sample.record.length == sample.num_tokens - 1 and sample.num_trained == 12
    found = rollout.metrics
    assert found["env/turns"] == 3 and found["env/turns_max"] == 3 and found["env/tokens"] == 4
    assert found["completion_tokens_mean"] == 12 and found["env/answered"] == 18
    assert found["env/error"] == found["env/timeout"] == found["env/tool_calls"] == 0


def test_the_verifier_scores_the_policys_own_text(model):
    episodes = make_episodes(World(says("XYZXYZ", "X")), model=model, turn_tokens=4)
    for one in flat(episodes.play(PROMPTS, drawn(40))):
        c, tokenizer = one.completion, Letters()
        own = [t for t, is_sampled in zip(c.token_ids, c.sampled_flags, strict=True) if is_sampled]
        texts = [tokenizer.decode(own[i : i + 4], skip_special_tokens=True) for i in (0, 4, 8)]
        assert one.reward == len("\n".join(texts))


def test_rewards_of_the_environment_are_grouped(model):
    world = World(lambda task, turn: End(reward=float(len(turn.text))))
    rollout = samples_of(
        make_episodes(world, model=model), PROMPTS, drawn(6, n=4, stop_token_ids=(2, 7, 9, 12))
    )
    for group in range(3):
        rewards = [s.reward for s in rollout.samples if s.group_index == group]
        advantages = [s.advantage for s in rollout.samples if s.group_index == group]
        assert advantages == pytest.approx([reward - sum(rewards) / 4 for reward in rewards], abs=1e-5)


def test_many_trajectories_run_at_once(model):
    episodes = make_episodes(World(says("X", "X", "X")), model=model, turn_tokens=4)
    episodes.play(PROMPTS, drawn(40))
    # alone, six trajectories of four turns would need 96 passes
    assert episodes.engine.stats.num_steps < 30


def test_a_stop_text_ends_a_turn_and_stays_in_it(model):
    stops = tuple("ABCDEFGH")
    world = World(says("0", "1"), stop=stops)
    episodes = make_episodes(world, model=model)
    played = flat(episodes.play(PROMPTS, drawn(60, n=8)))
    complete = [turn for _, _, turn in world.turns if turn.is_complete]
    assert complete and all(
        turn.text[-1] in stops and not set(turn.text[:-1]) & set(stops) for turn in complete
    )
    assert {one.completion.finish_reason for one in played} <= {"stop", "length"}


def test_ver_1_partial_rollouts_keep_the_version_of_every_token(model):
    # Mutation: resubmit without the record; one version for the whole trajectory.
    other = tiny_model(seed=9).state_dict()
    world = World(says("XYZ", "AB"))
    episodes = make_episodes(world, model=model, turn_tokens=4)
    batch = episodes.begin(PROMPTS, drawn(40))
    for step in range(400):
        if step == 3:
            batch.suspend()
            assert not episodes.engine.has_work
            episodes.engine.update_weights(other, version=8)
        if step == 9:  # in place, without suspending
            episodes.engine.update_weights(model.state_dict(), version=9)
        if batch.is_done:
            break
        batch.step()
    played = flat(batch.results())
    assert {v for one in played for v in one.completion.weight_versions} == {-1, 0, 8, 9}
    for one in played:
        c, start = one.completion, len(one.completion.prompt_ids) - 1
        versions = c.record.versions().tolist()
        assert sorted(versions) == versions and len(versions) == len(c.prompt_ids) + len(c.token_ids) - 1
        for i, (version, is_sampled) in enumerate(zip(c.weight_versions, c.sampled_flags, strict=True)):
            assert version == (versions[start + i] if is_sampled else -1)
        first = versions.index(8)
        assert differing(c.record, forced_record(model, c), end=first) == []
    assert_nothing_left(episodes.engine)


@pytest.mark.parametrize(("when", "size"), [(0, 8), (1, 3), (2, 3), (1, 8), (2, 8), (5, 8), (8, 8)])
def test_a_suspended_batch_goes_on_with_the_same_draws_and_records(model, when, size):
    def play(is_suspended):
        engine = make_engine(
            model, control=True, max_tokens_per_step=size, max_batch=size, decode=Letters().decode
        )
        episodes = make_episodes(World(says("XYZ", "AB")), engine=engine, turn_tokens=4)
        batch, step = episodes.begin(PROMPTS, drawn(40)), 0
        while not batch.is_done:
            if is_suspended and step == when:
                batch.suspend()
                assert_nothing_left(engine)
            batch.step()
            step += 1
        return [one.completion for one in flat(batch.results())]

    for found, expected in zip(play(True), play(False), strict=True):
        assert found.token_ids == expected.token_ids and found.sampled_mask == expected.sampled_mask
        assert [p for p in found.logprobs if not math.isnan(p)] == [
            p for p in expected.logprobs if not math.isnan(p)
        ]
        assert differing(found.record, expected.record) == [] and bool(found.record.valid.all())


def test_limits_on_turns_and_tokens_cut_and_say_so(model):
    cut = make_episodes(World(says("X", "X", "X", reward=1.0)), model=model, turn_tokens=4, max_turns=2)
    for one in flat(cut.play(PROMPTS, drawn(40))):
        assert one.num_turns == 2 and one.completion.finish_reason == "length"
        assert len(one.completion.token_ids) == 4 + 1 + 4 and one.completion.sampled_flags[-1]
    world = World(lambda task, turn: Reply(content="XYZXYZ", reward=0.25))
    full = make_episodes(world, model=model, turn_tokens=4)
    for one in flat(full.play(PROMPTS, drawn(14))):
        # 4 sampled + 6 given + 4 sampled: the limit; the environment's last answer has no room
        assert len(one.completion.token_ids) == 14 and one.completion.finish_reason == "length"
        assert one.reward == 0.25
    assert [turn.is_last for _, _, turn in world.turns].count(True) == 6
    exact = make_episodes(World(says("XYZ")), model=model, turn_tokens=4)
    for one in flat(exact.play(PROMPTS, drawn(7))):
        # an answer that leaves no token to sample is not shown
        assert len(one.completion.token_ids) == 4 and one.completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (lambda task, turn: 1 / 0, "error"),
        (lambda task, turn: None, "error"),
        (lambda task, turn: End(reward=math.nan), "error"),
        (lambda task, turn: Reply(content=[39, 40]), "error"),
        (lambda task, turn: Reply(content=[None]), "error"),
        (lambda task, turn: Reply(content="not a letter of this tokenizer: ~"), "error"),
        (lambda task, turn: time.sleep(5), "timeout"),
    ],
    ids=["raises", "nothing", "nan", "unknown_ids", "no_content", "no_token", "sleeps"],
)
@pytest.mark.parametrize("workers", [0, 6])
def test_a_failing_environment_is_counted_and_costs_its_trajectory_only(model, answer, outcome, workers):
    def of_one(task, turn):
        return (
            answer(task, turn)
            if task.index == 1 and turn.index == 1
            else says("X", "Y", reward=2.0)(task, turn)
        )

    world = World(of_one)
    episodes = make_episodes(world, model=model, turn_tokens=4, workers=workers, timeout_s=0.15)
    rollout = samples_of(episodes, PROMPTS, drawn(40))
    assert episodes.counts[outcome] == 2 and rollout.metrics[f"env/{outcome}"] == 2.0
    for sample in rollout.samples:
        failed = sample.group_index == 1
        # the others' last turn was cut by its limit, so they have no natural end either
        assert sample.reward == (0.0 if failed else 2.0) and sample.is_truncated
        assert sample.finish_reason == ("abort" if failed else "length")
        assert sample.record.length == sample.num_tokens - 1 and sample.num_trained == (8 if failed else 12)
    assert world.num_closed == 6
    assert_nothing_left(episodes.engine)


def test_on_error_raise_ends_the_rollout_and_leaves_nothing(model):
    def fails(task, turn):
        busy.append(engine.has_work)
        return 1 / 0 if task.index == 0 else Reply(content="X")

    busy = []
    world = World(fails)
    # prompts begin one after another, so that others are under way when the first one fails
    engine = make_engine(model, control=True, max_tokens_per_step=4, max_batch=4, decode=Letters().decode)
    episodes = make_episodes(world, engine=engine, on_error="raise", turn_tokens=4)
    with pytest.raises(
        RecordError, match=r"Environment of trajectory .* failed \(error\): ZeroDivisionError"
    ):
        episodes.play(PROMPTS, drawn(40))
    assert any(busy) and 0 < world.num_opened == world.num_closed
    assert_nothing_left(episodes.engine)
    episodes.environment = World(says("X", reward=1.0))
    assert len(flat(episodes.play(PROMPTS, drawn(20)))) == 6


def test_a_prompt_that_fails_ends_the_rollout_with_its_reason(model):
    world = World(says())
    world.prompt = lambda task: {}["missing"]
    with pytest.raises(RecordError, match=r"prompt of task 0 .* KeyError: 'missing'"):
        make_episodes(world, model=model).play(PROMPTS, drawn(4))
    for content, ids in (("HI", [15, 16]), ([5, 6, 7], [5, 6, 7])):
        world.prompt = lambda task, content=content: content
        played = flat(make_episodes(world, model=model).play(PROMPTS, drawn(4)))
        assert all(one.completion.prompt_ids == ids for one in played)


def test_others_sample_while_an_environment_thinks(model):
    # Mutation: workers are waited for before the next step.
    started = threading.Event()

    def answer(task, turn):
        if task.index == 0 and turn.index == 0:
            started.set()
            waited = 0
            while engine.stats.num_steps < 12 and waited < 400:
                time.sleep(0.01)
                waited += 1
            return Reply(content="X" if waited < 400 else "Y")
        return says(*["X"] * 5, reward=1.0)(task, turn)

    engine = make_engine(model, control=True, decode=Letters().decode)
    episodes = make_episodes(World(answer), engine=engine, turn_tokens=3, workers=4)
    played = flat(episodes.play(PROMPTS, drawn(40)))
    assert started.is_set() and all(one.reward == 1.0 for one in played)
    assert {one.completion.token_ids[3] for one in played} == {Letters().encode("X")[0]}
    for one in played:
        assert_recorded(one.completion, model)


def test_an_episode_that_opens_after_its_time_is_closed(model):
    world, late = World(says()), threading.Event()
    begin = world.open

    def slow(task, *, seed):
        late.wait(5)
        return begin(task, seed=seed)

    world.open = slow
    episodes = make_episodes(world, model=model, workers=6, timeout_s=0.1)
    played = flat(episodes.play(PROMPTS, drawn(3)))
    assert episodes.counts["timeout"] == 6 and {one.reward for one in played} == {0.0}
    late.set()
    deadline = time.monotonic() + 5
    while world.num_closed < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.num_opened == world.num_closed == 6 and not world.turns


def test_threads_and_fixed_order_give_the_same_trajectories(model):
    # The control arithmetic does not depend on what else is in a batch.
    found = [
        flat(
            make_episodes(World(says("XYZ", "A")), model=model, turn_tokens=4, workers=w).play(
                PROMPTS, drawn(40)
            )
        )
        for w in (0, 2)
    ]
    for one, other in zip(*found, strict=True):
        assert one.completion.token_ids == other.completion.token_ids and one.reward == other.reward
        assert differing(one.completion.record, other.completion.record) == []


def test_episodes_of_a_run_have_seeds_of_their_own(model):
    seeds = []
    for seed in (1, 2, 1):
        world = World(says())
        make_episodes(world, model=model).play(PROMPTS, drawn(3, seed=seed))
        seeds.append({own for _, own, _ in world.turns})
    assert seeds[0] == seeds[2] and len(seeds[0] | seeds[1]) == 12


def test_an_engine_that_is_busy_or_cannot_be_stepped_is_refused(model):
    episodes = make_episodes(World(says()), model=model)
    episodes.engine.submit([1, 2], drawn(3))
    with pytest.raises(ConfigError, match="is busy"):
        episodes.begin(PROMPTS, drawn(4))
    with pytest.raises(ConfigError, match="cannot"):
        replace(episodes, engine=object()).begin(PROMPTS, drawn(4))


def test_outside_the_main_thread_a_timer_is_refused_and_workers_are_not(model):
    found = []

    def run(workers):
        episodes = make_episodes(World(says(reward=1.0)), model=model, workers=workers)
        try:
            found.append(len(episodes.play(PROMPTS, drawn(3))))
        except ConfigError as error:
            found.append(str(error))

    for workers in (0, 1):
        thread = threading.Thread(target=run, args=(workers,))
        thread.start()
        thread.join()
    assert "task.environment_workers" in found[0] and found[1] == 3


def test_environments_are_found_by_name_or_path():
    assert build_environment(TaskConfig(name="chain_sum")) is None
    built = build_environment(
        TaskConfig(name="chain_sum", environment="calculator", environment_options={"instruction": ""})
    )
    assert built.stop == ("</tool>",)
    named = TaskConfig(
        name="chain_sum", environment="tests.rl.worlds:talkative", environment_options={"reward": 2.0}
    )
    assert isinstance(build_environment(named), World)
    for changes, message in (
        ({"environment": "nowhere:thing"}, "Environment 'nowhere:thing' cannot be imported"),
        ({"environment": "tests.rl.worlds:LETTERS"}, "a callable is needed"),
        ({"environment": "tests.rl.worlds:Letters"}, "without stop, prompt, open"),
        ({"environment": "calculator", "environment_options": {"color": 1}}, "environment_options"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_environment(TaskConfig(name="chain_sum", **changes))
    for changes in (
        {"environment": "abacus"}, {"max_turns": 0}, {"turn_tokens": -1}, {"environment_workers": -1},
        {"environment_timeout_s": 0.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"task.{next(iter(changes))}"):
            TaskConfig(name="chain_sum", **changes)
    with pytest.raises(ConfigError, match="max_turns 0"):
        EpisodeLimits(max_turns=0)
