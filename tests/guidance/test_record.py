import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.guidance.sample_records import (
    K0,
    NUM_EXPERTS,
    TOP_K,
    W0,
    WIDTH,
    X0,
    X1,
    activations,
    identity,
    recorded,
    round_at,
)

from tracefp4.coding import CODECS, codec_by_name
from tracefp4.errors import ConfigError, RecordError
from tracefp4.formats.schemes import MXFP4_EVEN
from tracefp4.guidance import (
    ReplayBatch,
    SequenceRows,
    Site,
    StepLog,
    concat,
    recode_all,
    records_equal,
    round_site,
)
from tracefp4.guidance.payload import encode_block_scales, encode_codes
from tracefp4.guidance.record import site_by_name
from tracefp4.guidance.session import record as record_to
from tracefp4.guidance.session import replay
from tracefp4.guidance.site_record import SiteRecord


def test_aln_1_a_completion_has_one_row_less_than_tokens_and_the_last_token_is_absent():
    record = recorded(length=2 + 3 - 1)
    record.check_tokens(5)
    batch = ReplayBatch(positions=torch.arange(5)[None], records=[record])
    guide = batch.guide(X0)
    assert guide.valid.tolist() == [True, True, True, True, False]
    # Row i belongs to token i: rounding token i's own values reproduces codes of row i.
    for position in range(4):
        own = round_at(X0, activations(0, [position]))
        assert torch.equal(guide.codes[position], own.codes[0])
        assert torch.equal(guide.block_scales[position], own.block_scales[0])


def test_aln_1_an_absent_token_is_rounded_live_whatever_fills_its_row():
    x = activations(0, range(5))
    batch = ReplayBatch(positions=torch.arange(5)[None], records=[recorded(length=4)])
    with replay(batch):
        guided = round_at(X0, x)
    live = round_at(X0, x[4:])
    assert torch.equal(guided.codes[4], live.codes[0])
    assert torch.equal(guided.values[4], live.values[0])
    assert batch.counters.sites[X0].positions_missing == 1


@pytest.mark.parametrize(("num_tokens", "rows"), [(11, 10), (8, 8), (4, 4), (0, 0), (99, 10)])
def test_aln_3_a_cut_sequence_keeps_the_rows_of_its_tokens(num_tokens, rows):
    record = recorded(length=5 + 6 - 1)
    cut = record.truncate(num_tokens)
    assert cut.length == rows
    assert torch.equal(cut.sites[X0].payload, record.sites[X0].payload[:rows])
    assert torch.equal(cut.sites[W0].payload, record.sites[W0].payload[: rows * TOP_K])
    assert torch.equal(cut.routed, record.routed[:rows])
    assert cut.valid.all()


def test_aln_3_tokens_cut_without_their_record_raise():
    record = recorded(length=10)
    record.check_tokens(11)
    record.truncate(8).check_tokens(8)
    for num_tokens in (8, 4, 12):
        with pytest.raises(RecordError, match=rf"positions 0 to 9 for {num_tokens} tokens"):
            record.check_tokens(num_tokens)
    with pytest.raises(RecordError, match="got -1"):
        record.truncate(-1)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(0, 7),
    cut=st.integers(0, 7),
    keep=st.integers(0, 12),
    start=st.integers(0, 3),
    codec=st.sampled_from(CODECS),
)
def test_aln_3_truncate_and_concat_are_inverse_index_arithmetic(length, cut, keep, start, codec):
    record = recorded(length=length, start=start, sites=(X0, K0, W0), routed_layers=(0,)).recode(codec)
    cut = min(cut, length)
    first, second = record.rows(0, cut), record.rows(cut, length)
    joined = concat(first, second)
    assert records_equal(joined, record)
    assert records_equal(record.concat(second) if cut == length else joined, record)
    kept = joined.truncate(keep)
    assert kept.start == start
    assert kept.length == max(0, min(start + length, keep) - start)
    assert records_equal(kept, record.rows(0, kept.length))
    assert records_equal(kept.truncate(keep), kept)


