"""Partial rollouts: completions go on under new weights, every position stays what it was sampled with, nothing gets
too old, and a stopped run goes on in the same bytes."""

from dataclasses import dataclass, field, replace

import pytest
from tests.rl.test_resume import timeless
from tests.rl.tiny_runs import changed, make_config, metrics_of
from tests.rollout.recorded import differing, shifted

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL
from tracefp4.rl import checkpoint, opening
from tracefp4.rl.loop import train
from tracefp4.rl.opening import open_run
from tracefp4.rl.partial import PartialRollouts
from tracefp4.rl.pending import groups_from_bytes, groups_to_bytes
from tracefp4.rl.placement import ON_CPU
from tracefp4.rl.rollouts import RolloutMaker
from tracefp4.rl.rundir import RunDirectory
from tracefp4.rl.sync import EngineOptions, build_engine
from tracefp4.rl.tasks import Task
from tracefp4.rollout import Completion, SamplingParams
from tracefp4.rollout.jobs import forced_jobs

PLAIN = "tests.rl.tiny_runs:share_plain"
# ten places for twenty sequences, and digits end a completion: groups are at different tokens when a step ends
PARTIAL = {
    "rollout__partial_groups": 2,
    "rollout__max_tokens": 9,
    "rollout__max_batch": 10,
    "rollout__max_tokens_per_step": 12,
    "rollout__stop": tuple("0123456789abcdefghijklmnop"),
    "quantization__guidance": "full",
    "task__reward": PLAIN,
    "train__steps": 4,
    "train__lr": 0.02,
    "run__keep_last": 9,
}


@pytest.fixture
def exact(monkeypatch):
    """Control arithmetic in engine and trainer: what is computed does not depend on what else is in the batch."""
    monkeypatch.setattr(opening, "placement_of", lambda model: replace(ON_CPU, arithmetic=CONTROL))


