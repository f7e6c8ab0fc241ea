"""Faults in encoding and decoding guides that hold less: syndromes, the search for flips, cosets, the gate."""

from tests.mutants.mutation import Mutation

_FOLDER = "src/tracefp4/ops/guided_quantize/"
_DECODING = _FOLDER + "decoding.py"
_CELLS = _FOLDER + "cells.py"
_SEARCH = _FOLDER + "search.py"
_SCALES = _FOLDER + "scale_decoding.py"
_C_SEARCH = _FOLDER + "search.h"
_C_SEGMENTS = _FOLDER + "segments.h"
_C_SCALE_CELLS = _FOLDER + "scale_cells.h"
_CHECKS = "src/tracefp4/ops/parity_checks.py"
_C_SYNDROMES = "src/tracefp4/ops/syndromes.h"
_CODE = "src/tracefp4/coding/syndrome.py"
_TEST_BRUTE = "tests/ops/test_decoding.py::test_syndromes_equal_brute_force"
_TEST_OWN = "tests/ops/test_decoding.py::test_the_rollouts_own_x_gives_its_codes_and_scales"
_TEST_TIES = (
    "tests/ops/test_decoding.py::test_of_two_sets_of_one_cost_the_smaller_one_and_then_the_first_is_flipped"
)
_TEST_PROMISE = "tests/ops/test_decoding_properties.py::"
_TEST_ENCODER = "tests/ops/test_syndromes.py::test_every_row_equals_a_bit_by_bit_encoder"
_TEST_C = "tests/ops/test_compiled_guides.py::test_guides_that_hold_less[NVFP4_ROW_POW2]"
_SELF_CHECK = "tests/ops/test_self_check.py::test_a_library_is_refused_only_for_want_of_a_compiler"

SYNDROMES = (
    Mutation(
        name="syndrome_without_the_parity_bit",
        fault="The extended BCH code loses its overall parity: one flip more is mistaken for another set.",
        path=_CODE,
        old="column = 1\n",
        new="column = 0\n",
        tests=("tests/coding/test_syndrome.py::test_no_small_set_of_differences_is_invisible",),
    ),
    Mutation(
        name="syndrome_bits_in_the_other_order",
        fault="Bit 0 of a row's bit string goes to bit 7 of its first byte.",
        path=_CHECKS,
        old="return (padded << torch.arange(8,",
        new="return (padded.flip(2) << torch.arange(8,",
        tests=(_TEST_ENCODER,),
    ),
    Mutation(
        name="c_syndrome_bits_in_the_other_order",
        fault="The upper bits of a syndrome are written first.",
        path=_C_SYNDROMES,
        old="(bits >> put & ((1u << take) - 1))",
        new="(bits >> (num - put - take) & ((1u << take) - 1))",
        tests=(_TEST_ENCODER, _SELF_CHECK),
    ),
    Mutation(
        name="c_syndrome_of_a_short_block_reads_on",
        fault="The last, shorter block of a row takes in the first codes of the next row.",
        path=_C_SYNDROMES,
        old="(int)smaller(length, width - i)",
        new="(int)smaller(length, last * width - row * width - i)",
        tests=(_TEST_ENCODER, _SELF_CHECK),
    ),
    Mutation(
        name="c_wide_columns_cut",
        fault="Syndromes of more than 31 bits are summed in 32.",
        path=_C_SYNDROMES,
        old="if (code->num_bits > 31) {",
        new="if (code->num_bits > 63) {",
        tests=(_TEST_ENCODER, _SELF_CHECK),
    ),
)

