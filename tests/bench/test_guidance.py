"""`bench guidance` on its smallest model: what each row claims, what codecs cost, and what is stored and printed."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tracefp4.bench import guidance_model, guidance_run
from tracefp4.bench.guidance import best_row, measure_everything, new_comparison
from tracefp4.bench.guidance_model import (
    SIZES,
    arithmetic_of,
    build_character_tokenizer,
    default_size,
    save_policy,
    text_of,
    token_rows,
    train_model,
)
from tracefp4.bench.guidance_rows import GuidanceRow, Tried, is_shortened, large_bytes, own_bytes, tried
from tracefp4.bench.guidance_run import GuidanceOptions, run_guidance
from tracefp4.bench.guidance_update import STEPS, UpdateProbe, masters_of
from tracefp4.cli import bench_guidance
from tracefp4.cli.main import app
from tracefp4.coding import CODECS
from tracefp4.errors import ConfigError
from tracefp4.guidance import Site

ROOT = Path(__file__).parents[2]
TINY = replace(SIZES["tiny"], steps=12, num_texts=32)
WAYS = [
    *(Tried(codec=name, layers="all") for name in ("full", "mantissa", "secded", "parity16", "bch256_3")),
    Tried(codec="mantissa", layers="last_half"),
]


@pytest.fixture(scope="module")
def trained():
    """One model for all tests; measuring rounds its weights to bf16."""
    torch.manual_seed(0)
    return train_model(TINY, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def measured(trained):
    """(comparison, automatic choice) after every row."""
    told = []
    comparison = new_comparison(trained, TINY, seed=0, on_row=lambda row: None, on_event=told.append)
    choice = measure_everything(comparison, ways=WAYS, is_auto=True)
    assert len(told) > 5
    return comparison, choice


def rows(measured):
    return {row.id: row for row in measured[0].rows}


def test_rows_are_ordered_as_guidance_claims(measured):
    # Mutation: any codec scored under the plan of nearest rounding.
    found = rows(measured)
    floor = measured[0].floor
    assert floor == min(found[name].mean for name in ("bf16", "bf16.replayed", "bf16.same_tokens")) > 0
    assert found["fp4_bf16"].mean > found["nearest"].mean > 2 * found["full"].mean
    assert found["nearest"].mean > found["mantissa.last_half"].mean > found["mantissa"].mean
    assert found["parity16"].mean > found["secded"].mean
    for name in ("full", "mantissa", "secded"):
        assert found[name].p99 <= found[name].largest < found["nearest"].largest
        assert found[name].k3 < found["nearest"].k3


def test_codes_agree_after_guidance_and_less_before(measured):
    found = rows(measured)
    assert found["full"].residual == 0.0 < found["full"].local < found["nearest"].residual
    assert found["secded"].residual < found["parity16"].residual < found["nearest"].residual
    assert found["nearest"].residual == found["nearest"].local
    assert found["bf16"].residual is None and found["fp4_bf16"].residual is None


def test_only_syndromes_can_stay_undecoded(measured):
    found = rows(measured)
    assert found["full"].undecoded is None and found["mantissa"].undecoded is None
    assert found["secded"].undecoded is not None and found["bch256_3"].undecoded is not None


def test_every_row_is_judged_against_the_floor(measured):
    floor = measured[0].floor
    for row in measured[0].rows:
        if row.id.startswith("bf16"):
            assert row.within_floor is None
        else:
            assert row.within_floor == (row.mean <= floor)


def test_rates_are_measured_for_codecs_on_all_layers(measured):
    found = rows(measured)
    for way in WAYS:
        row = found[way.id]
        has_rates = way.layers == "all"
        assert (row.encode_rate is not None) == (row.decode_rate is not None) == has_rates
        assert not has_rates or (row.encode_rate > 0 and row.decode_rate > 0)


def test_the_automatic_rate_is_a_row_within_its_floor(measured):
    comparison, choice = measured
    row = rows(measured)["auto"]
    widths = {"x": 64, "k": 64, "v": 64}
    assert row.own_bytes == own_bytes(choice.codecs, widths=widths) <= rows(measured)["full"].own_bytes
    assert choice.floor == comparison.floor and choice.holds
    assert row.mean < rows(measured)["nearest"].mean


@pytest.mark.parametrize(
    ("codec", "layers", "expected"),
    [
        ("full", "all", (46_080, 5_760)),
        ("mantissa", "all", (15_360, 1_920)),
        ("mantissa", "last_half", (7_680, 960)),
        ("mantissa_lean", "last_half", (5_760, 720)),
        ("secded", "all", (4_480, 560)),
        ("secded", "last_half", (2_240, 280)),
        ("bch256_3+bch128_2", "all", (1_080, 180)),
    ],
)
def test_bytes_of_the_large_model(codec, layers, expected):
    # By hand: 40 or 20 rows of 2048 values, and 10 or 5 layers with two rows of 512.
    assert large_bytes([codec], layers=layers) == expected


def test_bytes_of_a_choice_are_the_mean_over_its_layers():
    assert large_bytes(["full", "secded"]) == ((46_080 + 4_480) // 2, (5_760 + 560) // 2)


def test_codes_longer_than_the_rows_are_marked():
    # Mutation: comparing with the code alone, which marks K and V of the large model's own width too.
    large = {"x": 2048, "k": 512, "v": 512}
    for name in CODECS:
        assert not is_shortened({Site("x", 0): name, Site("k", 0): name}, widths=large)
    small = {"x": 128, "k": 64, "v": 64}
    assert is_shortened({Site("x", 0): "bch256_3"}, widths=small)
    assert is_shortened({Site("x", 0): "secded+bch128_2"}, widths=small)
    assert not is_shortened({Site("x", 0): "bch128_3"}, widths=small)
    assert not is_shortened({Site("x", 0): "secded", Site("k", 0): "bch64_3"}, widths=small)


def test_ways_are_distinct_and_hold_every_codec():
    found = tried()
    assert len({way.id for way in found}) == len(found)
    assert {way.codec for way in tried(sweep=False)} == set(CODECS)
    assert {way.layers for way in found} == {"all", "last_half"}


def row(name, **changes):
    found = {"mean": 0.001, "within_floor": True, "activation_bytes": 4480}
    defaults = {"rollout": "FP4", "trainer": "", "layers": "all", "p99": 0.0, "largest": 0.0, "k3": 0.0}
    return GuidanceRow(id=name, **{**defaults, **found, **changes})


def test_the_best_row_is_the_cheapest_within_the_floor_that_does_not_promise_too_much():
    found = [
        row("secded"),
        row("dear", activation_bytes=46_080),
        row("cheap", activation_bytes=100, within_floor=False),
        row("short", activation_bytes=200, is_shortened=True),
        row("nearest", activation_bytes=0),
    ]
    assert best_row(found).id == "secded"
    assert best_row(found[2:]) is None


def test_text_is_true_and_ends_with_whole_results():
    text = text_of(random.Random(3), num_characters=500)
    results = text.removesuffix(";").split(";")
    assert len(results) > 20 and text.endswith(";")
    for result in results:
        expression, _, value = result.partition("=")
        assert eval(expression) == int(value)


def test_token_rows_repeat_with_the_seed_and_need_a_tokenizer_that_keeps_characters_apart():
    tokenizer = build_character_tokenizer()
    first, second = (token_rows(tokenizer, num_rows=3, num_tokens=20, seed=seed) for seed in (1, 2))
    assert first == token_rows(tokenizer, num_rows=3, num_tokens=20, seed=1) != second
    assert all(len(ids) == 20 for ids in first) and len(tokenizer) == 20

    def merges_all(texts, add_special_tokens):
        return {"input_ids": [[1] * 5 for _ in texts]}

    with pytest.raises(ConfigError, match="keeps digits apart"):
        token_rows(merges_all, num_rows=2, num_tokens=20, seed=0)


def test_sizes_follow_the_device_and_the_large_one_has_159_million_parameters():
    assert default_size(torch.device("cpu")).name == "cpu"
    assert default_size(torch.device("cuda")).name == "h200"
    assert arithmetic_of(torch.device("cuda")).name == "native"
    with torch.device("meta"):
        model = guidance_model.build_model(SIZES["h200"].shape, tokenizer=build_character_tokenizer())
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert 158 < millions < 160
    assert SIZES["wide"].shape.hidden_size == 2048


def test_training_leaves_float32_masters_and_repeats():
    # Mutation: leaving the bf16 copies in the model.
    short = replace(TINY, steps=4)
    one, two = (train_model(short, device=torch.device("cpu")).model.state_dict() for _ in range(2))
    assert all(torch.equal(weight, two[name]) for name, weight in one.items())
    weight = one["model.layers.0.mlp.experts.down_proj"]
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())


@pytest.fixture(scope="module")
def updated(trained):
    """(comparison, rows by (id, gate), weights before) of the update suite."""
    policy = train_model(TINY, device=torch.device("cpu"))
    masters = masters_of(policy.model)
    comparison = new_comparison(policy, TINY, seed=0, on_row=lambda row: None, on_event=lambda text: None)
    comparison.sample()
    probe = UpdateProbe(comparison=comparison, masters=masters, codecs=("mantissa",))
    found = probe.run(lambda row: None)
    return comparison, {(row.id, row.gate): row for row in found}, masters


def test_following_everywhere_hides_the_update_and_the_gate_gives_some_of_it_back(updated):
    # Mutation: bands not given to the trainer; records of the moved weights.
    _, found, _ = updated
    slopes = {key: row.transmission[f"{STEPS[-1]:g}"]["slope"] for key, row in found.items()}
    nearest = slopes["nearest", "-"]
    everywhere, gated = slopes["mantissa", "none"], slopes["mantissa", "noise"]
    assert everywhere + 0.1 < gated <= nearest + 0.1
    assert abs(nearest - 1) < 0.3
    assert found["mantissa", "noise"].followed < 0.5 < 0.9 < found["mantissa", "none"].followed
    assert found["nearest", "-"].followed == 0.0
    assert found["mantissa", "none"].mean < found["nearest", "-"].mean


def test_steps_of_every_size_are_measured_with_intervals(updated):
    _, found, _ = updated
    for row in found.values():
        assert set(row.transmission) == {"1e-05", "0.0001", "0.0003"}
        for step in row.transmission.values():
            assert step["low"] < step["slope"] < step["high"] and step["signal_rms"] > 0
    signals = [row["signal_rms"] for row in found["nearest", "-"].transmission.values()]
    assert signals == sorted(signals)


def test_the_weights_are_put_back(updated):
    comparison, _, masters = updated
    for name, parameter in comparison.bed.policy.model.named_parameters():
        assert torch.equal(parameter, masters[name])


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "model"
    save_policy(trained, path)
    return path


def test_the_command_measures_a_checkpoint_and_stores_the_result(checkpoint, tmp_path):
    out = tmp_path / "result.json"
    arguments = [
        "bench",
        "guidance",
        "--size",
        "tiny",
        "--model",
        str(checkpoint),
        "--codecs",
        "secded",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    stored = json.loads(out.read_text())
    assert {"suite", "schema_version", "rows", "floor", "hardware", "versions", "commit", "plan"} <= set(
        stored
    )
    assert [found["id"] for found in stored["rows"]][-1] == "secded" and stored["num_tokens"] == 120
    assert set(stored["rows"][0]) == set(GuidanceRow.__dataclass_fields__)
    assert stored["auto"] is None and stored["arithmetic"] == "emulated"
    for text in ("FP4 rollout and trainer", "What each codec costs", "4,480", "floor 0.00"):
        assert text in result.output


def test_the_update_command_gives_slopes_as_json_and_progress_beside_it(checkpoint, tmp_path):
    out = tmp_path / "result.json"
    arguments = [
        "bench",
        "guidance",
        "--update",
        "--size",
        "tiny",
        "--model",
        str(checkpoint),
        "--codecs",
        "secded",
    ]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    stored = json.loads(out.read_text())
    assert json.loads(result.stdout) == stored and "a step of 0.0003: secded" in result.stderr
    assert stored["suite"] == "guidance_update" and stored["gate"]["num_sites"] == 6
    assert [(found["id"], found["gate"]) for found in stored["rows"]] == [
        ("nearest", "-"), ("secded", "none"), ("secded", "noise"),
    ]  # fmt: skip
    tables = bench_guidance._tables(stored)
    assert [len(table.rows) for table in tables] == [3] and tables[0].header[-1] == "0.0003"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "huge"], "unknown size 'huge'"),
        (["--codecs", "secde"], "Unknown guidance codec; got 'secde'"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(arguments, message, monkeypatch):
    monkeypatch.setattr("tracefp4.bench.guidance_run.train_model", lambda *a, **b: pytest.fail("trained"))
    result = CliRunner().invoke(app, ["bench", "guidance", *arguments])
    assert result.exit_code == 2 and message in result.output


def test_help_teaches():
    result = CliRunner().invoke(app, ["bench", "guidance", "--help"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    for part in ("floor is BF16 beside BF16", "Qwen3.5-35B-A3B", "noise gate", "--save-model"):
        assert part in text


def test_a_trained_model_is_kept_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", replace(TINY, steps=1))
    path = tmp_path / "kept"
    run_guidance(GuidanceOptions(size="tiny", save_model=path, codecs=("full",)))
    assert (path / "model.safetensors").exists() and (path / "tokenizer.json").exists()


@pytest.mark.slow
def test_everything_stays_on_the_device_of_the_model():
    # Mutation: `.to(device)` left out of PolicyTrainer._pad, or of calibrated_plan.
    command = [sys.executable, str(Path(__file__).with_name("device_run.py"))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "pretend native" in found.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_suite_runs_in_real_bf16():
    found = run_guidance(GuidanceOptions(size="tiny", codecs=("full", "secded", "auto")))
    by_id = {measured["id"]: measured for measured in found["rows"]}
    assert found["arithmetic"] == "native" and found["device"] != "cpu"
    assert by_id["full"]["residual"] == 0.0 and 2 * by_id["full"]["mean"] < by_id["nearest"]["mean"]
    assert by_id["secded"]["mean"] < by_id["nearest"]["mean"]
    moved = run_guidance(GuidanceOptions(size="tiny", codecs=("mantissa",), is_update=True))
    slopes = [measured["transmission"]["0.0003"]["slope"] for measured in moved["rows"]]
    assert slopes[1] < slopes[2] < slopes[0] + 0.1


def test_the_training_time_can_be_set_and_is_stored(monkeypatch):
    asked = []

    def trained(size, **_):
        asked.append(size.seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(guidance_run, "train_model", trained)
    for seconds, expected in ((7.0, 7.0), (None, SIZES["tiny"].seconds)):
        with pytest.raises(KeyboardInterrupt):
            run_guidance(GuidanceOptions(size="tiny", train_seconds=seconds))
        assert asked.pop() == expected
