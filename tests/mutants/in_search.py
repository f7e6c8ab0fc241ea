"""Faults in searched scales and in the statistics behind them."""

from tests.mutants.mutation import Mutation

_SEARCH = "src/tracefp4/ops/search_scales/reference.py"
_COLLECTOR = "src/tracefp4/checkpoints/collector.py"
_STATISTICS = "src/tracefp4/checkpoints/statistics.py"
_TEST_SEARCH = "tests/ops/test_search_scales.py::"
_TEST_SUMS = "tests/checkpoints/test_collector.py::test_sums_are_those_of_the_routed_tokens"
_TEST_STATISTICS = "tests/checkpoints/test_statistics.py::"

SEARCH = (
    Mutation(
        name="search_ignores_importances",
        fault="Every search is the unweighted one.",
        path=_SEARCH,
        old="weight is None else squares.mul_(weight)",
        new="weight is not None else squares",
        tests=(_TEST_SEARCH + "test_bytes_worked_out_by_hand",),
    ),
    Mutation(
        name="search_takes_the_last_of_equals",
        fault="Equal errors move a block away from the byte of its maximum.",
        path=_SEARCH,
        old="is_better = found < least",
        new="is_better = found <= least",
        tests=(_TEST_SEARCH + "test_equal_errors_keep_the_byte_of_quantize",),
    ),
    Mutation(
        name="search_in_units_of_the_scale",
        fault="Errors of codes are compared, although the scales differ.",
        path=_SEARCH,
        old="squares = values.sub_(blocks).mul_(unit).square_()",
        new="squares = values.sub_(blocks).div_(decode_scale).square_()",
        tests=(_TEST_SEARCH + "test_bytes_worked_out_by_hand",),
    ),
    Mutation(
        name="search_climbs_from_the_best",
        fault="The window moves with the best byte so far.",
        path=_SEARCH,
        old="(default.to(torch.int16) + offset)",
        new="(best.to(torch.int16) + offset)",
        tests=(_TEST_SEARCH + "test_bytes_worked_out_by_hand",),
    ),
    Mutation(
        name="search_squares_vanish",
        fault="Errors of tiny weights are squared as they are, and become 0.",
        path=_SEARCH,
        old=".mul_(unit).square_()",
        new=".square_()",
        tests=(_TEST_SEARCH + "test_powers_of_two_move_only_the_exponent",),
    ),
    Mutation(
        name="search_wakes_flushed_blocks",
        fault="A block that the scheme stores as zeros is searched.",
        path=_SEARCH,
        old="is_searched = default > 0",
        new="is_searched = default >= 0",
        tests=(_TEST_SEARCH + "test_a_block_that_the_scheme_flushes_stays_flushed",),
    ),
    Mutation(
        name="given_scales_hide_nan",
        fault="A block that is not finite keeps the scale that was given for it.",
        path="src/tracefp4/ops/quantize/reference.py",
        old="block_scales = block_scales.masked_fill(~operand.finite, scheme.nan_byte)",
        new="pass",
        tests=(
            "tests/ops/test_quantize_with_scales.py::test_spc_1_blocks_that_are_not_finite_take_the_nan_byte",
        ),
    ),
)

STATISTICS = (
    Mutation(
        name="collector_takes_the_wrong_maximum",
        fault="The static scale of the down-projection's input comes from the experts' input.",
        path=_COLLECTOR,
        old="self._see_largest(1, middle)",
        new="self._see_largest(1, x)",
        tests=(_TEST_SUMS,),
    ),
    Mutation(
        name="collector_drops_combination_weights",
        fault="Later layers see inputs that the model never computes.",
        path=_COLLECTOR,
        old=" * top_k_weights[rows, slot, None]",
        new="",
        tests=("tests/checkpoints/test_collector.py::test_the_model_computes_what_it_did",),
    ),
    Mutation(
        name="statistics_trust_experts_with_few_tokens",
        fault="The mean of a handful of tokens decides scales.",
        path=_STATISTICS,
        old="return instead if is_few else measured",
        new="return measured",
        tests=(_TEST_STATISTICS + "test_experts_with_few_tokens_are_not_trusted",),
    ),
    Mutation(
        name="statistics_digest_without_numbers",
        fault="Two files with other numbers have one digest.",
        path=_STATISTICS,
        old="found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())",
        new="pass",
        tests=(_TEST_STATISTICS + "test_the_digest_covers_numbers_and_origin",),
    ),
)

MUTATIONS = (*SEARCH, *STATISTICS)