@pytest.fixture
def made(monkeypatch):
    """Every rollout of the runs of a test."""
    found, real = [], RolloutMaker.make

    def make(self, *args, **kwargs):
        found.append(real(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(RolloutMaker, "make", make)
    return found


def samples_of(rollouts):
    return [sample for rollout in rollouts for sample in rollout.samples]


def oracle(config, run, sample, versions):
    """(record, log-probs) of a fresh engine that decodes a sample's tokens alone in one go, and changes to the weights
    of `versions[i]` before it draws token i."""
    state = {
        checkpoint.load_state(path).weight_version: path
        for path in sorted(run.directory.checkpoints.glob("step_*"))
    }
    policies = {version: opening.load_policy(path).model for version, path in state.items()}
    policies[0] = opening.load_policy(config.model.path).model
    engine = build_engine(
        policies[versions[0]],
        run.trainer.plan,
        arithmetic=CONTROL,
        rollout=config.rollout,
        records=run.trainer.plan.guided_sites,
        options=EngineOptions(weight_version=versions[0]),
    )
    (job,) = forced_jobs([list(sample.prompt_ids)], completions=[[list(sample.token_ids)]], temperature=1.0)
    engine._submit(job, prompt_index=0)
    for version in versions:
        if version != engine.weight_version:
            engine.update_weights(policies[version].state_dict(), version=version)
        engine.step()
    (found,) = engine.take_finished()
    return found.record, found.logprobs


def test_ver_1_every_position_is_what_the_weights_of_its_version_computed(tiny, tmp_path, exact, made):
    # Mutations: K and V computed again at every suspension; the new seed for old groups.
    config = make_config(*tiny, tmp_path / "run", **PARTIAL)
    train(config)
    run = open_run(config, RunDirectory(config.run.dir, resume=True), resume=True)
    spanning = [sample for sample in samples_of(made) if len(set(sample.weight_versions)) > 1]
    assert len(spanning) >= 3
    for sample in spanning[:2]:
        versions = list(sample.weight_versions)
        record, logprobs = oracle(config, run, sample, versions)
        begin = len(sample.prompt_ids) - 1
        assert sample.record.versions().tolist() == [versions[0]] * begin + versions
        assert sample.record.valid.all()
        assert differing(sample.record, record) == []
        assert list(sample.rollout_logprobs) == logprobs
        # off by one: rows at another position, and weights that change one token late
        assert differing(shifted(sample.record), record) == list(range(record.length))
        late, other_logprobs = oracle(config, run, sample, [versions[0], *versions[:-1]])
        switch = next(i for i, version in enumerate(versions) if version != versions[0])
        assert differing(sample.record, late)[0] == begin + switch
        assert other_logprobs[:switch] == logprobs[:switch] and other_logprobs[switch] != logprobs[switch]


def test_the_run_trains_on_every_version_and_says_so(tiny, tmp_path, made):
    config = make_config(*tiny, tmp_path / "run", **PARTIAL)
    manifest = train(config)
    rows = metrics_of(config)
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4]
    assert [row["groups"] for row in rows] == [3.0] * 4
    spanning = [sum(len(set(sample.weight_versions)) > 1 for sample in rollout.samples) for rollout in made]
    assert [row["partial/spanning"] for row in rows] == spanning and sum(spanning) > 0
    assert all(row["partial/carried"] > 0 and row["partial/carried_tokens"] > 0 for row in rows)
    later = [row for row in rows if row.get("version_lag_max")]
    assert later
    for row in later:
        by_lag = [
            row[f"lag{n}/mismatch/num_tokens"] for n in range(3) if f"lag{n}/mismatch/num_tokens" in row
        ]
        assert sum(by_lag) == row["mismatch/num_tokens"] and row["lag1/mismatch/num_tokens"] > 0
    assert manifest["final"]["counters"] == {"optimizer_steps": 4, "samples_dropped": 0}
    names = [sample.trajectory for sample in samples_of(made)]
    assert len(set(names)) == len(names) == 48
    assert len({sample.prompt_ids for sample in made[0].samples}) == 3, "a group is one prompt"


def test_without_an_update_the_draws_are_those_of_whole_rollouts(tiny, tmp_path, exact, made):
    """No completion of a random model has a 9 in it, so nothing is trained and the weights stay."""
    settings = PARTIAL | {"task__reward": "tests.rl.tiny_runs:share_of_nines"}
    config = make_config(*tiny, tmp_path / "run", **settings)
    train(config)
    carried = sum(row["partial/carried_tokens"] for row in metrics_of(config))
    assert carried > 0 and {row["weight_version"] for row in metrics_of(config)} == {0}
    run = open_run(config, RunDirectory(config.run.dir, resume=True), resume=True)
    params = opening.sampling_params(config, run.policy.defaults)
    whole = {}
    stream = opening.build_stream(config.task, reserved=0)
    for step, count in enumerate([5, 3, 3, 3]):
        for task in stream.take(count):
            prompt = opening.encode(task, tokenizer=run.policy.tokenizer)
            run.engine.submit(prompt, params(step), prompt_index=task.index)
            while run.engine.has_work:
                run.engine.step()
            whole |= {(c.prompt_index, c.sample_index): c for c in run.engine.take_finished()}
    expected = {(tuple(c.token_ids), tuple(c.logprobs)) for c in whole.values()}
    found = {(sample.token_ids, sample.rollout_logprobs) for sample in samples_of(made)}
    assert len(found) == 48 and found <= expected
    assert {c.finish_reason for c in whole.values()} == {"stop", "length"}


HARD = PARTIAL | {
    "train__rollout_ahead": 1,
    "train__steps": 5,
    "records__store": "directory",
    "records__keep_versions": 2,
    "quantization__guidance": "mantissa",
}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """(config, manifest) of an uninterrupted run."""
    config = make_config(*tiny, tmp_path_factory.mktemp("partial") / "run", **HARD)
    return config, train(config)


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_stopped_run_goes_on_with_its_suspended_completions(tiny, tmp_path, whole, after):
    config = make_config(*tiny, tmp_path / "run", **HARD | {"train__steps": after})
    train(config)
    found = checkpoint.load_rollouts(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    assert len(found[checkpoint.UNDER_WAY]) > 1000, "records of suspended completions"
    config = changed(config, train__steps=5)
    assert train(config, resume=True)["final"] == whole[1]["final"]
    assert timeless(metrics_of(config)) == timeless(metrics_of(whole[0]))
    assert sum(row["partial/spanning"] for row in metrics_of(config)[after:]) > 0


def test_groups_survive_as_bytes(tiny, tmp_path, exact):
    config = make_config(*tiny, tmp_path / "run", **PARTIAL | {"train__steps": 1})
    train(config)
    run = open_run(config, RunDirectory(config.run.dir, resume=True), resume=True)
    groups = run.partial.groups
    data = groups_to_bytes(groups)
    back = groups_from_bytes(data, task_of=run.stream.source.item)
    assert groups_to_bytes(back) == data and groups_to_bytes([]) != data
    assert [group.task.index for group in back] == [group.task.index for group in groups]
    assert any(c.record is not None and c.finish_reason == "abort" for g in back for c in g.unfinished)
    assert groups_from_bytes(groups_to_bytes([]), task_of=run.stream.source.item) == []


def test_agreement_is_measured_where_engine_and_trainer_held_the_same_weights(tiny, tmp_path, exact, made):
    """In the control arithmetic the two sides are equal under equal weights, so older positions would show."""
    changes = {
        "train__steps": 3,
        "train__agreement_every": 1,
        "train__agreement_samples": 12,
        "train__transmission_every": 1,
        "quantization__gate": "noise",
    }
    config = make_config(*tiny, tmp_path / "run", **PARTIAL | changes)
    train(config)
    rows = metrics_of(config)
    measured = [row["agreement/mismatch_before"] for row in rows if "agreement/mismatch_before" in row]
    assert len(measured) >= 2 and set(measured) == {0.0}
    assert [len(rollout.references) < 12 for rollout in made][1:] == [True] * 2
    assert all("transmission/slope" in row and "gate/band_max" in rows[0] for row in rows)
    assert any("lag1/transmission/slope" in row for row in rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization__guidance": "none", "quantization__mode": "bf16"},
        {"rollout__prefix_cache": True, "rollout__max_swapped_pages": 0, "rollout__num_pages": 8},
        pytest.param({"quantization__guidance": "none"}, marks=pytest.mark.slow),
        pytest.param({"quantization__sites": ("x",)}, marks=pytest.mark.slow),
        pytest.param({"quantization__guidance": "auto"}, marks=pytest.mark.slow),
    ],
    ids=["bf16", "pages and prefixes", "nearest", "x alone", "auto"],
)
def test_other_settings_train_too(tiny, tmp_path, changes, made):
    config = make_config(*tiny, tmp_path / "run", **PARTIAL | changes)
    manifest = train(config)
    assert manifest["final"]["counters"] == {"optimizer_steps": 4, "samples_dropped": 0}
    assert sum(row["partial/spanning"] for row in metrics_of(config)) > 0
    assert all(sample.record.valid.all() for sample in samples_of(made) if sample.record is not None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__partial_groups": 4}, r"rollout\.partial_groups: got 4; allowed: 0 \(off\) to .* \(3\)"),
        ({"rollout__partial_groups": -1}, r"rollout\.partial_groups: got -1"),
        ({"train__max_version_diff": 0}, r"train\.max_version_diff: got 0; allowed: above train\.rollout_ahead"),
        ({"train__rollout_ahead": 3}, r"train\.max_version_diff: got 3; allowed: above .* \(3\)"),
        ({"task__environment": "calculator"}, r"task\.environment: got 'calculator'; allowed: none with"),
        ({"quantization__layers": "last_half"}, r"rollout\.partial_groups: .* got one with 2 of the 4"),
        ({"quantization__sites": ("x", "v")}, r"rollout\.partial_groups: .* 2 of the 4 .* name both k and v"),
    ],
    ids=["too many", "negative", "no age", "no age left", "environment", "half the layers", "v alone"],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(tiny, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(make_config(*tiny, tmp_path / "run", **PARTIAL | changes))


@dataclass
class Lengths:
    """An engine whose completions end after `lengths[prompt index][sample]` tokens; in every step the first `places` of
    them draw one."""

    lengths: dict
    weight_version: int = 0
    running: dict = field(default_factory=dict)
    finished: list = field(default_factory=list)
    queued: list = field(default_factory=list)
    places: int = 99
    fails_at: int = -1

    def submit(self, prompt, params, *, prompt_index=0):
        for sample in range(params.n):
            self.running[prompt_index, sample] = Completion(
                prompt_index=prompt_index, sample_index=sample, prompt_ids=prompt, token_ids=[], logprobs=[],
                finish_reason="abort", weight_versions=[], record=None,
            )  # fmt: skip
        self.queued.append((prompt_index, None, params.seed, params.max_tokens))

    def resubmit(self, completion, added, params):
        assert completion.finish_reason == "abort" and not added and params.n == 1
        key = completion.prompt_index, completion.sample_index
        self.running[key] = completion
        self.queued.append((*key, params.seed, params.max_tokens))

    def step(self):
        if self.fails_at == 0:
            raise KeyboardInterrupt
        self.fails_at -= 1
        ended = []
        for (prompt, sample), c in list(self.running.items())[: self.places]:
            c.token_ids.append(1)
            c.weight_versions.append(self.weight_version)
            if len(c.token_ids) == self.lengths[prompt][sample]:
                ended.append((prompt, sample))
        for key in ended:
            c = self.running.pop(key)
            object.__setattr__(c, "finish_reason", "stop")
            self.finished.append(c)
        return ended

    def take_finished(self):
        found, self.finished = self.finished, []
        return found

    def suspend(self):
        found, self.running = list(self.running.values()), {}
        return found


def scripted(tmp_path, lengths, *, lag=1, prompts=2, surplus=2):
    """PartialRollouts of two samples a group over scripted lengths."""
    config = make_config(
        "nowhere", "nowhere", tmp_path, rollout__num_prompts=prompts, rollout__partial_groups=surplus,
        rollout__samples_per_prompt=2, train__max_version_diff=lag,
    )  # fmt: skip
    engine = Lengths(lengths)
    return engine, PartialRollouts(engine, config=config, encode=lambda task: [task.index])


def tasks(first, count):
    return [Task(source="s", index=i, prompt="p") for i in range(first, first + count)]


def numbers(groups):
    return [group.task.index for group in groups]


def test_a_step_ends_when_enough_groups_are_complete_and_takes_the_oldest(tmp_path):
    lengths = {0: (2, 9), 1: (3, 3), 2: (1, 2), 3: (3, 3), 4: (1, 1), 5: (1, 1)}
    engine, partial = scripted(tmp_path, lengths, lag=3)
    assert partial.num_missing == 4
    chosen, metrics = partial.play(tasks(0, 4), SamplingParams(max_tokens=9, n=2, seed=7))
    # group 2 ends after two passes, 1 and 3 together after three: there are three, and 3 waits
    assert numbers(chosen) == [1, 2] and numbers(partial.groups) == [0, 3] and partial.num_missing == 2
    assert metrics == {
        "partial/carried": 1, "partial/carried_tokens": 3, "partial/groups_waiting": 1, "partial/groups_due": 0,
        "partial/spanning": 0,
    }  # fmt: skip
    engine.weight_version, engine.queued = 1, []
    chosen, metrics = partial.play(tasks(4, 2), SamplingParams(max_tokens=9, n=2, seed=8))
    assert engine.queued == [(0, 1, 7, 6), (4, None, 8, 9), (5, None, 8, 9)], "its own seed, what is left"
    assert numbers(chosen) == [3, 4] and numbers(partial.groups) == [0, 5], "the oldest positions go first"
    engine.weight_version = 2
    chosen, metrics = partial.play([], SamplingParams(max_tokens=9, n=2, seed=9))
    assert numbers(chosen) == [0, 5]
    assert metrics["partial/spanning"] == 1 and partial.groups == []


def test_a_step_waits_for_groups_that_would_be_too_old_after_it(tmp_path):
    lengths = dict.fromkeys(range(30), (1, 1)) | {0: (1, 40), 1: (30, 30), 6: (50, 50)}
    engine, partial = scripted(tmp_path, lengths, lag=2)
    begun, ages = 0, {}
    for step in range(7):
        count = partial.num_missing
        chosen, metrics = partial.play(tasks(begun, count), SamplingParams(max_tokens=99, n=2, seed=step))
        begun += count
        assert len(chosen) == 2
        ages |= {group.task.index: engine.weight_version - group.oldest_version for group in chosen}
        assert metrics["partial/groups_due"] == (2 if step == 2 else 1 if step == 4 else 0), step
        engine.weight_version += 1
    assert ages[0] == ages[1] == 2, "waited for in the third step, all of both"
    assert max(ages.values()) == 2 and not {0, 1, 6} - set(ages)


def test_a_prompt_without_a_token_begins_again_as_a_whole(tmp_path):
    engine, partial = scripted(tmp_path, {0: (1, 1), 1: (1, 1), 2: (2, 2), 3: (2, 2)})
    engine.places = 6
    chosen, metrics = partial.play(tasks(0, 4), SamplingParams(max_tokens=9, n=2, seed=1))
    assert numbers(chosen) == [0, 1] and metrics["partial/carried"] == 2
    engine.weight_version, engine.queued = 1, []
    chosen, _ = partial.play([], SamplingParams(max_tokens=9, n=2, seed=2))
    assert engine.queued == [(2, 0, 1, 8), (2, 1, 1, 8), (3, None, 1, 9)]
    assert [group.oldest_version for group in chosen] == [0, 1]


def test_an_error_leaves_nothing_in_the_engine(tmp_path):
    engine, partial = scripted(tmp_path, dict.fromkeys(range(4), (9, 9)))
    engine.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        partial.play(tasks(0, 4), SamplingParams(max_tokens=9, n=2))
    assert engine.running == {}
