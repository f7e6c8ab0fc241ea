"""`tracefp4 bench engine` as a whole on the tiny shape, and its rows and gates on results that nobody measured."""

import json
from dataclasses import replace

import pytest
import torch
from tests.bench.engine_bench import load_result, maker, point_result, workshop
from typer.testing import CliRunner

from tracefp4.bench import engine_run
from tracefp4.bench.engine_build import CPU_CARD_BYTES, engine_device
from tracefp4.bench.engine_decoding import DecodingEngine
from tracefp4.bench.engine_points import Point, StepBytes, all_points
from tracefp4.bench.engine_profile import make_profile
from tracefp4.bench.engine_run import EngineOptions
from tracefp4.bench.engine_shapes import TINY, measured_shape
from tracefp4.bench.gate_table import GATES, gates_of, is_missed
from tracefp4.bench.results import read_results
from tracefp4.cli.main import app
from tracefp4.errors import ConfigError

TINY_RUN = ("--random-weights", "tiny", "--context", "128", "--steps", "2")
ELSEWHERE = ("engine.qwen3.5-35b-a3b.", "engine.qwen3-30b-a3b.8k.transformers")
"""Gates of another model (test_engine_hybrids.py), and of a peer that nobody calls yet."""


def run(out, *options):
    return CliRunner().invoke(app, ["bench", "engine", *options, "--out", str(out)])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_command_measures_every_group(tmp_path):
    out = tmp_path / "engine.json"
    result = run(out, *TINY_RUN, "--profile")
    assert result.exit_code == 0, result.output
    stored = json.loads(out.read_text())
    rows = {row["id"]: row for row in stored["rows"]}
    names = {f"engine.tiny.{point.name}" for point in all_points([128]) if point.batch != 64}
    peers = {f"{name}.bf16" for name in names - {"engine.tiny.128.batch8"}}
    assert set(rows) == names | peers | {"engine.tiny.128.recording"} and not stored["failed"]
    assert list(stored["unfit"]) == ["fp4 128.batch64", "bf16 128.batch64", "bf16 128.batch8"]
    assert "does not fit: bf16 128.batch8, bench engine: 8 sequences of 128 tokens need" in result.output
    for name, row in rows.items():
        assert name.endswith("recording") or (row["check"]["error"] == 0 and row["limit"] > 0)
    ours = rows["engine.tiny.128.steady"]["facts"]
    assert ours["plan"] == "fp4" and ours["routing"] == "uniform" and ours["context"] == "16 to 128"
    assert ours["accounting"] == "steady" and 1 <= ours["distinct_experts"] <= 4 and ours["timed_steps"] == 2
    together = rows["engine.tiny.128.together"]["facts"]
    assert together["batch"] == rows["engine.tiny.128"]["facts"]["batch"] < ours["batch"]
    assert "step_ms at 96" in together and together["timed_steps"] == 10
    assert rows["engine.tiny.128.bf16"]["facts"]["batch"] < together["batch"]
    assert rows["engine.tiny.128.batch1"]["unit"] == "ms" and rows["engine.tiny.128.batch1"]["ratio"] > 0
    assert rows["engine.tiny.128.zipf"]["facts"]["routing"] == "zipf"
    assert stored["profiles"]["engine.tiny.128"][0]["launches"] > 0
    assert "Kernels of engine.tiny.128.bf16" in result.output and "fp4 without records" in result.output
    assert {found.row.id for found in read_results(tmp_path).rows} == set(rows)


def test_groups_time_and_memory_are_chosen(tmp_path):
    out = tmp_path / "engine.json"
    result = run(out, *TINY_RUN, "--only", "batch", "--layers", "1", "--json")
    assert (
        result.exit_code == 2 and "only the shapes tiny and tiny-hybrid run" in result.output
    )  # a part is another shape
    result = run(out, *TINY_RUN, "--only", "batch", "--memory", "0.7", "--json")
    assert result.exit_code == 0, result.output
    ids = {row["id"] for row in json.loads(out.read_text())["rows"]}
    assert ids == {f"engine.tiny.128.{name}.memory70" for name in ("batch1", "batch1.bf16", "batch8")}
    result = run(out, *TINY_RUN, "--only", "recording")
    assert {row["id"] for row in json.loads(out.read_text())["rows"]} == {
        "engine.tiny.128", "engine.tiny.128.bf16", "engine.tiny.128.recording",
    }  # fmt: skip


def test_what_the_time_does_not_reach_is_named(tmp_path):
    options = EngineOptions(
        shape=TINY, contexts=(128,), steps=replace(engine_run.USUAL_STEPS, timed=2, warm=2)
    )
    told = []
    suite = engine_run.EngineSuite(options, device=torch.device("cpu"), on_event=told.append)
    found = suite.run(seconds=-1.0)
    assert (
        not found.rows and not found.built and "fp4 128" in found.skipped and "bf16 128.zipf" in found.skipped
    )
    assert "fp4 without records 128" in found.skipped


