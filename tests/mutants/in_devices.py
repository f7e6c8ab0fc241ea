"""Faults in kernels for GPUs, which the emulation of CUDA must show."""

from tests.mutants.mutation import Mutation

_QUANTIZE = "src/tracefp4/ops/quantize/kernel.cu"
_BLOCKS = "src/tracefp4/ops/blocks.cuh"
_FOLDER = "src/tracefp4/ops/guided_quantize/"
_TESTS = "tests/ops/test_quantize_device.py::test_bytes_are_those_of_the_reference"
_DEQUANTIZE = "tests/ops/test_dequantize_device.py::"
_GUIDED = "tests/ops/test_guided_quantize_device.py::"
_FIRST_USE = "tests/ops/test_device.py::"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="device_maxima_read_before_they_are_there",
        fault="The maxima of the warps are read without a barrier after they were written.",
        path=_BLOCKS,
        old="    __syncthreads();\n    int lane = (int)threadIdx.x % WARP, num_warps",
        new="    int lane = (int)threadIdx.x % WARP, num_warps",
        tests=(_TESTS,),
    ),
    Mutation(
        name="device_outer_scale_of_the_last_block",
        fault="Of the blocks that a thread holds only the last one counts for the outer scale of the row.",
        path=_QUANTIZE,
        old="largest = most(largest, finite_amax(values[p]))",
        new="largest = finite_amax(values[p])",
        tests=("tests/ops/test_quantize_device.py::test_bytes_where_rows_are_many",),
    ),
    Mutation(
        name="device_first_block_for_all",
        fault="A thread with several blocks of a wide row encodes its first one again.",
        path=_QUANTIZE,
        old="store_block(encode(load_block(x, first + b), x, first + b, scale, nullptr)",
        new="store_block(encode(values[0], x, first + b, scale, nullptr)",
        tests=(_TESTS,),
    ),
    Mutation(
        name="device_quotients_by_one_factor",
        fault="The reciprocal of a scale has 8 bits, which takes numbers next to a midpoint across it.",
        path=_BLOCKS,
        old="fma_bf16x2(z, grid.first, mul_bf16x2(z, grid.rest))",
        new="mul_bf16x2(z, grid.first)",
        tests=("tests/ops/test_quantize_device.py::test_every_bf16_number_under_every_scale",),
    ),
    Mutation(
        name="device_halves_of_cells_not_cut",
        fault="An edge between cells that is no bf16 number is rounded up to one.",
        path=_FOLDER + "kernel.cu",
        old="twice(bits_of(scale * odd[i]) >> 16)",
        new="twice(bf16_bits(scale * odd[i]) | 1)",
        tests=(_GUIDED + "test_every_bf16_number_follows",),
    ),
    Mutation(
        name="device_tail_of_the_grid",
        fault="Threads beyond the last block write.",
        path=_QUANTIZE,
        old="    if (block >= num_blocks) return;\n",
        new="",
        tests=("tests/ops/test_quantize_device.py::test_nothing_is_written_beyond_the_end",),
    ),
    Mutation(
        name="device_cache_believed",
        fault="Kept machine code is used whatever its digest.",
        path="src/tracefp4/ops/nvrtc.py",
        old="if digest_of(path) == path.stem:",
        new="if path.stem:",
        tests=("tests/ops/test_quantize_device.py::test_the_file_compiles_for",),
    ),
    Mutation(
        name="device_kernels_not_compared",
        fault="A kernel that no comparison has launched runs on a GPU.",
        path="src/tracefp4/ops/device.py",
        old="    if not _is_comparing.get():\n",
        new="    if False:\n",
        tests=(_FIRST_USE + "test_a_kernel_that_was_not_compared_does_not_run",),
    ),
    Mutation(
        name="device_one_verdict_for_all_cases",
        fault="What the first case of an op gave is believed of all others.",
        path="src/tracefp4/ops/device.py",
        old="key = (device, self._usual if case is None else case)",
        new="key = (device, self._usual)",
        tests=(_FIRST_USE + "test_a_case_that_differs_is_refused_alone_and_logged_once",),
    ),
    Mutation(
        name="device_compared_during_capture",
        fault="A comparison is recorded into a CUDA graph.",
        path="src/tracefp4/ops/device.py",
        old="if torch.cuda.is_current_stream_capturing():",
        new="if False:",
        tests=(_FIRST_USE + "test_nothing_is_compared_during_capture",),
    ),
    Mutation(
        name="device_case_without_the_cut",
        fault="The check of an expert layer cuts its products as a narrower layer does.",
        path="src/tracefp4/ops/expert_layer/device.py",
        old="if _cut(tiling, n) == cut)",
        new="if n)",
        tests=(_FIRST_USE + "test_a_check_launches_what_the_expert_layer_launches",),
    ),
    Mutation(
        name="device_signs_in_the_other_order",
        fault="The second code of a pair takes the sign of the fourth.",
        path="src/tracefp4/ops/decoding.cuh",
        old="four << 24 & 0x80000000",
        new="four << 16 & 0x80000000",
        tests=(_DEQUANTIZE + "test_every_code_under_every_scale",),
    ),
    Mutation(
        name="device_syndrome_of_a_short_block_reads_on",
        fault="The last block of a row takes bits beyond the row.",
        path="src/tracefp4/ops/syndromes.cuh",
        old="        if (n - from < PIECE) piece &= (1u << (n - from)) - 1;\n",
        new="",
        tests=("tests/ops/test_syndromes_device.py::test_bytes_are_those_of_the_reference",),
    ),
    Mutation(
        name="device_rows_of_a_warp_share_a_maximum",
        fault="Short rows of one warp take the outer scale of the largest of them.",
        path=_FOLDER + "rows.cuh",
        old="for (int with = place.threads / 2;",
        new="for (int with = WARP / 2;",
        tests=(_GUIDED + "test_without_a_guide",),
    ),
    Mutation(
        name="device_flips_before_values_are_there",
        fault="Syndromes are compared before all threads of a row have rounded.",
        path=_FOLDER + "kernel.cu",
        old="num_blocks = width / BLOCK;\n    __syncthreads();",
        new="num_blocks = width / BLOCK;",
        tests=(_GUIDED + "test_guides_of_every_kind",),
    ),
    Mutation(
        name="device_search_keeps_the_cost_of_what_it_dropped",
        fault="A set of flips counts candidates that were tried before it.",
        path=_FOLDER + "search.cuh",
        old="chosen.cost - ranking->cost[i], chosen.ranks >> RANK_BITS",
        new="chosen.cost, chosen.ranks >> RANK_BITS",
        tests=(_GUIDED + "test_the_cheapest_of_several_sets_of_flips",),
    ),
    Mutation(
        name="device_cost_ties_to_the_last_set",
        fault="Of two sets of one cost that the lanes of a warp find together the later one is taken.",
        path=_FOLDER + "search.cuh",
        old="if (theirs >= best->cost) continue;",
        new="if (theirs > best->cost) continue;",
        tests=(_GUIDED + "test_of_two_sets_of_one_cost_the_smaller_one_and_then_the_first_is_flipped",),
    ),
    Mutation(
        name="device_unknown_bits_are_searched",
        fault="A block of a syndrome that touches NaN is explained by flips of other values.",
        path=_FOLDER + "kernel.cu",
        old="if (__all_sync(FULL_MASK, is_known)) flips",
        new="flips",
        tests=(_GUIDED + "test_guides_of_every_kind",),
    ),
    Mutation(
        name="device_scales_kept_one_bit_apart",
        fault="The two low bits of a scale overlap those of the next.",
        path=_FOLDER + "recording.cu",
        old="<< j * kept;",
        new="<< j;",
        tests=("tests/ops/test_recorded_quantize.py::test_one_pass_keeps_the_same_bytes",),
    ),
)