SEARCH = (
    Mutation(
        name="cost_of_flips_not_squared",
        fault="Two flips of 0.3 and 0.3 beat one of 0.5.",
        path=_SEARCH,
        old="(key_FC // length).square()",
        new="(key_FC // length)",
        tests=(_TEST_BRUTE,),
    ),
    Mutation(
        name="ties_of_candidates_to_the_later_one",
        fault="Of equally near values the one with the higher index comes first.",
        path=_SEARCH,
        old="(distance_FB * length + index_B)",
        new="(distance_FB * length + (length - 1 - index_B))",
        tests=(_TEST_BRUTE,),
    ),
    Mutation(
        name="flips_of_values_that_are_no_candidates",
        fault="Values outside the band, or in blocks without a scale, are flipped.",
        path=_SEARCH,
        old=".masked_fill_(~is_allowed_FB, _IMPOSSIBLE)",
        new="",
        tests=(_TEST_BRUTE, _TEST_PROMISE + "test_no_value_outside_the_band_moves"),
    ),
    Mutation(
        name="one_flip_less",
        fault="The search stops one flip before the code's limit.",
        path=_SEARCH,
        old="for size in range(1, min(code.max_flips, num_ranks) + 1):",
        new="for size in range(1, min(code.max_flips, num_ranks)):",
        tests=(_TEST_BRUTE,),
    ),
    Mutation(
        name="c_cost_ties_to_the_last_set",
        fault="Of two sets of one cost the later one is taken.",
        path=_C_SEARCH,
        old="if (cost + search->cost[i] >= search->best) return;",
        new="if (cost + search->cost[i] > search->best) return;",
        tests=(_TEST_TIES,),
    ),
    Mutation(
        name="cost_ties_to_the_larger_set",
        fault="Of a small and a large set of one cost the large one is taken.",
        path=_SEARCH,
        old="is_better_f = best_f < best_F[open_f]",
        new="is_better_f = best_f <= best_F[open_f]",
        tests=(_TEST_TIES,),
    ),
    Mutation(
        name="cost_ties_to_the_last_set",
        fault="Of two sets of one size and cost the later one is taken.",
        path=_SEARCH,
        old="torch.arange(num_sets, device=cost_FS.device)).amin(1)\n    return best_F % num_sets,",
        new="torch.arange(num_sets, device=cost_FS.device).flip(0)).amin(1)\n"
        "    return num_sets - 1 - best_F % num_sets,",
        tests=(_TEST_TIES,),
    ),
    Mutation(
        name="c_search_ends_at_the_first_set",
        fault="The search takes the first set that explains the difference.",
        path=_C_SEARCH,
        old="search->best = cost + search->cost[i];",
        new="search->best = 0;",
        tests=(_TEST_C, _TEST_BRUTE, _SELF_CHECK),
    ),
    Mutation(
        name="c_candidates_lost_above_the_first_limit",
        fault="Values farther than a sixteenth are never considered.",
        path=_C_SEARCH,
        old="if (count >= ranking->most || limit > LAST_LIMIT) break;",
        new="break;",
        tests=(_TEST_C, _TEST_BRUTE, _SELF_CHECK),
    ),
)

GATE = (
    Mutation(
        name="band_ignored",
        fault="Every recorded decision is followed, however far the value is.",
        path=_CELLS,
        old="return torch.where(is_near_NK, code_NK, nearest_code_NK)",
        new="return code_NK",
        tests=(_TEST_PROMISE + "test_no_value_outside_the_band_moves",),
    ),
    Mutation(
        name="band_ignored_by_syndromes",
        fault="The search considers every plausible value, whatever the band is.",
        path=_DECODING,
        old="PLAUSIBLE_DISTANCE if guide.band is None else guide.band",
        new="PLAUSIBLE_DISTANCE",
        tests=(_TEST_PROMISE + "test_no_value_outside_the_band_moves", _TEST_BRUTE),
    ),
    Mutation(
        name="two_bits_take_the_smaller_code",
        fault="Of r and r + 4 the nearer one by value is taken, not by cell.",
        path=_DECODING,
        old="[1.0, 1.625, 2.375, 3.375]",
        new="[1.0, 1.75, 2.5, 3.75]",
        tests=(
            "tests/ops/test_decoding.py::test_two_bits_equal_a_search_over_15_codewords_on_every_boundary",
        ),
    ),
    Mutation(
        name="bad_block_disturbs_the_search",
        fault="A block of the code that holds NaN is searched as if its bits were known.",
        path=_DECODING,
        old="is_searched_NC = differs_NC & is_known_NC",
        new="is_searched_NC = differs_NC",
        tests=(_TEST_PROMISE + "test_spc_1_a_bad_block_disturbs_only_the_blocks_of_the_code_that_hold_it",),
    ),
    Mutation(
        name="c_band_ignored",
        fault="The kernel follows every decision.",
        path=_C_SEGMENTS,
        old="(cell_distance(z, m, asked) <= band) & is_guided",
        new="is_guided",
        tests=(_TEST_PROMISE + "test_no_value_outside_the_band_moves", _SELF_CHECK),
    ),
    Mutation(
        name="c_unusable_blocks_are_candidates",
        fault="Values under a scale of 0 are flipped.",
        path=_C_SEGMENTS,
        old="segment->z[at + g * scheme->block + j] = -INFINITY;",
        new="segment->z[at + g * scheme->block + j] = 0.0f;",
        tests=(_TEST_C, _TEST_BRUTE, _SELF_CHECK),
    ),
    Mutation(
        name="c_syndromes_of_the_first_segment",
        fault="Every segment of a long row reads the syndromes of the first.",
        path=_C_SEGMENTS,
        old="at / length * code->num_bits, block,",
        new="0, block,",
        tests=("tests/ops/test_compiled_guides.py::test_long_rows", _SELF_CHECK),
    ),
)

