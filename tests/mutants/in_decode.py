"""Faults in the kernels around the experts and the cache: norm, rotation, gate, routing, sampling."""

from tests.mutants.mutation import Mutation

_OPS = "src/tracefp4/ops/"
_SAMPLE = "tests/ops/test_sample_device.py::"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="sample_one_tie_too_many",
        fault="A cut keeps one more of the tokens that tie at it.",
        path=_OPS + "sample/draw.cu",
        old="rank++ < cut.ties",
        new="rank++ <= cut.ties",
        tests=(_SAMPLE + "test_ties_at_a_cut_keep_the_lowest_ids",),
    ),
    Mutation(
        name="sample_zeros_of_two_signs",
        fault="-0 ranks below +0.",
        path=_OPS + "bf16_keys.cuh",
        old="    if ((bits & 0x7FFF) == 0) bits = 0;\n",
        new="",
        tests=(_SAMPLE + "test_ties_at_a_cut_keep_the_lowest_ids",),
    ),
    Mutation(
        name="sample_only_the_first_window",
        fault="A cut that lies below the first window of keys is not looked for.",
        path=_OPS + "sample/draw.cu",
        old="        high = next;\n",
        new="        high = -1;\n",
        tests=(_SAMPLE + "test_cuts_far_below_the_largest_logit",),
    ),
    Mutation(
        name="sample_greedy_rows_are_cut_by_top_p",
        fault="The log-probability of a greedy token is that of the nucleus.",
        path=_OPS + "sample/draw.cu",
        old="if (!is_greedy && top_p < 1.0)",
        new="if (top_p < 1.0)",
        tests=(_SAMPLE + "test_draws_are_those_of_the_reference",),
    ),
    Mutation(
        name="sample_stage_is_read_before_it_is_there",
        fault="One stage fewer is awaited than is read.",
        path=_OPS + "sample/head.cu",
        old="await_copies<STAGES - 2>();",
        new="await_copies<STAGES - 1>();",
        tests=(_SAMPLE + "test_logits_are_rounded_once_and_tiles_are_weighed",),
    ),
    Mutation(
        name="sample_weights_beyond_the_vocabulary",
        fault="Where a library multiplied, what lies beyond the vocabulary is weighed, too.",
        path=_OPS + "sample/head.cu",
        old="if (left < 8 && tile < num_tiles) own",
        new="if (left < 0 && tile < num_tiles) own",
        tests=(_SAMPLE + "test_weights_do_not_depend_on_who_multiplied",),
    ),
    Mutation(
        name="sample_logits_over_a_stage_in_use",
        fault="Logits go to shared memory while another warp still multiplies the stage that lies there.",
        path=_OPS + "sample/head.cu",
        old="    await_copies<0>();\n    __syncthreads();\n",
        new="    await_copies<0>();\n",
        tests=(_SAMPLE + "test_from_hidden_states_to_tokens",),
    ),
    Mutation(
        name="sample_sums_overwritten_while_read",
        fault="The next sums of the warps are written before the last ones have been read.",
        path=_OPS + "sample/draw.cu",
        old="    __syncthreads(); /* the last sums have been read */\n",
        new="",
        tests=(_SAMPLE + "test_a_vocabulary_with_more_tiles_than_a_warp_has_threads",),
    ),
    Mutation(
        name="norm_is_rounded_once",
        fault="The normed row is not rounded before it is weighted.",
        path=_OPS + "norms.cuh",
        old="    uint32_t x = bf16x2_of(low_bf16(pair) * factor, high_bf16(pair) * factor);\n"
        "    return bf16x2_of(low_bf16(x) * low_bf16(weight), high_bf16(x) * high_bf16(weight));\n",
        new="    return bf16x2_of(low_bf16(pair) * factor * low_bf16(weight),\n"
        "                     high_bf16(pair) * factor * high_bf16(weight));\n",
        tests=("tests/ops/test_rms_norm.py::test_bytes_are_those_of_the_reference",),
    ),
    Mutation(
        name="norm_sums_read_before_they_are_there",
        fault="The sums of the warps are read without a barrier after they were written.",
        path=_OPS + "rms_norm/kernel.cu",
        old="    __syncthreads();\n    mine = 0.0;",
        new="    mine = 0.0;",
        tests=("tests/ops/test_rms_norm.py::test_bytes_are_those_of_the_reference",),
    ),
    Mutation(
        name="rows_only_the_last_part_has_a_maximum",
        fault="The outer scale of a wide row comes from the last elements of each thread.",
        path=_OPS + "bf16_rows.cuh",
        old="largest = most(largest, of_sixteen < INF_BITS ? of_sixteen : 0)",
        new="largest = of_sixteen < INF_BITS ? of_sixteen : 0",
        tests=("tests/ops/test_rms_norm.py::test_a_wide_row_takes_several_blocks_of_a_thread",),
    ),
    Mutation(
        name="rotary_turns_both_halves_one_way",
        fault="The lower half takes the upper one without its sign.",
        path=_OPS + "rotary/kernel.cu",
        old="y ^ 0x80008000u",
        new="y",
        tests=("tests/ops/test_rotary.py::test_bytes_are_those_of_the_reference",),
    ),
    Mutation(
        name="gate_is_not_rounded",
        fault="silu is multiplied before it is rounded to bf16.",
        path=_OPS + "swiglu/kernel.cu",
        old="    uint32_t open = bf16x2_of(silu(low_bf16(gate)), silu(high_bf16(gate)));\n"
        "    return bf16x2_of(low_bf16(open) * low_bf16(up), high_bf16(open) * high_bf16(up));\n",
        new="    return bf16x2_of(silu(low_bf16(gate)) * low_bf16(up), silu(high_bf16(gate)) * high_bf16(up));\n",
        tests=("tests/ops/test_swiglu.py::test_values_and_bytes",),
    ),
    Mutation(
        name="route_ties_go_to_the_highest_id",
        fault="Among equal logits the last expert is chosen.",
        path=_OPS + "route/kernel.cu",
        old="candidate[i] > best ? candidate[i] : best;",
        new="candidate[i] >> 16 >= best >> 16 ? candidate[i] : best;",
        tests=("tests/ops/test_route.py::test_ids_and_weights",),
    ),
)