def test_concat_refuses_records_that_are_not_adjacent_or_not_alike():
    first, second = recorded(length=3), recorded(length=3, start=3)
    with pytest.raises(RecordError, match=r"before position 3 .* starts at 4"):
        concat(first, recorded(length=2, start=4))
    with pytest.raises(RecordError, match="different layout"):
        concat(first.recode("mantissa"), second)
    with pytest.raises(RecordError, match=r"plan digest is '91a0000000000002', this side's is 'other'"):
        concat(first, replace(second, identity=replace(second.identity, plan_digest="other")))


def test_ver_1_every_position_keeps_the_version_of_the_weights_that_computed_it():
    versions = torch.tensor([7, 7, 7, 8, 9, 9, 9, 9], dtype=torch.int32)
    record = recorded(length=8, weight_versions=versions)
    assert record.versions().tolist() == [7, 7, 7, 8, 9, 9, 9, 9]
    assert record.version_lag(9) == 2
    assert record.rows(3, 8).version_lag(9) == 1
    assert record.truncate(4).versions().tolist() == [7, 7, 7, 8]
    prompt = recorded(length=2, weight_versions=6)
    continued = recorded(length=2, start=2, weight_versions=7)
    assert concat(prompt, continued).versions().tolist() == [6, 6, 7, 7]
    assert concat(prompt, recorded(length=2, start=2, weight_versions=6)).identity.weight_versions == 6
    assert recorded(length=0, weight_versions=4).version_lag(9) == 0


def test_recode_keeps_the_mantissa_bits_and_the_reverse_is_refused():
    full = recorded()
    lean = full.recode("mantissa")
    assert torch.equal(lean.sites[X0].guide_parts()["bits"], full.sites[X0].codes() & 1)
    assert full.recode("full") is full
    with pytest.raises(RecordError, match=r"'mantissa' .* cannot become 'full'"):
        lean.recode("full")
    with pytest.raises(ConfigError, match=r"got 'mantisa'.*full, low2, mantissa"):
        full.recode("mantisa")


@pytest.mark.parametrize("name", CODECS)
def test_a_full_record_becomes_any_codec_and_no_other_record_does(name):
    full = recorded()
    kept = full.recode(name)
    codec = codec_by_name(name)
    for site, part in full.sites.items():
        assert kept.sites[site].codec == name
        assert torch.equal(kept.sites[site].payload, encode_codes(part.codes(), codec=codec))
        assert torch.equal(kept.sites[site].block_scales, encode_block_scales(part.block_scales, codec=codec))
        assert kept.sites[site].exponent is part.exponent
    assert kept.recode(name) is kept
    for other in {"full", "secded"} - {name}:
        if name != "full":
            with pytest.raises(RecordError, match=rf"'{re.escape(name)}' .* cannot become '{other}'"):
                kept.recode(other)


def test_codecs_may_differ_by_site_and_sites_without_one_keep_theirs():
    full = recorded()
    codecs = {X0: "secded", K0: "mantissa_lean"}
    mixed = full.recode(codecs)
    assert {site: part.codec for site, part in mixed.sites.items()} == {
        X0: "secded", K0: "mantissa_lean", X1: "full", W0: "full",
    }  # fmt: skip
    assert mixed.recode(codecs) is mixed
    assert mixed.recode({X1: "low2"}).sites[X1].codec == "low2"
    with pytest.raises(RecordError, match=r"'secded' of layers\.0\.x cannot become 'full'"):
        mixed.recode("full")
    with pytest.raises(ConfigError, match="got 'quarter'"):
        full.recode({Site("v", 9): "quarter"})
    for one, many in zip([mixed], recode_all([full], codecs), strict=True):
        assert records_equal(one, many)
        assert many.sites[X1] is full.sites[X1]


