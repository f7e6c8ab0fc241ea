"""Recomputed layers and their session: who gives it, what they keep, and what nobody may notice."""

import gc
import weakref

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.parity.chains import make_chain, make_samples, shifted
from tests.parity.modes import Mode, make_setting, run
from torch import nn

from tracefp4.errors import ConfigError
from tracefp4.guidance import ReplayBatch
from tracefp4.guidance.session import current, replay, resumed
from tracefp4.qat.recomputation import carry_session


@pytest.fixture(scope="module")
def setting():
    return make_setting(num_hidden_layers=4)


def saved_bytes(chain, samples, records):
    """Bytes that a forward pass keeps for its backward, each storage once."""
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in chain.model.parameters()}
    batch = chain.batch(samples)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        replay(ReplayBatch(positions=batch.positions, records=records)),
    ):
        loss = chain.logits(batch).square().mean()
    loss.backward()
    return sum(size for place, size in kept.items() if place not in weights)


def test_full_checkpointing_keeps_one_activation_per_layer(setting):
    # Mutation: checkpointing that is switched on and not used (a model in eval mode).
    chain, samples, records = setting
    everything = saved_bytes(chain, samples, records)
    chain.model.gradient_checkpointing_enable({"use_reentrant": False})
    chain.model.train()
    try:
        little = saved_bytes(chain, samples, records)
    finally:
        chain.model.gradient_checkpointing_disable()
        chain.model.eval()
    assert little < everything / 8, (little, everything)


def test_layers_run_under_the_session_that_the_model_was_called_in(setting):
    # Mutation: a layer that takes the running session.
    chain, samples, records = setting
    batch = chain.batch(samples[:1])
    outer = ReplayBatch(positions=batch.positions, records=records[:1])
    seen, handles = [], []
    for layer in chain.model.model.layers:
        handles.append(layer.input_layernorm.register_forward_hook(lambda *_: seen.append(current())))
    try:
        with replay(outer) as session, torch.no_grad():
            chain.logits(batch)
        assert seen == [session] * 4 and current() is None
        with torch.no_grad():
            chain.logits(batch)
        assert seen[4:] == [None] * 4
    finally:
        for handle in handles:
            handle.remove()


def test_an_error_inside_a_layer_leaves_no_session_behind(setting):
    chain, samples, records = setting
    batch = chain.batch(samples[:2])
    wrong = ReplayBatch(positions=batch.positions[:1], records=records[:1])
    with replay(wrong) as session:
        with pytest.raises(ValueError, match="does not fit the replayed batch"):
            chain.logits(batch)
        assert current() is session
    assert current() is None


def test_a_resumed_session_gives_way_to_the_one_before(setting):
    _, samples, _ = setting
    batch = ReplayBatch(positions=torch.zeros(1, 1, dtype=torch.int64), records=[samples[0].record])
    with replay(batch) as session:
        with resumed(None):
            assert current() is None
        assert current() is session


def test_a_model_without_decoder_layers_is_refused_and_left_alone():
    # Mutation: [] is returned, and a recomputation rounds to nearest without a word.
    for model in (nn.Sequential(nn.Linear(2, 2)), make_chain(num_hidden_layers=1).model.model.layers[0]):
        forwards = [module.forward for module in model.modules()]
        with pytest.raises(ConfigError, match="cannot travel.*got [01] modules.*Patch a transformers"):
            carry_session(model)
        assert [module.forward for module in model.modules()] == forwards


def test_undo_gives_the_layers_back():
    model = make_chain(num_hidden_layers=1).model
    layer, base = model.model.layers[0], model.model
    hooks = len(base._forward_pre_hooks)
    forward = layer.forward
    undo = carry_session(model)
    assert len(undo) == 2 and layer.forward is not forward and len(base._forward_pre_hooks) == hooks + 1
    for back in undo:
        back()
    assert "forward" not in vars(layer) and len(base._forward_pre_hooks) == hooks


def test_rpl_3_models_own_their_records_and_nothing_outlives_them(setting, monkeypatch):
    # Mutation: a module-level list of patched models.
    alone = run(setting, Mode(), monkeypatch)
    other = make_chain(seed=1, num_hidden_layers=4)
    theirs = other.rollouts(num_prompts=2, max_tokens=4)
    batch = other.batch(theirs)
    with (
        replay(ReplayBatch(positions=batch.positions, records=[shifted(s.record) for s in theirs])),
        torch.no_grad(),
    ):
        other.logits(batch)
    beside = run(setting, Mode(), monkeypatch)
    died = weakref.ref(other.model)
    weight = weakref.ref(other.model.model.layers[0].mlp.experts.gate_up_proj)
    del other, batch, theirs
    gc.collect()
    assert died() is None and weight() is None
    after = run(setting, Mode(), monkeypatch)
    for found in (beside, after):
        for name, (values, _) in alone.rows.items():
            assert torch.equal(found.rows[name][0], values), name
        assert all(torch.equal(a, b) for a, b in zip(found.gradients, alone.gradients, strict=True))


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [0]}, {}], ids=["with-a-dense-layer", "experts"])
def test_rpl_5_without_replay_nothing_of_it_shows(changes):
    # Mutation: a layer that refuses to run, or runs otherwise, without a session.
    chain = make_chain(**changes)
    batch = chain.batch(make_samples([9, 4]))
    with torch.no_grad():
        found = chain.logits(batch)
    for module in chain.model.modules():  # the model as if replay had never been built
        if type(module).__name__.endswith("DecoderLayer"):
            del module.forward
        if type(module).__name__ == "Qwen3MoeModel":
            module._forward_pre_hooks.clear()
    with torch.no_grad():
        assert_bitwise(chain.logits(batch), found)


def test_rpl_5_a_sample_without_a_record_is_counted(setting):
    # Mutation: places without a record that count as followed.
    chain, samples, _ = setting
    batch = chain.batch(samples)
    _, counters = chain.replayed(batch, [None, *batch.records[1:]])
    missing = (
        samples[0].num_tokens + len(samples) - 1
    )  # the last token of every other sample was never an input
    for site, counts in counters.sites.items():
        assert counts.positions_missing == (counts.positions if site.kind == "w2" else missing), site
    for counts in counters.routing.values():
        assert counts.positions - int(counts.positions_replayed) == missing
