"""The pass by whole ops in bf16 storage: the definition's function, its own bytes in records and pages, rows that fill
up a batch without a trace. Here the ops are their references; test_native_cuda.py runs the same on a GPU."""

from dataclasses import replace

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.native import (
    LOGITS_CLOSE,
    decoding,
    following,
    logits_of,
    new_pool,
    relative_error,
    stored_bytes,
)
from tests.models.test_qwen3_moe import Observer, make, run_in_chunks
from tests.models.tiny_models import FP4_LAYER, bf16, fp4, tiny_model
from tests.rollout.engines import make_engine, make_prompts, sampled
from tests.rollout.recorded import assert_pages_hold_the_record, shifted

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import EMULATED, NATIVE
from tracefp4.formats.schemes import MXFP4_FLOOR
from tracefp4.guidance import ReplayBatch, Site
from tracefp4.guidance.session import record, replay
from tracefp4.models.batch import Segment

WEIGHTS_ONLY = replace(FP4_LAYER, activation=None, kv=None)
ACTIVATIONS_ONLY = replace(FP4_LAYER, weight=None, kv=None)
MX = replace(FP4_LAYER, activation=MXFP4_FLOOR, weight=MXFP4_FLOOR)
DENSE = replace(FP4_LAYER, activation=None, weight=None)


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_topk_prob": False}, {"tie_word_embeddings": True}, {"mlp_only_layers": [0]}],
    ids=lambda changes: "-".join(changes) or "default",
)
@pytest.mark.parametrize("layer", [None, WEIGHTS_ONLY], ids=["bf16", "fp4_weights"])
def test_equals_the_definition_where_no_activation_is_rounded(layer, changes):
    model = tiny_model(seed=1, **changes)
    precision = (
        bf16() if layer is None else (layer if not changes.get("mlp_only_layers") else bf16()[0], layer)
    )
    tokens = torch.randint(0, 40, (13,)).tolist()
    wanted, routed = run_in_chunks(make(model, precision, EMULATED), tokens, 13)
    for chunks in (13, 5, 1):
        found, rows = run_in_chunks(make(model, precision, NATIVE), tokens, chunks)
        assert found.dtype == torch.bfloat16
        assert relative_error(found, wanted) < LOGITS_CLOSE
        for key, (ids,) in routed.items():
            assert (rows[key][0] == ids).float().mean() > 0.9


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        (fp4(), {}),
        ((MX, MX), {}),
        ((ACTIVATIONS_ONLY, ACTIVATIONS_ONLY), {}),
        ((DENSE, FP4_LAYER), {"mlp_only_layers": [0]}),
    ],
    ids=["fp4", "mxfp4", "activations", "dense"],
)
def test_the_definition_that_follows_the_record_of_a_pass_computes_its_logits(precision, changes):
    # Once roundings are those of the record, what remains are sums and roundings to bf16. A record that is off by one
    # position, or bytes of another layer or head, give another function altogether.
    model = tiny_model(seed=1, **changes)
    tokens = torch.randint(0, 40, (14,)).tolist()
    completion = recorded(model, tokens, precision=precision)
    definition = make(model, precision, EMULATED)
    native, _ = run_in_chunks(make(model, precision, NATIVE), tokens, 14)
    wanted = native[0, : completion.record.length]
    assert relative_error(following(definition, tokens, completion.record), wanted) < LOGITS_CLOSE
    wrong = following(definition, tokens, shifted(completion.record))
    assert relative_error(wrong, wanted[: len(wrong)]) > 8 * LOGITS_CLOSE


def recorded(model, tokens, **changes):
    """The completion of a native engine that is made to say `tokens`, with every site in its record."""
    layers = range(len(changes["precision"]))
    kinds = ("x", "w2", "k", "v")
    sites = tuple(
        Site(kind, n) for kind in kinds for n in layers if changes["precision"][n].scheme_of(kind) is not None
    )
    engine = make_engine(model, arithmetic=NATIVE, records=sites, **changes)
    ((completion,),) = engine.force([tokens[:5]], [[tokens[5:]]])
    return completion


def test_codes_are_those_of_the_definition_but_for_roundings_to_bf16():
    # In the first layer nothing has been rounded before K and V but the norm, and RoPE's two products.
    model, tokens = tiny_model(), torch.randint(0, 40, (19,)).tolist()
    _, wanted = run_in_chunks(make(model, fp4(), EMULATED), tokens, 19)
    _, found = run_in_chunks(make(model, fp4(), NATIVE), tokens, 5)
    assert found.keys() == wanted.keys()
    for kind, least in (("v", 0.97), ("k", 0.95), ("x", 0.75)):
        codes, expected = found[Site(kind, 0)][0], wanted[Site(kind, 0)][0]
        assert (codes == expected).float().mean() > least
        assert (codes.roll(1, 0) == expected).float().mean() < least - 0.2


