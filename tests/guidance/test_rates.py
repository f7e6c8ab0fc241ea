"""Residuals are what decoding really leaves wrong, and the choice is the cheapest codec that is good enough."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.guidance.sample_records import K0, KV_EXPONENT, W0, X0, X1, activations, recorded, round_at

from tracefp4.coding import CODECS
from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.schemes import NVFP4_KV, NVFP4_ROW_POW2
from tracefp4.guidance import (
    ReplayBatch,
    ResidualCounts,
    Site,
    choose_codecs,
    residual_counts,
    round_site,
)
from tracefp4.guidance.rates import Rule, codec_row_bytes, num_wrong
from tracefp4.guidance.session import replay

LENGTH = 40
RULES = {X0: Rule(scheme=NVFP4_ROW_POW2), K0: Rule(scheme=NVFP4_KV, exponent=KV_EXPONENT)}
TRIED = ("full", "mantissa", "mantissa_lean", "secded", "parity16", "bch32_2+coset1", "bch32_1+parity2")


def noisy(site, noise=0.02):
    x = activations(0, range(LENGTH), site=site)
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))


def followed(site, x, codec, **options):
    record = recorded(length=LENGTH, sites=(site,))
    batch = ReplayBatch(
        positions=torch.arange(LENGTH)[None],
        records=[record.recode(codec)],
        references=[record],
        **options,
    )
    with replay(batch):
        rounded = round_at(site, x)
    return rounded, batch, record.sites[site]


def predicted_shares(x, part, *, codecs, rule):
    """Share of the values that each codec would leave wrong."""
    counts = num_wrong(x, part, codecs=codecs, rule=rule)
    return {name: int(count) / x.numel() for name, count in counts.items()}


def wrong_by_a_loop(rounded, part):
    """Values whose codeword or scale is not the rollout's, one by one; both zeros are equal under any scale."""
    wrong = 0
    for row in range(part.codes().shape[0]):
        for j, (own, other) in enumerate(
            zip(rounded.codes[row].tolist(), part.codes()[row].tolist(), strict=True)
        ):
            same_code = own == other or (own | other) & 7 == 0
            block = j // part.block_size
            same_scale = rounded.block_scales[row, block] == part.block_scales[row, block] or other & 7 == 0
            wrong += not (same_code and same_scale)
    return wrong


@pytest.mark.parametrize("site", [X0, K0], ids=str)
@pytest.mark.parametrize("band", [None, 0.03], ids=["open", "gated"])
def test_a_prediction_is_what_following_that_codec_leaves_wrong(site, band):
    # Mutations: a guide of the whole record for every codec; scales taken as known; the gate forgotten.
    x = noisy(site)
    rule = replace(RULES[site], band=band)
    record = recorded(length=LENGTH, sites=(site,))
    predicted = predicted_shares(x, record.sites[site], codecs=TRIED, rule=rule)
    assert list(predicted) == list(TRIED)
    for name in TRIED:
        rounded, _, part = followed(site, x, name, bands=None if band is None else {site: band})
        assert predicted[name] == wrong_by_a_loop(rounded, part) / (LENGTH * 32)
    assert predicted["full"] <= predicted["mantissa"] <= predicted["secded"] <= predicted["parity16"]
    assert predicted["parity16"] > 0


def test_candidates_are_measured_in_the_pass_that_follows_another_codec():
    x = noisy(X0)
    _, batch, part = followed(X0, x, "mantissa", candidates=TRIED)
    shares = residual_counts(batch.counters).shares()
    assert shares == {X0: predicted_shares(x, part, codecs=TRIED, rule=RULES[X0])}
    with replay(batch):  # recomputed: written over, not added
        round_at(X0, x)
    assert residual_counts(batch.counters).shares() == shares
    _, gated, _ = followed(X0, x, "mantissa", candidates=TRIED, bands={X0: 0.0})
    assert residual_counts(gated.counters).wrong[X0]["full"] > 0


def test_rows_that_the_reference_lacks_are_not_counted():
    record = recorded(length=6, sites=(X0,))
    record = replace(record, valid=torch.tensor([True, True, False, True, True, True]))
    positions = torch.tensor([[-1, *range(7)]])
    x = torch.cat([torch.ones(1, 32), noisy(X0)[:7]])
    batch = ReplayBatch(positions=positions, records=[None], references=[record], candidates=["parity16"])
    with replay(batch):
        round_at(X0, x)
    counts = residual_counts(batch.counters)
    assert counts.compared == {X0: 5 * 32}
    rows = [0, 1, 3, 4, 5]
    part = record.sites[X0]
    chosen = replace(
        part,
        payload=part.payload[rows],
        block_scales=part.block_scales[rows],
        exponent=part.exponent[rows],
    )
    expected = predicted_shares(noisy(X0)[rows], chosen, codecs=["parity16"], rule=RULES[X0])
    assert counts.shares()[X0] == expected


