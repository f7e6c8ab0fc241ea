"""Faults in guidance: stored bytes, logs, replay, noise, the gate, the choice of codecs, plans and their sizes."""

from tests.mutants.mutation import Mutation

_SRC = "src/tracefp4/"
_CODEC = _SRC + "coding/codec.py"
_SYNDROME = _SRC + "coding/syndrome.py"
_ROUTING = _SRC + "coding/routing.py"
_PAYLOAD = _SRC + "guidance/payload.py"
_SITE_RECORD = _SRC + "guidance/site_record.py"
_GATHER = _SRC + "guidance/gather.py"
_BUILDER = _SRC + "guidance/builder.py"
_REPLAY = _SRC + "guidance/replay.py"
_NOISE = _SRC + "guidance/noise.py"
_GATE = _SRC + "guidance/gate.py"
_RATES = _SRC + "guidance/rates.py"
_PLAN = _SRC + "patching/plan.py"
_BUDGET = _SRC + "patching/budget.py"
_TEST = "tests/guidance/"

CODES = (
    Mutation(
        name="bch_powers_are_consecutive",
        fault="Columns hold a^j, a^2j, a^3j: even powers say nothing new, and t differences collide.",
        path=_SYNDROME,
        old="powers[(2 * i + 1) * j % order]",
        new="powers[(i + 1) * j % order]",
        tests=("tests/coding/test_syndrome.py::test_bch_columns_hold_the_odd_powers_of_one_element",),
    ),
    Mutation(
        name="bch_without_its_parity_bit",
        fault="Distance 2t + 1 in place of 2t + 2.",
        path=_SYNDROME,
        old="        column = 1\n",
        new="        column = 1 if j else 0\n",
        tests=("tests/coding/test_syndrome.py::test_bch_columns_as_bytes",),
    ),
    Mutation(
        name="polynomial_that_is_not_primitive",
        fault="x^6 + x^3 + 1 generates 9 of 63 elements.",
        path=_SYNDROME,
        old="6: 0x43",
        new="6: 0x49",
        tests=("tests/coding/test_syndrome.py::test_the_polynomials_are_primitive",),
    ),
    Mutation(
        name="rows_lose_their_last_byte",
        fault="The last values of a row are not paid for.",
        path=_CODEC,
        old="return -(-width * _VALUE_BITS[self.payload] // 8)",
        new="return width * _VALUE_BITS[self.payload] // 8 - 1",
        tests=(
            "tests/coding/test_codec.py::test_a_row_takes_its_rate_and_less_than_a_block_of_each_code_and_two_bytes_more",
        ),
    ),
    Mutation(
        name="syndromes_keep_raw_scales",
        fault="Eight bits a block where the name promises two.",
        path=_CODEC,
        old='"raw" if is_plain else "coset2"',
        new='"raw"',
        tests=("tests/coding/test_codec.py::test_names_say_what_is_kept_and_at_which_rate",),
    ),
)

BYTES = (
    Mutation(
        name="two_low_bits_in_the_other_order",
        fault="Value 4j + 1 in the bits of value 4j + 2.",
        path=_SRC + "formats/packing.py",
        old="four[..., 1] << 2 | four[..., 2] << 4",
        new="four[..., 1] << 4 | four[..., 2] << 2",
        tests=(_TEST + "test_payload.py::test_golden_bytes",),
    ),
    Mutation(
        name="scale_syndromes_under_the_code_of_the_codes",
        fault="Scales are encoded by the payload's code.",
        path=_PAYLOAD,
        old="return encode_syndromes(block_scales, code=codec.scale_code)",
        new="return encode_syndromes(block_scales, code=codec.code or codec.scale_code)",
        tests=(_TEST + "test_payload.py::test_every_codec_stores_the_bytes_that_its_layout_says",),
    ),
    Mutation(
        name="low_bits_announced_as_one",
        fault="Two recorded bits are read as one.",
        path=_PAYLOAD,
        old="num_bits=1 if num_bits is None else num_bits,",
        new="num_bits=1,",
        tests=(_TEST + "test_payload.py::test_every_codec_stores_the_bytes_that_its_layout_says",),
    ),
    Mutation(
        name="recoding_keeps_raw_scales",
        fault="Only the payload is recoded.",
        path=_SITE_RECORD,
        old="block_scales=encode_block_scales(self.block_scales, codec=target),",
        new="block_scales=self.block_scales,",
        tests=(_TEST + "test_record.py::test_a_full_record_becomes_any_codec_and_no_other_record_does",),
    ),
    Mutation(
        name="codes_with_coset_scales_pass_as_whole",
        fault="full+coset2 is taken as a reference, its low bits as scale bytes.",
        path=_SITE_RECORD,
        old="return codec.payload is Payload.FULL and codec.scale_coding is ScaleCoding.RAW",
        new="return codec.payload is Payload.FULL",
        tests=(_TEST + "test_record.py::test_whole_codes_are_only_read_where_all_was_kept",),
    ),
    Mutation(
        name="compacted_records_share_memory",
        fault="A kept piece holds the arrays of the whole batch.",
        path=_SITE_RECORD,
        old="            payload=self.payload.clone(),\n",
        new="            payload=self.payload,\n",
        tests=(_TEST + "test_record.py::test_res_1_a_compacted_part_owns_its_bytes_and_a_view_does_not",),
    ),
    Mutation(
        name="logs_encode_every_site_whole",
        fault="Codecs are ignored while observing.",
        path=_BUILDER,
        old="codec_by_name(names.get(site, FULL))",
        new="codec_by_name(FULL)",
        tests=(_TEST + "test_builder.py::test_a_log_that_encodes_builds_what_recoding_a_whole_record_gives",),
    ),
    Mutation(
        name="expert_ids_wrap_unseen",
        fault="Expert 256 becomes expert 0 in its byte.",
        path=_BUILDER,
        old="(steps[-1] != expert_ids).any()",
        new="(steps[-1] < 0).any()",
        tests=(
            _TEST + "test_rounding.py::test_dty_3_ids_that_a_byte_cannot_hold_are_refused_before_they_wrap",
        ),
    ),
    Mutation(
        name="ids_of_257_experts_take_a_byte",
        fault="The last expert has the id of the first.",
        path=_ROUTING,
        old="num_experts <= 256",
        new="num_experts <= 257",
        tests=(_TEST + "test_rounding.py::test_dty_3_large_expert_ids_survive_and_absent_rows_are_no_id",),
    ),
)