COSETS = (
    Mutation(
        name="coset_nearest_to_the_own_byte",
        fault="The byte nearest to the own one is taken instead of that nearest to the unrounded scale.",
        path=_SCALES,
        old="is_upper_NG, top = unrounded_NG > _middle(lower_NG, lower_NG + step), _E4M3_MAX_BYTE",
        new="is_upper_NG, top = 2 * own_NG > 2 * lower_NG + step, _E4M3_MAX_BYTE",
        tests=(
            _TEST_PROMISE + "test_cosets_are_decoded_by_the_unrounded_scale_not_by_the_own_byte",
            _TEST_BRUTE,
        ),
    ),
    Mutation(
        name="coset_under_a_floor",
        fault="The raw scale of a tiny or all-zero block decides, not the byte that the scheme stores for it.",
        path=_SCALES,
        old="torch.where(is_rounded_NG, raw_NG, decode_e4m3(own_NG))",
        new="raw_NG",
        tests=(_TEST_PROMISE + "test_scales_that_a_scheme_stores_instead_of_the_rounded_one_are_recovered",),
    ),
    Mutation(
        name="coset_of_exponents_by_their_lower_ends",
        fault="An exponent is compared with the lower end of its interval instead of the middle.",
        path=_SCALES,
        old="(2 * lower_NG.to(torch.int64) + step + 1)",
        new="(2 * lower_NG.to(torch.int64) + step)",
        tests=(_TEST_PROMISE + "test_cosets_of_e8m0_recover_a_neighbouring_exponent", _TEST_OWN),
    ),
    Mutation(
        name="four_over_six_by_cosets",
        fault="Low bits of competing scales are decoded as if there were one.",
        path=_SCALES,
        old="if scheme.candidates is not Candidates.SIX:",
        new="if scheme.candidates is None:",
        tests=(_TEST_PROMISE + "test_refusals",),
    ),
    Mutation(
        name="bad_block_of_scales_no_erasure",
        fault="The unknown bit of a block with NaN counts as known.",
        path=_SCALES,
        old="is_candidate_NG |= ~finite_NG",
        new="is_candidate_NG &= finite_NG",
        tests=(_TEST_PROMISE + "test_a_bad_block_of_scales_is_an_erasure",),
    ),
    Mutation(
        name="c_coset_above_the_largest_byte",
        fault="The byte 0x7F, NaN, is decoded for the low bits 3.",
        path=_C_SCALE_CELLS,
        old="(is_above && upper <= top) || lower < 0",
        new="(is_above && upper <= top + 1) || lower < 0",
        tests=(
            "tests/ops/test_compiled_guides.py::test_random_syndromes_and_bits_of_random_rows",
            _SELF_CHECK,
        ),
    ),
    Mutation(
        name="c_scales_of_the_first_row",
        fault="Every row decodes the scales that were recorded for the first.",
        path=_FOLDER + "kernel.c",
        old="recorded_scales + row * scale_width",
        new="recorded_scales",
        tests=(_TEST_C, _SELF_CHECK),
    ),
)

MUTATIONS = (*SYNDROMES, *SEARCH, *GATE, *COSETS)