def test_whole_codes_are_only_read_where_all_was_kept():
    full = recorded(sites=(X0,))
    assert full.sites[X0].is_whole
    for name in ("mantissa", "full+coset2"):
        part = full.recode(name).sites[X0]
        assert not part.is_whole
        with pytest.raises(
            RecordError, match=rf"got a site record of codec '{re.escape(name)}'.*Only 'full'"
        ):
            part.codes()


def test_mxfp4_blocks_of_32_have_half_as_many_scales():
    x = activations(0, range(3))
    log = StepLog(sites=[X0], codecs={X0: "parity8+coset1"})
    log.begin_step(num_tokens=3)
    with record_to(log):
        rounded = round_site(x, site=X0, scheme=MXFP4_EVEN)
    log.end_step()
    (made,) = log.build([SequenceRows(identity=identity(), rows=range(3))])
    part = made.sites[X0]
    assert (part.block_size, part.num_blocks, part.static_exponent) == (32, 1, 0)
    assert torch.equal(part.block_scales, rounded.block_scales & 1)
    assert made.num_bytes().codec == 3 * codec_by_name("parity8+coset1").row_bytes(WIDTH, block_size=32)
    with pytest.raises(RecordError, match="blocks of 16 needs"):
        replace(part, codec="parity8+raw", block_size=16)
    with pytest.raises(RecordError, match=r"block_size 8 .*\(16, 32\)"):
        replace(part, block_size=8)


def test_sites_have_names_that_are_read_back():
    for site in (X0, K0, Site("v", 39), W0):
        assert site_by_name(str(site)) == site
    for wrong in ("layers.0.q", "layers.x.0", "0.x", "layers.-1.x", "layers.0.x "):
        with pytest.raises(RecordError, match="No site is called"):
            site_by_name(wrong)


@pytest.mark.parametrize("codec", CODECS)
def test_recode_all_equals_recoding_one_by_one(codec):
    records = [recorded(0, length=4), recorded(1, length=0), recorded(2, length=7, sites=(X0, W0))]
    for one, many in zip([r.recode(codec) for r in records], recode_all(records, codec), strict=True):
        assert records_equal(one, many)


def test_recode_all_keeps_what_is_recoded_and_what_is_absent():
    records = [recorded(0, length=4), recorded(1, length=0), recorded(2, length=7, sites=(X0, W0))]
    one_by_one = [part.recode("mantissa") for part in records]
    assert recode_all(one_by_one, "mantissa") == one_by_one
    assert recode_all([], "mantissa") == []
    first, second = recode_all([None, records[0]], "mantissa")
    assert first is None
    assert records_equal(second, one_by_one[0])


def test_bytes_per_token_are_the_published_ones():
    """Hidden 2048, 40 layers: full 46,080 bytes a token, one bit 15,360."""
    full, lean = codec_by_name("full"), codec_by_name("mantissa")
    assert (full.bits_per_value(), lean.bits_per_value()) == (4.5, 1.5)
    assert full.row_bytes(2048, block_size=16) * 40 == 46_080
    assert lean.row_bytes(2048, block_size=16) * 40 == 15_360
    record = recorded(length=10, sites=(X0, X1))
    held = record.num_bytes()
    assert held.codec == full.bits_per_value() * WIDTH * 2 * 10 / 8
    assert held.exponents == 2 * 10
    assert held.routed == 2 * TOP_K * 10  # two layers, a byte an id
    assert held.total == held.codec + held.exponents + held.routed
    both = recorded(length=10, sites=(X0, K0))
    parts = [both.num_bytes(kinds=kinds) for kinds in (("x", "w2"), ("k", "v"))]
    assert [part.routed for part in parts] == [0, 0] and parts[1].exponents == 0
    assert sum(part.total for part in parts) == both.num_bytes().total - both.num_bytes().routed
    assert record.recode("mantissa").num_bytes().codec == lean.bits_per_value() * WIDTH * 2 * 10 / 8