def test_a_point_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    whole = engine_run.time_load

    def failing(engine, load, **options):
        if len(load.contexts) == 8:
            raise RuntimeError("out of memory")
        return whole(engine, load, **options)

    monkeypatch.setattr(engine_run, "time_load", failing)
    out = tmp_path / "engine.json"
    result = run(out, *TINY_RUN, "--only", "batch")
    stored = json.loads(out.read_text())
    assert result.exit_code == 1 and "failed: fp4 128.batch8, RuntimeError: out of memory" in result.output
    assert list(stored["failed"]) == ["fp4 128.batch8"]
    assert {row["id"] for row in stored["rows"]} == {"engine.tiny.128.batch1", "engine.tiny.128.batch1.bf16"}


def test_a_wrong_record_is_a_wrong_result(tmp_path, monkeypatch):
    monkeypatch.setattr(DecodingEngine, "count_record_differences", lambda self: 3)
    out = tmp_path / "engine.json"
    result = run(out, *TINY_RUN, "--only", "batch")
    assert result.exit_code == 1 and "NO" in result.output
    assert all(row["check"]["error"] == 3 for row in json.loads(out.read_text())["rows"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--random-weights", "gpt-oss-20b"),
            "a model that this suite does not build; shapes: qwen3.5-35b-a3b",
        ),
        (("--random-weights", "qwen3-30b-a3b"), "is measured on an NVIDIA GPU"),
        ((*TINY_RUN, "--only", "whole"), "no group 'whole'; groups: full, together, steady, batch, zipf"),
        (
            (*TINY_RUN[:-2], "--steps", "64"),
            "a load takes 80 steps, warm ones included, and the shortest context",
        ),
        ((*TINY_RUN, "--context", "8q"), "a context is a number of tokens, at least 16; got '8q'"),
        ((*TINY_RUN, "--context", ","), "got no context"),
        ((*TINY_RUN, "--layers", "9"), "cannot be cut to its first 9 layers; it has 2"),
        ((*TINY_RUN, "--memory", "0.3"), "leave no memory for K and V"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, text, tmp_path):
    result = run(tmp_path / "engine.json", *options)
    assert result.exit_code == 2 and text in result.output.replace("\n", " "), result.output
    assert not (tmp_path / "engine.json").exists()


def test_the_help_teaches():
    text = CliRunner().invoke(app, ["bench", "engine", "--help"], env={"COLUMNS": "120"}).output
    for word in ("--random-weights", "full context", "bench gates", "--random-weights tiny", "No checkpoint"):
        assert word in text, word


def test_pages_are_what_the_weights_leave():
    shop = workshop()
    pages, fewer = (found.num_pages("fp4") for found in (shop, workshop(memory=0.7)))
    kv = 2 * 2 * 2 * 64 * 0.5625 * 16
    assert pages - fewer == pytest.approx(0.2 * CPU_CARD_BYTES / kv, abs=1)
    assert pages > 3 * shop.num_pages("bf16") and shop.peak_share() is None
    with pytest.raises(ConfigError, match="the bf16 weights of tiny leave no memory"):
        workshop(memory=0.3).num_pages("bf16")
    assert engine_device(TINY).type == "cpu"


def rows_of(results, silent=None, **options):
    return {row.id.removeprefix("engine."): row for row in maker(**options).rows(results, silent or {})}


def test_rates_limits_and_ratios():
    point = Point(128, "full")
    ours = point_result(point, "fp4", step_s=0.02, num_bytes=1e10)  # 128 sequences fit
    peer = point_result(point, "bf16", step_s=0.008, num_bytes=6e9, num_pages=256)
    alone = rows_of([ours])["qwen3-30b-a3b.128"]
    assert alone.value == ours.batch / 0.02 and alone.ratio is None and alone.peer == "none"
    assert alone.limit == ours.batch / 0.01 and alone.share == pytest.approx(0.5)
    both = rows_of([ours, peer])
    row = both["qwen3-30b-a3b.128"]
    assert row.peer_value == peer.batch / 0.008 and row.ratio == row.value / row.peer_value
    assert both["qwen3-30b-a3b.128.bf16"].share == pytest.approx(0.75)
    assert rows_of([ours], suffix=".memory60").keys() == {"qwen3-30b-a3b.128.memory60"}


def test_a_peer_far_from_its_floor_is_void():
    point = Point(128, "full")
    ours = point_result(point, "fp4", step_s=0.02)
    weak = point_result(point, "bf16", step_s=0.008, num_bytes=4.79e9, num_pages=256)
    row = rows_of([ours, weak])["qwen3-30b-a3b.128"]
    assert row.ratio is None and row.peer.startswith("void: ") and "60%" in row.peer
    assert row.facts["peer's share of its floor"] == pytest.approx(0.599, abs=1e-3)
    strong = point_result(point, "bf16", step_s=0.008, num_bytes=4.8e9, num_pages=256)
    assert rows_of([ours, strong])["qwen3-30b-a3b.128"].ratio is not None
    # few sequences wait for launches in either mode
    few = [point_result(Point(128, "batch", 8), plan, step_s=0.01, num_bytes=1e9) for plan in ("fp4", "bf16")]
    assert rows_of(few)["qwen3-30b-a3b.128.batch8"].ratio == 1.0


def test_either_difference_makes_a_result_wrong():
    for differences in ((0, 0), (1, 0), (0, 1)):
        row = maker().rows(
            [point_result(Point(128, "full"), "fp4", step_s=1.0, differences=differences)], {}
        )[0]
        assert row.check.error == sum(differences) and is_missed(row) == any(differences)


def test_one_sequence_is_a_latency():
    point = Point(128, "batch", 1)
    found = [
        point_result(point, plan, step_s=s, num_bytes=1e9) for plan, s in (("fp4", 0.002), ("bf16", 0.003))
    ]
    row = rows_of(found)["qwen3-30b-a3b.128.batch1"]
    assert (row.value, row.unit, row.better) == (2.0, "ms", "less")
    assert row.ratio == pytest.approx(1.5) and row.limit == 1.0 and row.share == 0.5


def test_a_batch_that_starts_together_is_the_mean_over_its_contexts():
    point = Point(128, "together")
    found = point_result(point, "fp4", step_s=0.0)
    # a step of c tokens takes c microseconds: over 16 .. 128 that is 72 in the mean
    loads = tuple(replace(load, step_s=(max(load.load.contexts) * 1e-6,)) for load in found.loads)
    row = rows_of([replace(found, loads=loads)])["qwen3-30b-a3b.128.together"]
    assert len(loads) == 5 and row.value == pytest.approx(found.batch / 72e-6)


def test_recording_and_what_is_outside_the_pass():
    point = Point(8192, "full")
    kernels = [("attend", 48, 6000.0), ("Memcpy DtoH", 4, 500.0), ("dequantize", 2, 3000.0), ("idle", 1, 0.0)]
    # one kernel waits on the device while another runs
    spans = [(100.0, 6100.0), (5000.0, 9000.0), (200.0, 300.0), (9000.0, 9100.0)]
    profile = make_profile(kernels, {"attend": 12e9}, spans=spans)
    assert [kernel.name for kernel in profile.kernels] == ["attend", "dequantize", "Memcpy DtoH"]
    assert profile.kernels[0].gb_per_s == pytest.approx(2000) and profile.kernels[1].gb_per_s is None
    assert profile.kernels[0].share == pytest.approx(6 / 9.5)
    found = point_result(point, "fp4", step_s=0.0102, profile=profile)
    silent = {point: load_result(step_s=0.01)}
    rows = rows_of([found], silent)
    assert rows["qwen3-30b-a3b.8k.recording"].value == pytest.approx(2.0)
    assert rows["qwen3-30b-a3b.8k.outside_forward"].value == pytest.approx(100 * (1 - 9 / 10.2))
    passes = rows["qwen3-30b-a3b.8k.dequantizing_passes"]
    assert passes.value == 2 and is_missed(passes)
    many = make_profile([(f"kernel {i}", 1, 1.0) for i in range(20)], {}, spans=[])
    assert len(many.to_json()) == 16 and many.to_json()[-1]["name"] == "5 others"


def test_every_gate_of_the_engine_is_measured():
    contexts = (8192, 32768)
    assert EngineOptions(shape=measured_shape("qwen3-30b-a3b")).contexts == contexts
    profile = make_profile([("attend", 1, 1.0)], {}, spans=[(0.0, 1.0)])
    results, silent = [], {}
    for plan, pages in (("fp4", 253_000), ("bf16", 45_000)):
        for point in all_points(contexts):
            try:
                results.append(point_result(point, plan, step_s=0.03, num_pages=pages, profile=profile))
            except ConfigError:
                assert plan == "bf16" and point.name == "32k.batch64"
    silent[Point(8192, "full")] = load_result(step_s=0.03)
    rows = maker().rows(results, silent)
    ids = [row.id for row in rows]
    assert len(ids) == len(set(ids))
    gated = {gate.row for gate in GATES if gate.suite == "engine" and not gate.row.startswith(ELSEWHERE)}
    assert len(gated) == 13 and gated - set(ids) == set()
    assert sum(len(gates_of(row)) for row in rows) == 15


def test_a_part_of_a_model_meets_no_gate():
    found = point_result(Point(8192, "full"), "fp4", step_s=1.0, num_pages=253_000)
    (row,) = maker("qwen3-30b-a3b.4_layers").rows([found], {})
    assert gates_of(row) == []
    (whole,) = maker().rows([found], {})
    assert [gate.met(whole) for gate in gates_of(whole)] == ["no", "not judged"]


def test_bytes_add_up():
    assert StepBytes(dense=1.0, experts=2.0, kv=3.0).total == 6.0
