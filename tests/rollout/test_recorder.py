"""Records of the engine: the rows are those of the pass that was sampled from, and replaying them changes
nothing."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.tiny_models import bf16, fp4, tiny_model
from tests.rollout.engines import make_engine, make_prompts, sampled

from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.precision import scheme_digest
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance import Site, records_equal
from tracefp4.guidance.builder import StepLog
from tracefp4.rollout.recorder import default_sites


def test_default_sites_are_x_k_v_and_routing_of_every_layer():
    (row,) = make_engine().generate(make_prompts(1), sampled(5))
    record = row[0].record
    assert set(record.sites) == {Site(kind, layer) for kind in ("x", "k", "v") for layer in (0, 1)}
    assert record.routed.shape == (record.length, 2, 2) and record.routed.dtype == torch.uint8
    assert {part.codec for part in record.sites.values()} == {"full"}
    assert (
        record.sites[Site("k", 1)].static_exponent == 0 and record.sites[Site("v", 0)].static_exponent == -3
    )
    assert record.identity.plan_digest == "plan" and record.identity.scheme_digest == scheme_digest(fp4())


def test_chosen_sites_and_down_projection_rows():
    sites = (Site("w2", 1), Site("x", 0))
    (row,) = make_engine(records=sites).generate(make_prompts(1), sampled(5))
    record = row[0].record
    assert set(record.sites) == set(sites)
    assert record.sites[Site("w2", 1)].rows_per_token == 2
    assert record.sites[Site("w2", 1)].payload.shape == (2 * record.length, 16)


def test_sites_that_are_not_rounded_are_refused():
    with pytest.raises(ConfigError, match=r"layers\.7\.x"):
        make_engine(records=(Site("x", 7),))
    with pytest.raises(ConfigError, match=r"layers\.0\.k"):
        make_engine(precision=bf16(), records=(Site("k", 0),))


def test_an_unquantized_engine_records_routing_alone():
    (row,) = make_engine(precision=bf16()).generate(make_prompts(1), sampled(5))
    assert row[0].record.sites == {} and row[0].record.routed is not None
    assert default_sites(bf16()) == ()


def test_layers_without_experts_have_no_routing():
    model = tiny_model(mlp_only_layers=[0])
    dense = type(fp4()[0])(activation=None, weight=None, kv=fp4()[0].kv)
    (row,) = make_engine(model, precision=(dense, fp4()[0])).generate(make_prompts(1), sampled(3))
    assert row[0].record.layers_routed == (1,) and row[0].record.routed.shape[1] == 1


def test_no_records_when_switched_off():
    (row,) = make_engine(records=False).generate(make_prompts(1), sampled(3))
    assert row[0].record is None and len(row[0].token_ids) == 3


def test_records_hold_the_bytes_of_the_pages():
    engine = make_engine()
    engine.submit(make_prompts(1)[0], sampled(7))
    frames = []
    while engine.has_work:
        frames = engine._scheduler.running[0].table.frames if engine._scheduler.running else frames
        engine.step()
    (completion,) = engine.take_finished()
    for layer, pages in enumerate(engine.pool.layers):
        for kind, stored in (("k", pages.keys), ("v", pages.values)):
            part = completion.record.sites[Site(kind, layer)]
            assert isinstance(stored, BlockTensor)
            for bytes_CFSW, recorded in (
                (stored.packed, part.payload),
                (stored.block_scales, part.block_scales),
            ):
                held = bytes_CFSW[:, frames].flatten(1, 2).transpose(0, 1).flatten(1)
                num_rows = min(len(held), completion.record.length)  # the last step may add a page
                assert_bitwise(held[:num_rows], recorded[:num_rows])


def test_samples_of_a_prompt_share_its_rows():
    (row,) = make_engine().generate(make_prompts(1, shortest=6), sampled(4, n=3))
    prompt = len(row[0].prompt_ids)
    for completion in row[1:]:
        for site, part in completion.record.sites.items():
            assert_bitwise(part.payload[:prompt], row[0].record.sites[site].payload[:prompt])
        assert_bitwise(completion.record.routed[:prompt], row[0].record.routed[:prompt])
    assert len({completion.record.identity.trajectory for completion in row}) == 3


def test_the_log_is_dropped_when_nothing_refers_to_it():
    engine = make_engine()
    engine.generate(make_prompts(2), sampled(4))
    assert engine._recorder._log.num_rows == 0


def test_recording_changes_no_output():
    prompts, params = make_prompts(3), sampled(6, seed=5)
    with_records = make_engine().generate(prompts, params)
    without = make_engine(records=False).generate(prompts, params)
    assert [[c.token_ids for c in row] for row in with_records] == [
        [c.token_ids for c in row] for row in without
    ]


def test_lif_4_a_layer_that_records_nothing_raises_at_the_first_request(monkeypatch):
    engine = make_engine()
    observe = StepLog.observe

    def deaf(log, site, rounded):
        if site.layer != 1:
            observe(log, site, rounded)

    monkeypatch.setattr(StepLog, "observe", deaf)
    with pytest.raises(RecordError, match=r"layers\.1\.k.*recorded nothing"):
        engine.generate([[1, 2, 3]], sampled(2))
    monkeypatch.undo()
    assert not engine.has_work and engine._recorder.num_rows == 0
    assert len(engine.generate([[1, 2, 3]], sampled(2))[0][0].token_ids) == 2


def test_aln_1_three_tokens_after_a_prompt_of_two_have_four_rows():
    """Row i belongs to input i; token 4 was never an input and has no row, and no log-prob read one."""
    engine = make_engine(control=True)
    ((c,),) = engine.force([[11, 12]], [[[21, 22, 23]]])
    ((other,),) = engine.force([[11, 12]], [[[21, 22, 7]]])
    assert (c.record.start, c.record.length, len(c.logprobs)) == (0, 4, 3)
    c.record.check_tokens(5)
    for site, part in c.record.sites.items():
        assert_bitwise(part.payload, other.record.sites[site].payload)
    ((longer,),) = engine.force([[11, 12]], [[[21, 22, 23, 9]]])
    assert longer.logprobs[:3] == c.logprobs and longer.record.length == 5


def test_aln_5_the_ids_of_a_completion_are_the_sampled_ones_whatever_their_text():
    """A decoder under which two tokens have the text of a third: nothing is ever encoded again."""
    texts = {3: "a", 4: "b", 7: "ab"}
    engine = make_engine(decode=lambda ids: "".join(texts.get(i, "?") for i in ids))
    ((c,),) = engine.force([[1]], [[[3, 4]]])
    assert c.token_ids == [3, 4] and len(c.logprobs) == 2 and c.record.length == 2
    ((free,),) = engine.generate([[1, 2]], sampled(9, stop=("ab",), keeps_stop=True))
    ((same,),) = engine.generate([[1, 2]], sampled(len(free.token_ids)))
    assert free.token_ids == same.token_ids


def test_a_pass_that_fails_leaves_no_rows_and_can_be_run_again(monkeypatch):
    """Also for requests that were there before: their next pass is the one that failed."""
    engine, prompts = make_engine(control=True), [[1, 2, 3], [4, 5]]
    expected = make_engine(control=True).generate(prompts, sampled(5, seed=1))
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, sampled(5, seed=1), prompt_index=index)
    engine.step()
    forward = engine._model.weights.__class__.__getitem__

    def fail_in_the_second_layer(weights, name):
        if name == "model.layers.1.self_attn.o_proj.weight":
            raise MemoryError
        return forward(weights, name)

    rows = engine._recorder.num_rows
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(engine._model.weights.__class__, "__getitem__", fail_in_the_second_layer)
            with pytest.raises(MemoryError):
                engine.step()
        assert engine._recorder.num_rows == rows
    while engine.has_work:
        engine.step()
    for c, (other,) in zip(engine.take_finished(), expected, strict=True):
        assert (c.token_ids, c.logprobs) == (other.token_ids, other.logprobs)
        assert records_equal(c.record, other.record)
