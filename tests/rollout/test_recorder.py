"""Records of the engine: the rows are those of the pass that was sampled from, and replaying them changes
nothing."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.tiny_models import bf16, fp4, tiny_model
from tests.rollout.engines import make_engine, make_prompts, sampled

from tracefp4.errors import ConfigError
from tracefp4.formats.tensor import BlockTensor
from tracefp4.guidance import Site
from tracefp4.rollout.recorder import default_sites, scheme_digest


def test_default_sites_are_x_k_v_and_routing_of_every_layer():
    (row,) = make_engine().generate(make_prompts(1), sampled(5))
    record = row[0].record
    assert set(record.sites) == {Site(kind, layer) for kind in ("x", "k", "v") for layer in (0, 1)}
    assert record.routed.shape == (record.length, 2, 2) and record.routed.dtype == torch.int16
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