def test_records_are_the_bytes_of_the_pages():
    engine = make_engine(arithmetic=NATIVE, prefix_cache=True, max_tokens_per_step=8)
    for index, prompt in enumerate(make_prompts(3, longest=12)):
        engine.submit(prompt, sampled(6, n=2), prompt_index=index)
    while engine.has_work:
        engine.step()
        for sequence in engine._scheduler.running:
            assert_pages_hold_the_record(engine, sequence)


def test_rows_that_fill_up_a_batch_leave_no_trace():
    model = make(tiny_model(), fp4(), NATIVE)
    pools = [new_pool(model) for _ in range(2)]
    for pool in pools:
        logits_of(model, decoding(pool, [3, 4], position=0), pool)
    alone, filled = (
        logits_of(model, decoding(pool, [5, 6], position=1, padding=n), pool)
        for pool, n in zip(pools, (0, 3), strict=True)
    )
    assert filled.isfinite().all()
    assert relative_error(filled[:2], alone) < LOGITS_CLOSE
    for one, other in zip(stored_bytes(pools[1]), stored_bytes(pools[0]), strict=True):
        assert (one != 0).any()
        # whatever the rows' own bytes are: nothing is stored elsewhere, the null frame least of all
        assert_bitwise(one.flatten(-2).any(-1), other.flatten(-2).any(-1))
        assert not one[:, -1].any()


def test_stacked_bytes_are_what_a_session_is_told():
    precision = (FP4_LAYER, replace(FP4_LAYER, k_exponent=2, v_exponent=1))
    model = make(tiny_model(), precision, NATIVE)
    sites = [Site("w2", 1), Site("v", 1), Site("k", 1), Site("k", 0), Site("x", 0)]
    taps = model.taps(sites, routed_layers=(1,))
    pool, observer = new_pool(model), Observer()
    batch = decoding(pool, [7, 8, 9], position=0)
    with record(observer):
        logits_of(model, batch, pool)
    model.native.run(batch, pool, taps)
    stacked, told = taps.stacked(), observer.rows()
    layers = {kind: site.layers for kind, site in stacked.sites.items()}
    assert layers == {"x": (0,), "k": (0, 1), "v": (1,), "w2": (1,)}
    for kind, found in stacked.sites.items():
        for n, layer in enumerate(found.layers):
            codes, block_scales = told[Site(kind, layer)]
            assert_bitwise(found.packed[n], codes[:, ::2] | codes[:, 1::2] << 4)
            assert_bitwise(found.block_scales[n], block_scales)
    assert stacked.sites["w2"].packed.shape == (1, 6, 16) and stacked.sites["k"].packed.shape == (2, 3, 32)
    assert stacked.sites["x"].exponents.shape == (1, 3) and stacked.sites["x"].static_exponents is None
    assert stacked.sites["k"].exponents is None and stacked.sites["k"].static_exponents == (0, 2)
    assert stacked.sites["v"].static_exponents == (1,)
    assert stacked.routed_layers == (1,) and stacked.ids.dtype == torch.uint8
    assert_bitwise(stacked.ids[0].long(), told[1][0])


def test_what_cannot_be_tapped_is_refused():
    model = make(tiny_model(), (FP4_LAYER, replace(FP4_LAYER, activation=MXFP4_FLOOR)), NATIVE)
    with pytest.raises(ConfigError, match=r"bytes of x cannot be recorded in layers \[0, 1\]; got schemes"):
        model.taps([Site("x", 0), Site("x", 1)], routed_layers=())
    with pytest.raises(ConfigError, match="bf16"):
        make(tiny_model(), bf16(), NATIVE).taps([Site("k", 1)], routed_layers=())
    unused = model.taps([Site("x", 1)], routed_layers=(0,))
    with pytest.raises(AssertionError):
        unused.stacked()
    nothing = model.taps([], routed_layers=()).stacked()
    assert nothing.sites == {} and nothing.ids is None and nothing.routed_layers == ()


def test_a_native_pass_follows_nothing():
    model = make(tiny_model(), fp4(), NATIVE)
    pool = new_pool(model)
    with (
        replay(ReplayBatch(positions=torch.tensor([[0]]), records=[None])),
        pytest.raises(ConfigError, match="follows no records"),
    ):
        logits_of(model, decoding(pool, [1], position=0), pool)


def test_rows_of_a_padded_segment_find_their_places():
    places = torch.tensor([0, 1, 2, 3, 6])
    segment = Segment(
        begin=1, end=6, page_table=torch.zeros(3, 1), positions=torch.zeros(3, 3), places=places
    )
    rows = torch.arange(1.0, 15.0).view(7, 2)
    rectangle = segment.spread(rows)
    assert_bitwise(rectangle[0], rows[1:4])
    assert_bitwise(rectangle[1:, 0], rows[4:6])
    assert not rectangle[1:, 1:].any()
    assert_bitwise(segment.flatten(rectangle), rows[1:6])
