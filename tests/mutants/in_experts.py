"""Faults in the kernels of the expert layer and in the order of its weights."""

from tests.mutants.mutation import Mutation

_LAYER = "src/tracefp4/ops/expert_layer/"
_DEVICE = "tests/ops/test_expert_layer_device.py::"
_STEPS = (_DEVICE + "test_every_step_is_that_of_the_definition",)
_EXACT = (_DEVICE + "test_every_code_under_every_scale_is_exact",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="experts_scale_of_the_wrong_row",
        fault="The two scales of a lane go to the halves of K instead of to rows g and g + 8.",
        path=_LAYER + "fragments.cuh",
        old="scale[p % 2]",
        new="scale[p / 2]",
        tests=_EXACT,
    ),
    Mutation(
        name="experts_nan_scale_is_a_number",
        fault="An E4M3 NaN among the weights' scales reads as 480.",
        path=_LAYER + "fragments.cuh",
        old="return byte == 0x7F ? twice(BF16_NAN) : s;",
        new="return s;",
        tests=(_DEVICE + "test_damage_stays_where_it_is_and_shows",),
    ),
    Mutation(
        name="experts_smallest_mx_scale_is_zero",
        fault="The E8M0 byte 0 reads as 0 instead of 2^-127, and 0xFF as infinity.",
        path=_LAYER + "fragments.cuh",
        old="(((byte + 1) & 0xFE) == 0 ? 0x40 : 0)",
        new="0u",
        tests=_EXACT,
    ),
    Mutation(
        name="experts_gate_not_rounded",
        fault="silu reads the float32 sum, not the bf16 that the trainer's matrix product writes.",
        path=_LAYER + "fragments.cuh",
        old="float g = float_of(both << 16), u",
        new="float g = gate, u",
        tests=_STEPS,
    ),
    Mutation(
        name="experts_parts_overwritten_while_they_are_read",
        fault="The parts of the next token tile are written before all threads added those of this one.",
        path=_LAYER + "few.cu",
        old="        if (m) __syncthreads();\n",
        new="",
        tests=_STEPS,
    ),
    Mutation(
        name="experts_columns_of_another_group",
        fault="Activations are read at other columns than the weights that a warp has under way.",
        path=_LAYER + "few.cu",
        old="            int group = first + s * WARPS;",
        new="            int group = first + s;",
        tests=_STEPS,
    ),
    Mutation(
        name="experts_rows_of_the_next_pair",
        fault="A block whose last row tile is a repetition stores it, too.",
        path=_LAYER + "few.cu",
        old="                      if (row >= width) return;\n                      *reinterpret_cast",
        new="                      *reinterpret_cast",
        tests=(_DEVICE + "test_nothing_is_written_beyond_the_rows",),
    ),
    Mutation(
        name="experts_copies_not_awaited",
        fault="A group of columns is multiplied while its copies are still under way.",
        path=_LAYER + "many.cu",
        old="await_copies<STAGES - 2>();",
        new="await_copies<STAGES - 1>();",
        tests=_STEPS,
    ),
    Mutation(
        name="experts_stage_overwritten_while_it_is_read",
        fault="Copies into a stage begin before all warps have multiplied what it held.",
        path=_LAYER + "many.cu",
        old="__syncthreads(); /* this group is there for all, and nobody reads the stage of the one before it */",
        new="",
        tests=_STEPS,
    ),
    Mutation(
        name="experts_ring_filled_while_it_is_read",
        fault="Copies go on into a stage of the ring before all warps have multiplied what it held.",
        path=_LAYER + "piped.cu",
        old="            await_phase(ring.empty + ring.at, ring.digit ^ 1);\n",
        new="",
        tests=_STEPS,
    ),
    Mutation(
        name="experts_ring_announced_too_early",
        fault="A stage of the ring is said to be full while copies to it are under way.",
        path=_LAYER + "piped.cu",
        old="await_copies<AHEAD>();",
        new="await_copies<AHEAD + 1>();",
        tests=_STEPS,
    ),
    Mutation(
        name="experts_place_moves_before_it_is_read",
        fault="Where an expert's next pair goes is moved on while other lanes still read it.",
        path=_LAYER + "routes.cu",
        old="        __syncwarp(); /* all have read where their pairs go */\n",
        new="",
        tests=(_DEVICE + "test_lists_are_a_stable_sort",),
    ),
    Mutation(
        name="experts_impossible_ids_are_silent",
        fault="A token with an expert that does not exist gets whatever lay in memory.",
        path=_LAYER + "routes.cu",
        old="sum[i] = is_routed ? sum[i] : float_of(NAN_BITS)",
        new="sum[i] = sum[i]",
        tests=(_DEVICE + "test_damage_stays_where_it_is_and_shows",),
    ),
    Mutation(
        name="experts_refit_swaps_rows",
        fault="Refit writes row g + 8 where row g belongs.",
        path=_LAYER + "rows.cu",
        old="word[t] = spread(rows[0].word[half] >> up & 0xFFFF) | spread(rows[1].word",
        new="word[t] = spread(rows[1].word[half] >> up & 0xFFFF) | spread(rows[0].word",
        tests=(_DEVICE + "test_refit_gives_the_bytes_of_quantize",),
    ),
    Mutation(
        name="fragments_halves_of_k_swapped",
        fault="Columns 2 and 3 of a word lie where 1 and 2 belong, in the words.",
        path="src/tracefp4/formats/weight_fragments.py",
        old="codes.permute(0, 1, 4, 3, 5, 6, 8, 7, 2)",
        new="codes.permute(0, 1, 4, 3, 5, 6, 7, 8, 2)",
        tests=("tests/formats/test_weight_fragments.py::test_every_nibble_lies_where_the_layout_says",),
    ),
)