def test_moe_3_a_record_with_a_shared_expert_slot_or_a_repeated_id_raises():
    packed = torch.tensor([[3, 1, 8], [0, 2, 8], [5, 4, 8]], dtype=torch.int16)
    record = recorded(length=3, sites=(), routed_layers=(0,))
    routed_only = replace(record, routed=packed[:, :2][:, None])
    routed_only.check_routing(NUM_EXPERTS)
    assert routed_only.routed[:, 0].tolist() == [[3, 1], [0, 2], [5, 4]]
    with pytest.raises(RecordError, match=r"position 0, layer 0; got \[3, 1, 8\].*0\.\.7"):
        replace(record, routed=packed[:, None]).check_routing(NUM_EXPERTS)
    wrong_stride = packed.reshape(-1)[:6].reshape(3, 1, 2)
    with pytest.raises(RecordError, match=r"position 1, layer 0; got \[8, 0\]"):
        replace(record, routed=wrong_stride).check_routing(NUM_EXPERTS)
    with pytest.raises(RecordError, match=r"got \[0, 0\]"):
        replace(record, routed=torch.zeros(3, 1, 2, dtype=torch.int16)).check_routing(NUM_EXPERTS)


def test_routing_of_rows_marked_invalid_is_not_judged():
    record = recorded(length=2, sites=(), routed_layers=(0,))
    zeros = torch.zeros(2, 1, 2, dtype=torch.int16)
    replace(record, routed=zeros, valid=torch.zeros(2, dtype=torch.bool)).check_routing(NUM_EXPERTS)


def test_arrays_of_unequal_length_are_refused():
    record = recorded(length=4)
    with pytest.raises(RecordError, match=r"unequal length; got \{'valid': 3\}"):
        replace(record, valid=record.valid[:3])
    with pytest.raises(RecordError, match=r"'layers\.0\.x': 3"):
        replace(record, sites={X0: record.sites[X0].rows(0, 3)})
    part = record.sites[X0]
    with pytest.raises(RecordError, match="payload and block_scales of shape"):
        replace(part, width=64)
    with pytest.raises(RecordError, match="either row exponents or one static exponent"):
        SiteRecord(
            codec="full",
            payload=part.payload,
            block_scales=part.block_scales,
            exponent=None,
            width=WIDTH,
            block_size=16,
        )


def test_check_shows_both_digests():
    record = recorded(length=1)
    record.check(scheme_digest="5c4e3e0000000001", plan_digest="91a0000000000002")
    with pytest.raises(RecordError, match=r"scheme digest is '5c4e3e0000000001', this side's is 'ffff'"):
        record.check(scheme_digest="ffff", plan_digest="91a0000000000002")


def test_res_1_a_compacted_part_owns_its_bytes_and_a_view_does_not():
    # The case: 3,200 bytes kept must not hold an array of 3,200,000. Mutation: compact returns self.
    whole = recorded(length=200, weight_versions=torch.arange(200, dtype=torch.int32))
    kept = whole.rows(190, 200)

    def held(record):
        arrays = [record.valid, record.routed, record.versions()]
        arrays += [
            a for p in record.sites.values() for a in (p.payload, p.block_scales, p.exponent) if a is not None
        ]
        return sum(array.untyped_storage().nbytes() for array in arrays)

    own = kept.compact()
    assert records_equal(own, kept)
    assert held(own) == own.num_bytes().total + 10 * (1 + 4)
    assert held(kept) == held(whole) == 20 * held(own)


def test_a_reference_under_another_static_exponent_is_refused():
    record = recorded(length=4)
    moved = replace(record, sites={K0: replace(record.sites[K0], static_exponent=5)})
    batch = ReplayBatch(positions=torch.arange(4)[None], records=[None], references=[moved])
    with replay(batch), pytest.raises(RecordError, match=r"its exponent is 5, this side's is -2"):
        round_at(K0, activations(0, range(4), site=K0))