FOLLOWING = (
    Mutation(
        name="bands_do_not_reach_the_guide",
        fault="The gate is calibrated and not used.",
        path=_REPLAY,
        old="band=self.band(site),",
        new="band=None,",
        tests=(_TEST + "test_gate.py::test_a_value_that_really_moved_is_seen_to_move",),
    ),
    Mutation(
        name="references_of_any_rules",
        fault="Agreement compares codes of two schemes or plans.",
        path=_REPLAY,
        old="references=self.references or ()",
        new="references=()",
        tests=(_TEST + "test_replay.py::test_records_that_do_not_belong_together_raise",),
    ),
    Mutation(
        name="changed_values_among_all_values",
        fault="Samples without a record make the changed share smaller.",
        path=_SRC + "rl/following.py",
        old="found.values // found.positions * found.positions_guided",
        new="found.values",
        tests=("tests/rl/test_trainer.py::test_the_share_of_values_changed_is_of_those_with_a_record",),
    ),
    Mutation(
        name="syndrome_blocks_of_places_without_a_record",
        fault="Padding and missing rows are counted as decoded.",
        path=_REPLAY,
        old="return found.num_places * part.rows_per_token * blocks",
        new="return self.num_places * part.rows_per_token * blocks",
        tests=(_TEST + "test_replay.py::test_syndrome_blocks_are_those_of_guided_rows",),
    ),
    Mutation(
        name="noise_counts_padding",
        fault="Rows that the reference does not cover are compared.",
        path=_NOISE,
        old="counted = reference.valid[:, None].expand_as(bins)",
        new="counted = torch.ones_like(bins, dtype=torch.bool)",
        tests=(_TEST + "test_noise.py::test_what_replay_counts_is_what_a_loop_over_the_values_counts",),
    ),
    Mutation(
        name="bins_exclude_their_upper_edge",
        fault="A band read off the bins no longer holds the values on it.",
        path=_NOISE,
        old="(distance.contiguous().view(torch.int32) - 1) >> _BIN_SHIFT",
        new="distance.contiguous().view(torch.int32) >> _BIN_SHIFT",
        tests=(_TEST + "test_noise.py::test_values_fall_into_the_bin_of_their_distance_edges_included",),
    ),
    Mutation(
        name="sites_borrow_from_other_kinds",
        fault="Noise of the values of attention decides for expert inputs.",
        path=_GATE,
        old="for other, found in self.histograms.items() if other.kind == site.kind}",
        new="for other, found in self.histograms.items()}",
        tests=(
            _TEST + "test_gate.py::test_a_site_with_few_disagreements_borrows_from_its_kind_layer_by_layer",
        ),
    ),
    Mutation(
        name="old_noise_never_fades",
        fault="Momentum is ignored.",
        path=_GATE,
        old=".weighted(momentum, plus=found)",
        new=".weighted(1.0, plus=found)",
        tests=(_TEST + "test_gate.py::test_refreshing_fades_the_old_and_keeps_what_was_not_measured",),
    ),
    Mutation(
        name="residuals_take_scales_as_known",
        fault="A right code under a wrong scale counts as right.",
        path=_RATES,
        old="is_wrong |= is_mismatched(rounded.codes, codes)",
        new="is_wrong = is_mismatched(rounded.codes, codes)",
        tests=(_TEST + "test_rates.py::test_a_prediction_is_what_following_that_codec_leaves_wrong",),
    ),
    Mutation(
        name="residuals_forget_the_gate",
        fault="Codecs are judged without the band that training uses.",
        path=_RATES,
        old="            band=rule.band,\n",
        new="            band=None,\n",
        tests=(_TEST + "test_rates.py::test_a_prediction_is_what_following_that_codec_leaves_wrong",),
    ),
    Mutation(
        name="the_best_codec_in_place_of_the_cheapest",
        fault="Every site gets the largest codec.",
        path=_RATES,
        old="key=lambda name: (prices[name], found[name], name))",
        new="key=lambda name: (found[name], prices[name], name))",
        tests=(_TEST + "test_rates.py::test_the_cheapest_codec_within_its_allowance_is_chosen",),
    ),
)

