"""The suite of kernels without a GPU: every case is built, checked and told; a wrong result is never right."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from tests.bench.kernel_bench import SIZES, CountingTimer, suite
from typer.testing import CliRunner

from tracefp4.bench import kernels as module
from tracefp4.bench.gate_table import GATES
from tracefp4.bench.kernel_experts import bf16_layers, check_layer, draw_weights
from tracefp4.bench.kernel_jobs import Bench, Case, KernelSizes
from tracefp4.bench.kernel_steps import check_draws
from tracefp4.bench.kernels import Rates, Suite, all_cases, chosen_cases, compile_log
from tracefp4.bench.replay import MAX_CALLS, num_repeats, num_sets
from tracefp4.bench.traffic import Traffic
from tracefp4.cli.main import app
from tracefp4.errors import ConfigError
from tracefp4.ops.backend import Backend
from tracefp4.ops.expert_layer import Routing, expert_layer
from tracefp4.ops.sample import Draws, sample


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)


def unwritten(calls, repeats):
    return CountingTimer().capture(calls, repeats)._replace(replay=lambda: None)


def test_every_case_runs_and_agrees_with_the_reference():
    told = []
    found = suite(on_event=told.append).run(all_cases(SIZES))
    assert (found.failed, found.missing, found.skipped) == ({}, {}, [])
    assert [row.id for row in found.rows] == [case.id for case in all_cases(SIZES)]
    assert len(told) == len(found.rows) == len({row.id for row in found.rows})
    for row in found.rows:
        assert row.value > 0 and row.limit > 0 and row.better == "less" and row.facts["GB/s"] > 0
        if row.backend != "torch":
            assert row.check.holds, (row.id, row.check)
    peers = {row.id: row.peer for row in found.rows}
    assert (
        peers["kernels.quantize.small"] == "bf16 copy"
        and "grouped_mm" in peers["kernels.experts.tiny.20.zipf"]
    )
    experts = next(row for row in found.rows if row.id == "kernels.experts.tiny.1.uniform")
    assert experts.facts["distinct_experts"] == 2 and experts.facts["routing"] == "uniform"


def test_a_kernel_that_writes_nothing_is_wrong_in_every_case():
    timer = CountingTimer()
    timer.capture = unwritten
    found = suite(timer).run([case for case in all_cases(SIZES) if case.op])
    ids = {row.id for row in found.rows if not row.check.holds} | set(found.failed)
    # pages are not poisoned where others' bytes lie; their rows are
    assert ids == {case.id for case in all_cases(SIZES) if case.op}


def test_every_gate_of_a_kernel_is_measured():
    rows = {case.id for case in all_cases(KernelSizes())}
    gated = {gate.row for gate in GATES if gate.suite == "kernels"}
    assert len(gated) > 20 and gated - rows == set()


def test_limits_follow_from_the_rates_of_the_run():
    # replays of a copy in two ways, of a product, and of the row
    times = iter([1.0, 2.0] * 3 + [4.0] * 3 + [0.5] * 3)
    found = suite(CountingTimer(lambda: next(times))).run(chosen_cases(["syndromes"], SIZES))
    (row,) = found.rows
    copy = module._copy(suite().bench)
    rate = copy.traffic.bytes * num_repeats(copy.ours)  # a second a graph
    moved = 8 * (64 + 3)  # codes, and 5 bits for every 16 of a row
    assert row.limit == pytest.approx(moved / rate * 1e6) and row.value == pytest.approx(0.5e6 / MAX_CALLS)
    assert row.share == pytest.approx(row.limit / row.value)
    rates = Rates(1e12, 1e14)
    assert rates.seconds(Traffic(2e12, 1e14)) == 2.0 and rates.seconds(Traffic(1e12, 3e14)) == 3.0


def test_the_budget_ends_the_run_and_says_what_was_left_out():
    found = suite().run(chosen_cases(["quantize", "guided"], SIZES), seconds=-1)
    assert found.rows == [] and len(found.skipped) == len(chosen_cases(["quantize", "guided"], SIZES))


def test_a_gpu_that_is_lost_ends_the_run_and_keeps_what_was_measured(monkeypatch):
    monkeypatch.setattr(Suite, "_is_usable", lambda self: False)
    told, stored = [], []
    lost = replace(suite(on_event=told.append), on_case=lambda found: stored.append(len(found.rows)))
    found = lost.run(chosen_cases(["quantize"], SIZES))
    assert len(found.rows) == 1 and len(found.skipped) == 4 and stored == [1]
    assert any("the GPU is lost" in text for text in told)


def test_a_case_that_fails_and_one_without_a_kernel_cost_no_other():
    def fails(bench):
        raise RuntimeError("illegal address")

    cases = [
        Case(id="kernels.a.x", op="", build=fails),
        Case(id="kernels.b.x", op="no_such_op", build=fails),
        *chosen_cases(["syndromes"], SIZES),
    ]
    found = suite().run(cases)
    assert found.failed == {"kernels.a.x": "RuntimeError: illegal address"}
    assert found.missing == {"kernels.b.x": "no_such_op has no backend REFERENCE"} and len(found.rows) == 1
    cuda = replace(suite(), bench=replace(suite().bench, backend=Backend.CUDA))
    (reason,) = cuda.run(chosen_cases(["syndromes"], SIZES)).missing.values()
    assert "not on cpu" in reason


def test_groups_are_chosen_by_name():
    assert {case.group for case in chosen_cases(["experts", "refit"], SIZES)} == {"experts", "refit"}
    with pytest.raises(ConfigError, match="no group 'expert'; groups: copy, matmul"):
        chosen_cases(["expert"], SIZES)


def layer():
    bench = Bench(device=torch.device("cpu"), cache_bytes=0, sizes=SIZES, backend=Backend.REFERENCE)
    weights = draw_weights(bench, SIZES.models["tiny"])
    x = torch.randn(12, 64, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    return weights, (x, Routing(ids, torch.rand(12, 2).bfloat16()))


def test_a_wrong_expert_layer_is_told_from_a_right_one():
    from tracefp4.bench.kernel_experts import PRECISION

    weights, (x, routing) = layer()
    found = expert_layer(x, routing, weights.copies[0], precision=PRECISION, with_codes=True)
    sites = (found.x, found.w2)
    assert check_layer(found.y, sites, (x, routing), weights.copies[0]).error < 0.3
    other = Routing(routing.ids.roll(1, 0), routing.weights)
    wrong = {
        "scaled": (found.y * 1.05, sites),
        "a token's place": (found.y.roll(1, 0), sites),
        "other experts": (expert_layer(x, other, weights.copies[0], precision=PRECISION).y, sites),
        "x": (found.y, (replace(found.x, packed=found.x.packed ^ 1), found.w2)),
        "h": (found.y, (found.x, replace(found.w2, packed=found.w2.packed ^ 1))),
        "NaN": (found.y * torch.nan, sites),
    }
    for name, (y, parts) in wrong.items():
        assert not check_layer(y, parts, (x, routing), weights.copies[0]).holds, name


def test_weights_are_copied_until_no_cache_holds_them():
    bench = Bench(device=torch.device("cpu"), cache_bytes=10_000, sizes=SIZES, backend=Backend.REFERENCE)
    copies = draw_weights(bench, SIZES.models["tiny"]).copies
    num_bytes = sum(part.num_bytes for part in copies[0])
    assert len(copies) == num_sets(num_bytes, 10_000) > 2
    assert len({part.words.data_ptr() for experts in copies for part in experts}) == 2 * len(copies)
    assert all(torch.equal(experts.down.words, copies[0].down.words) for experts in copies)


def test_the_bf16_layers_compute_what_the_definition_does_without_rounding():
    weights, batch = layer()
    x, routing = batch
    wanted = torch.zeros(12, 64)
    for token in range(12):
        for slot in range(2):
            expert = routing.ids[token, slot]
            gate, up = (weights.gate_up[expert].float() @ x[token].float()).chunk(2)
            y = weights.down[expert].float() @ (torch.nn.functional.silu(gate) * up)
            wanted[token] += routing.weights[token, slot].float() * y
    found = bf16_layers(weights, [batch], Traffic(1.0))
    assert len(found) == 3
    for contender in found.values():
        got = contender.calls[0]().float()
        assert (got - wanted).norm() < 0.02 * wanted.norm()


def test_attention_over_other_pages_is_wrong():
    job = next(case for case in all_cases(SIZES) if case.group == "attention").build(suite().bench)
    (right,) = [call() for call in job.ours.calls]
    assert job.check([right]).holds
    for wrong in (right.roll(1, 2), right * 1.05, right.roll(1, 0)):
        assert not job.check([wrong]).holds


def test_a_wrong_delta_step_is_told_from_a_right_one():
    for case in (case for case in all_cases(SIZES) if case.group == "delta_net"):
        job = case.build(suite().bench)
        for _ in range(6):
            right = job.ours.calls[0]()
        assert job.check([right]).holds, job.check([right])
        for wrong in (right * 1.05, right.roll(1, 0), right.roll(1, 1), right * torch.nan, right * 0.0):
            assert not job.check([wrong]).holds
        for _ in range(6):
            plain = job.theirs["plain torch, compiled"].calls[0]()
        assert (plain.float() - right.float()).norm() < 0.02 * right.float().norm()


def test_draws_of_another_token_or_probability_are_wrong():
    hidden, head = torch.randn(16, 64).bfloat16(), (torch.randn(300, 64) / 8).bfloat16()
    index, ones = torch.arange(16), torch.ones(16, dtype=torch.float64)
    draws = Draws(keys=index * 7, positions=index, temperature=ones, top_k=index * 0, top_p=ones)
    found = sample(hidden, head, draws)
    assert check_draws(found, (hidden, head), draws).error < 0.1
    wrong = [
        found._replace(tokens=(found.tokens + 7) % 300),
        found._replace(tokens=found.tokens * 0 - 1),
        found._replace(logprobs=found.logprobs + 0.1),
        found._replace(logprobs=found.logprobs * torch.nan),
        sample(hidden, head, replace(draws, keys=index * 11)),
    ]
    assert [check_draws(result, (hidden, head), draws).holds for result in wrong] == [False] * len(wrong)


def test_compile_times_are_counted_by_library():
    found = {}
    with compile_log(found):
        log = logging.getLogger("tracefp4.ops.nvrtc")
        for took_s in (0.25, 0.5):
            log.info("compiled %s/%s for %s in %.2f s", "quantize", "kernel.cu", "sm_90a", took_s)
        log.warning("compiled code is not kept: %s", "disk")
    log.info("compiled %s/%s for %s in %.2f s", "quantize", "kernel.cu", "sm_90a", 1.0)
    assert found == {"quantize/kernel.cu": {"variants": 2, "seconds": 0.75}}


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["bench", "kernels", "--out", str(out)])
    assert result.exit_code == 2 and "sees none" in result.output and "bench cpu" in result.output
    assert not out.exists()
    result = CliRunner().invoke(app, ["bench", "kernels", "--only", "gemm"])
    assert result.exit_code == 2 and "no group 'gemm'" in result.output


def test_the_command_stores_rows_and_fails_on_a_wrong_result(monkeypatch, tmp_path):
    out, timer = tmp_path / "rows.json", CountingTimer()

    def run(cases, *, seconds, on_event, on_case):
        chosen = chosen_cases(["syndromes", "refit"], SIZES)
        found = replace(suite(timer, on_event), on_case=on_case).run(chosen, seconds=seconds)
        assert len(json.loads(out.read_text())["rows"]) == 2  # before the command stores them
        return found

    monkeypatch.setattr(module, "run_kernels", run)
    arguments = ["bench", "kernels", "--out", str(out), "--seconds", "60"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    stored = json.loads(out.read_text())
    assert stored["suite"] == "kernels" and len(stored["rows"]) == 2 and stored["failed"] == {}
    assert "syndromes.secded" in result.output and "Compiled on first use" in result.output
    timer.capture = unwritten
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1 and len(json.loads(result.stdout)["rows"]) == 2


def test_a_record_costs_the_bytes_that_it_keeps():
    built = {case.id: case.build(suite().bench).traffic.bytes for case in chosen_cases(["recorded"], SIZES)}
    rows, width = SIZES.rows, SIZES.width
    values, scales = rows * width * (2 + 2), rows * width / 16
    assert built["kernels.recorded.full"] == values + scales + rows * width / 2
    kept = 3 + 1  # 19 bits for the 64 codes of a row, a bit for each of its 4 scales
    assert built["kernels.recorded.bch64_3+coset1"] == values + scales + rows * kept