def test_candidates_need_whole_references_and_names():
    record = recorded(length=2)
    positions = torch.arange(2)[None]
    with pytest.raises(ConfigError, match="candidates \\['secded'\\] and no references"):
        ReplayBatch(positions=positions, records=[record], candidates=["secded"])
    with pytest.raises(ConfigError, match="got 'auto'"):
        ReplayBatch(positions=positions, records=[record], references=[record], candidates=["auto"])
    lean = record.recode("mantissa").sites[X0]
    with pytest.raises(RecordError, match="got a site record of codec 'mantissa'"):
        predicted_shares(noisy(X0)[:2], lean, codecs=["secded"], rule=RULES[X0])


def test_counts_of_batches_add():
    first = ResidualCounts(wrong={X0: {"secded": 3, "full": 0}}, compared={X0: 10})
    second = ResidualCounts(wrong={X0: {"secded": 1, "full": 1}, K0: {"full": 2}}, compared={X0: 30, K0: 8})
    total = first + second
    assert total == second + first
    assert total.shares() == {X0: {"secded": 4 / 40, "full": 1 / 40}, K0: {"full": 2 / 8}}
    assert ResidualCounts(wrong={X0: {"full": 0}}, compared={X0: 0}).shares() == {}
    nothing = recorded(length=0, sites=(X0,)).sites[X0]
    assert int(num_wrong(torch.zeros(0, 32), nothing, codecs=["secded"], rule=RULES[X0])["secded"]) == 0


RESIDUALS = {
    X0: {"full": 0.0, "mantissa": 0.0, "secded": 0.001, "parity16": 0.02},
    X1: {"full": 0.0, "mantissa": 0.001, "secded": 0.03, "parity16": 0.2},
    K0: {"full": 0.004, "mantissa": 0.004, "secded": 0.03, "parity16": 0.2},
}
BYTES = {site: {"full": 144, "mantissa": 48, "secded": 14, "parity16": 6} for site in RESIDUALS}


def test_the_cheapest_codec_within_its_allowance_is_chosen():
    assert choose_codecs(RESIDUALS, row_bytes=BYTES, allowed=0.002) == {
        X0: "secded",
        X1: "mantissa",
        K0: "mantissa",
    }
    by_kind = choose_codecs(RESIDUALS, row_bytes=BYTES, allowed={"x": 0.02, "k": 0.5})
    assert by_kind == {X0: "parity16", X1: "mantissa", K0: "parity16"}
    with pytest.raises(ConfigError, match=r"layers\.0\.k; got allowances for \['x'\]"):
        choose_codecs(RESIDUALS, row_bytes=BYTES, allowed={"x": 0.02})


def test_sites_where_no_codec_is_good_enough_get_the_best():
    chosen = choose_codecs(RESIDUALS, row_bytes=BYTES, allowed=0.0)
    assert chosen == {X0: "mantissa", X1: "full", K0: "mantissa"}


def test_what_was_measured_needs_its_bytes():
    for row_bytes in ({X0: {"full": 1}}, {}):
        with pytest.raises(ConfigError, match=r"No codec can be chosen at layers\.0\.x"):
            choose_codecs({X0: {"full": 0.0, "secded": 0.0}}, row_bytes=row_bytes, allowed=0.1)
    with pytest.raises(ConfigError, match=r"No codec can be chosen at layers\.0\.x; got residuals of \[\]"):
        choose_codecs({X0: {}}, row_bytes={X0: {}}, allowed=0.1)


@given(
    shares=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    prices=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    allowed=st.floats(0, 1),
)
def test_no_other_codec_is_both_good_enough_and_cheaper(shares, prices, allowed):
    residuals, row_bytes = ({X0: dict(zip("abcde", part, strict=True))} for part in (shares, prices))
    name = choose_codecs(residuals, row_bytes=row_bytes, allowed=allowed)[X0]
    good = [other for other, share in residuals[X0].items() if share <= allowed]
    if good:
        assert name in good
        assert row_bytes[X0][name] == min(row_bytes[X0][other] for other in good)
    else:
        assert residuals[X0][name] == min(shares)


def test_bytes_of_a_records_sites_under_every_codec():
    full = recorded(length=5, sites=(X0, W0))
    prices = codec_row_bytes(full.sites, codecs=CODECS)
    for name in CODECS:
        held = full.recode(name).num_bytes().codec
        assert prices[X0][name] + prices[W0][name] == held / 5
    assert prices[W0]["full"] == 2 * prices[X0]["full"]
    assert Site("v", 0) not in prices


def test_an_unguided_pass_may_try_codecs_too():
    record = recorded(length=LENGTH, sites=(X0,))
    batch = ReplayBatch(
        positions=torch.arange(LENGTH)[None], records=[None], references=[record], candidates=["mantissa"]
    )
    with replay(batch):
        round_site(noisy(X0), site=X0, scheme=NVFP4_ROW_POW2, with_codes=False)
    counts = residual_counts(batch.counters)
    assert counts.wrong[X0]["mantissa"] < int(batch.counters.sites[X0].mismatched_after)
