"""What a row says: ratio, share, excess, in both directions; and what is stored of it."""

import json

import pytest

from tracefp4.bench.results import read_results, write_rows
from tracefp4.bench.row import BenchRow, Check, describe_machine

KEYS = {
    "id", "metric", "value", "unit", "backend", "peer", "peer_value", "ratio", "limit", "share", "better", "check",
    "facts", "hardware", "versions", "commit", "date",
}  # fmt: skip


def row(**changes):
    fields = {"value": 100.0, "peer_value": 10.0, "limit": 1000.0, "machine": describe_machine()}
    names = {
        "id": "cpu.x",
        "metric": "throughput",
        "unit": "Melem/s",
        "backend": "compiled",
        "peer": "torchao 1",
    }
    return BenchRow(**names | fields | changes)


def test_more_is_better_or_less_is():
    fast = row()
    assert (fast.ratio, fast.share, fast.excess) == (10.0, 0.1, 90.0)
    quick = row(value=2.0, peer_value=5.0, limit=1.0, better="less")
    assert (quick.ratio, quick.share, quick.excess) == (2.5, 0.5, -3.0)
    alone = row(peer_value=None, limit=None)
    assert (alone.ratio, alone.share, alone.excess) == (None, None, None)
    assert row(value=0.0, better="less").ratio is None and row(peer_value=0.0).ratio is None


@pytest.mark.parametrize(
    ("error", "allowed", "holds"),
    [(0, 0, True), (1, 0, False), (0.5, 0.5, True), (float("nan"), 1, False), (float("inf"), 1, False)],
)
def test_a_result_is_right_up_to_what_is_allowed(error, allowed, holds):
    assert Check(error=error, allowed=allowed, text="bytes").holds is holds


def test_rows_are_stored_with_every_field_and_read_back(tmp_path):
    path = tmp_path / "new" / "rows.json"
    wrong = Check(error=float("nan"), allowed=1.0, text="tolerances")
    rows = [
        row(better="less", facts={"GB/s": 3.0, "peer": "none"}),
        row(id="cpu.y", peer_value=None, check=wrong),
    ]
    write_rows(path, rows, suite="cpu", more={"seconds": 3})
    stored = json.loads(path.read_text())
    assert stored["suite"] == "cpu" and stored["seconds"] == 3
    assert set(stored["rows"][0]) == KEYS and stored["rows"][0]["ratio"] == 0.1
    assert "threads" in stored["rows"][0]["hardware"] and stored["rows"][0]["date"].endswith("+00:00")
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]
    first, second = (found.row for found in read_results(path.parent).rows)
    assert first == rows[0]
    assert not second.check.holds and second.check.error != second.check.error and second.peer_value is None
