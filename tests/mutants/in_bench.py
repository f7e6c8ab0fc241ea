"""Faults in benchmarks and gates: figures that flatter, and gates that hold without evidence."""

from tests.mutants.mutation import Mutation

_BENCH = "src/tracefp4/bench/"
_TESTS = "tests/bench/"
_KERNELS = _TESTS + "test_kernels.py::"
_GATES = _TESTS + "test_gates.py::"
_REPLAY = _TESTS + "test_replay.py::"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="bench_results_checked_without_poison",
        fault="What is compared may have been written by an earlier replay, or by nobody.",
        path=_BENCH + "replay.py",
        old="    poison(captured[first].outputs)\n",
        new="",
        tests=(_REPLAY + "test_results_are_written_over_poison_by_the_graph_that_was_timed",),
    ),
    Mutation(
        name="bench_time_of_a_graph_for_that_of_a_call",
        fault="The sets of operands that a graph goes through are not counted.",
        path=_BENCH + "replay.py",
        old="_timing(found, num_repeats(contenders[name]) * len(contenders[name].calls))",
        new="_timing(found, num_repeats(contenders[name]))",
        tests=(_REPLAY + "test_contenders_take_turns_and_the_median_per_call_counts",),
    ),
    Mutation(
        name="bench_best_replay_for_the_median",
        fault="The luckiest replay is reported.",
        path=_BENCH + "replay.py",
        old="(statistics.median(seconds), min(seconds), max(seconds))",
        new="(min(seconds), min(seconds), max(seconds))",
        tests=(_REPLAY + "test_contenders_take_turns_and_the_median_per_call_counts",),
    ),
    Mutation(
        name="bench_wrong_result_with_a_figure",
        fault="A kernel whose result is wrong passes its gate by its speed.",
        path=_BENCH + "gates.py",
        old='        if row.check is not None and not row.check.holds:\n            return "no"\n',
        new="",
        tests=(_GATES + "test_verdicts", _GATES + "test_a_wrong_result_is_no_figure"),
    ),
    Mutation(
        name="bench_gate_without_a_result_holds",
        fault="A gate that nobody measured is not missed.",
        path=_BENCH + "verdicts.py",
        old='self.met not in ("gate", "ambition")',
        new='self.met == "no"',
        tests=(_GATES + "test_a_gate_without_a_result_does_not_hold",),
    ),
    Mutation(
        name="bench_figures_of_any_gpu",
        fault="A gate for one GPU is judged by the newest figure of another.",
        path=_BENCH + "results.py",
        old="if s.row.id == row and hardware in s.row.machine.hardware]",
        new="if s.row.id == row]",
        tests=(_GATES + "test_the_newest_row_counts_and_only_on_its_hardware",),
    ),
    Mutation(
        name="bench_oldest_figure",
        fault="An old figure stands where a newer one is stored.",
        path=_BENCH + "results.py",
        old="return max(found,",
        new="return min(found,",
        tests=(_GATES + "test_the_newest_row_counts_and_only_on_its_hardware",),
    ),
    Mutation(
        name="bench_slower_is_better",
        fault="Ratios of times are turned over.",
        path=_BENCH + "row.py",
        old='(self.value, other) if self.better == "more" else (other, self.value)',
        new='(self.value, other) if self.better == "less" else (other, self.value)',
        tests=(_TESTS + "test_row.py::test_more_is_better_or_less_is",),
    ),
    Mutation(
        name="bench_bytes_of_experts_that_nobody_reads",
        fault="Weights count for all experts, in use or not: the bandwidth that is reported was never reached.",
        path=_BENCH + "traffic.py",
        old="distinct * weights * weight_bytes",
        new="shape.experts * weights * weight_bytes",
        tests=(_TESTS + "test_routing_and_traffic.py::test_an_expert_layer_moves_its_weights_in_use_once",),
    ),
    Mutation(
        name="bench_zipf_of_equal_experts",
        fault="Skewed routing is uniform.",
        path=_BENCH + "routing.py",
        old="weights = -ranks.float().log()",
        new="weights = -ranks.float().sign()",
        tests=(
            _TESTS + "test_routing_and_traffic.py::test_zipf_routing_is_proportional_to_one_over_the_rank",
        ),
    ),
    Mutation(
        name="bench_draws_at_any_place",
        fault="A token is right wherever u points, if its log-probability is its own.",
        path=_BENCH + "kernel_steps.py",
        old="outside / PROBABILITY]",
        new="0 * outside]",
        tests=(_KERNELS + "test_draws_of_another_token_or_probability_are_wrong",),
    ),
    Mutation(
        name="quantize_waits_for_the_host",
        fault="A given outer scale is copied from the host: quantize cannot be captured in a CUDA graph.",
        path="src/tracefp4/formats/scaling.py",
        old="torch.full((), exponent, dtype=torch.int8, device=device)",
        new="torch.tensor(exponent, dtype=torch.int8, device=device)",
        tests=(_TESTS + "test_capture.py::test_nothing_crosses_between_host_and_device",),
    ),
)
