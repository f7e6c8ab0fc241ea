"""Samples survive as bytes, bit for bit."""

from dataclasses import fields, replace

import pytest
from tests.rl.test_rollouts import make

from tracefp4.errors import RecordError
from tracefp4.guidance.joining import records_equal
from tracefp4.rl.pending import samples_from_bytes, samples_to_bytes


@pytest.fixture
def samples(tiny, tmp_path):
    return make(tiny, tmp_path / "run")[1][0].samples


def test_round_trip(samples):
    odd = replace(samples[0], record=None, advantage=0.1 + 0.2, reward=5e-324, finish_reason="abort")
    count = len(odd.token_ids)
    odd = replace(odd, trained_mask=[True] * (count - 1) + [False])
    back = samples_from_bytes(samples_to_bytes([samples, [], [odd]]))
    assert list(map(len, back)) == [12, 0, 1]
    for one, two in zip([*samples, odd], [*back[0], *back[2]], strict=True):
        for field in fields(one):
            if field.name != "record":
                assert getattr(one, field.name) == getattr(two, field.name), field.name
        assert (one.record is None) == (two.record is None)
        assert one.record is None or records_equal(one.record, two.record)


def test_nothing_pending():
    assert samples_from_bytes(samples_to_bytes([])) == []


def test_damage_is_found(samples):
    data = bytearray(samples_to_bytes([samples]))
    data[-100] ^= 1
    with pytest.raises(RecordError, match="checksum"):
        samples_from_bytes(bytes(data))
