"""Codes, logits, guided decisions and routing are the same bytes in every mode of the trainer's passes.

Modes: padding, packing, micro-batches, accumulation, activation checkpointing. In control arithmetic nothing but the
order of float64 sums can differ, and that only in gradients.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity.chains import VOCABULARY
from tests.parity.modes import Mode, assert_close_gradients, assert_same_decisions, make_setting, run


@pytest.fixture(scope="module")
def setting():
    return make_setting()


@pytest.fixture(scope="module")
def whole(setting):
    """The samples as one right-padded batch, nothing recomputed."""
    with pytest.MonkeyPatch.context() as patch:
        found = run(setting, Mode(), patch)
    chain, samples, records = setting
    _, counters = chain.replayed(chain.batch(samples), records, references=[s.record for s in samples])
    changed = {site: int(counts.values_changed) for site, counts in counters.sites.items()}
    assert all(count > 0 for site, count in changed.items() if site.kind != "w2"), "decisions that matter"
    assert all(int(counts.positions_changed) > 0 for counts in counters.routing.values()), (
        "routing that matters"
    )
    return found


RECOMPUTED = ["reentrant", "non-reentrant", "by hand"]
MODES = {
    "left": Mode(padding=(("side", "left"),)),
    "left-and-3": Mode(padding=(("side", "left"), ("left_extra", 3))),
    "both-sides": Mode(padding=(("left_extra", 3),)),
    "one-by-one": Mode(sizes=(1,) * 5),
    "pairs-in-reverse": Mode(sizes=(2, 2, 1), order=(4, 3, 2, 1, 0)),
    "uneven-and-mixed": Mode(sizes=(1, 3, 1), order=(2, 0, 4, 1, 3), padding=(("side", "left"),)),
    "packed": Mode(layout="packed"),
    "packed-in-reverse": Mode(layout="packed", order=(4, 3, 2, 1, 0)),
    "packed-in-parts": Mode(layout="packed", sizes=(2, 3), order=(1, 4, 0, 2, 3)),
    "packed-by-mask": Mode(layout="masked"),
    "packed-by-mask-in-parts": Mode(layout="masked", sizes=(3, 2), order=(3, 0, 2, 4, 1)),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_bat_1_every_layout_decides_the_same(setting, whole, mode, monkeypatch):
    # Mutations: guidance addressed by column; positions that do not restart; attention across samples.
    found = run(setting, mode, monkeypatch)
    assert_same_decisions(found, whole)
    assert_close_gradients(found, whole)
    assert found.straight > 0


@st.composite
def modes(draw):
    """Any order, sizes, padding, layout and recomputation."""
    sizes = []
    while sum(sizes) < 5:
        sizes.append(draw(st.integers(1, 5 - sum(sizes))))
    layout = draw(st.sampled_from(["padded", "packed", "masked"]))
    padding = (("side", draw(st.sampled_from(["left", "right"]))), ("left_extra", draw(st.integers(0, 3))))
    return Mode(
        sizes=tuple(sizes),
        order=tuple(draw(st.permutations(range(5)))),
        padding=padding,
        layout=layout,
        recompute=draw(st.sampled_from(["", *RECOMPUTED])),
        backward=draw(st.sampled_from(["inside", "outside", "late", "thread"])),
    )


@settings(max_examples=12, deadline=None)
@given(mode=modes())
def test_bat_1_any_mode_decides_the_same(setting, whole, mode):
    # Mutation: anything that a mode shares with its neighbours.
    with pytest.MonkeyPatch.context() as patch:
        found = run(setting, mode, patch)
    assert_same_decisions(found, whole)
    assert_close_gradients(found, whole)


def test_bat_3_what_stands_at_padding_changes_nothing(setting, monkeypatch):
    # Mutations: padding that attention sees; a scale over all rows.
    chain, samples, records = setting
    batch = chain.batch(samples, side="left", left_extra=2)
    used = {token for sample in samples for token in sample.input_ids}
    junk = next(token for token in range(VOCABULARY) if token not in used)
    expected, _ = chain.replayed(batch, records)
    with torch.no_grad():
        weight = chain.model.model.embed_tokens.weight
        kept = weight[junk].clone()
        weight[junk] = 1e4
    try:
        spoiled = replace(batch, input_ids=torch.where(batch.attention_mask, batch.input_ids, junk))
        found, _ = chain.replayed(spoiled, records)
    finally:
        with torch.no_grad():
            weight[junk] = kept
    real = batch.attention_mask
    assert torch.equal(found[real], expected[real])
    assert not torch.equal(found[~real], expected[~real])


LAYOUTS = {"padded": {}, "packed": {"layout": "packed"}}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("backward", ["inside", "outside", "late", "thread"])
@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_rpl_1_recomputation_sees_the_session_of_its_own_forward(
    setting, whole, recompute, backward, layout, monkeypatch
):
    # Mutations: layers that ask the running session; records that are consumed.
    parts = {"sizes": (2, 3), "order": (1, 4, 0, 2, 3), **layout}
    kept = run(setting, Mode(**parts, backward=backward), monkeypatch)
    found = run(setting, Mode(**parts, backward=backward, recompute=recompute), monkeypatch)
    assert_same_decisions(found, whole)
    for got, wanted in zip(found.gradients, kept.gradients, strict=True):
        assert torch.equal(got, wanted)
    assert_close_gradients(found, whole)
    inside = {name for name in whole.rows if name != "logits"}
    for name in inside:
        assert found.reads[name] == 2 * kept.reads[name], "once in the forward, once in the recomputation"
    assert found.straight >= kept.straight > 0