_DAMAGED = _TEST + "test_damaged.py::"

DAMAGED = (
    Mutation(
        name="damaged_scales_reach_the_kernels",
        fault="A kernel traps on a recorded byte that no scheme stores, and the CUDA context is lost.",
        path=_GATHER,
        old="        self._check_scales(part, valid)\n",
        new="",
        tests=(_DAMAGED + "test_damage_that_would_be_followed_is_refused_before_anything_is_moved",),
    ),
    Mutation(
        name="damage_of_other_rows_is_refused",
        fault="A run ends over bytes that nothing follows.",
        path=_GATHER,
        old="(part.damaged_rows() & valid).any()",
        new="part.damaged_rows().any()",
        tests=(_DAMAGED + "test_damage_that_nothing_follows_changes_nothing",),
    ),
    Mutation(
        name="low_bits_taken_for_scale_bytes",
        fault="Two bits of four blocks in a byte are refused as a negative scale.",
        path=_SITE_RECORD,
        old="        if is_raw and self.block_size == NVFP4.block_size:",
        new="        if self.block_size == NVFP4.block_size:",
        tests=(_DAMAGED + "test_low_bits_and_syndromes_of_scales_can_all_be_meant",),
    ),
    Mutation(
        name="e8m0_bytes_taken_for_e4m3",
        fault="Scales of 2 and more are refused as negative ones.",
        path=_SITE_RECORD,
        old="        if is_raw and self.block_size == NVFP4.block_size:",
        new="        if is_raw:",
        tests=(_DAMAGED + "test_every_e8m0_byte_can_be_meant",),
    ),
    Mutation(
        name="damaged_rows_counted_as_positions",
        fault="The damage of a token with several rows is sought elsewhere.",
        path=_SRC + "guidance/record.py",
        old="{self.start + row // part.rows_per_token}, {site}",
        new="{self.start + row}, {site}",
        tests=(_DAMAGED + "test_damage_that_would_be_followed_is_refused_before_anything_is_moved",),
    ),
    Mutation(
        name="damaged_codes_written_into_pages",
        fault="Later tokens read K and V under a negative scale.",
        path=_SRC + "rollout/recorder.py",
        old='        record.check_scales(kinds=("k", "v"), only_valid=False)\n',
        new="",
        tests=("tests/rollout/test_turns.py::test_what_cannot_go_on_is_refused_before_anything_is_queued",),
    ),
)

PLANS = (
    Mutation(
        name="chosen_codecs_outside_the_digest",
        fault="Records of one choice pass for another's.",
        path=_PLAN,
        old="if plan.rules.guidance == AUTO and plan.codecs:",
        new="if plan.rules.guidance == AUTO and not plan.codecs:",
        tests=(
            "tests/patching/test_plan.py::test_codecs_chosen_by_a_calibration_are_part_of_the_plan_and_its_digest",
        ),
    ),
    Mutation(
        name="rows_of_w2_weighed_as_one",
        fault="Padding of every expert's row is not paid for.",
        path=_BUDGET,
        old="stored = site.rows * codec_bytes(site.width, codec, block=site.block)",
        new="stored = codec_bytes(site.rows * site.width, codec, block=site.block)",
        tests=("tests/patching/test_shapes.py::test_rows_of_the_down_projection_are_padded_one_by_one",),
    ),
    Mutation(
        name="samples_keep_experts_that_nobody_follows",
        fault="Ids are held and sent that plan does not count.",
        path=_SRC + "rl/loop.py",
        old="keeps_routing=run.applied.plan.rules.replay_routing",
        new="keeps_routing=True",
        tests=("tests/rl/test_rollouts.py::test_samples_keep_the_bytes_that_plan_counts",),
    ),
)

MUTATIONS = CODES + BYTES + FOLLOWING + DAMAGED + PLANS
