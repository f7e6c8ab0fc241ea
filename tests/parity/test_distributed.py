"""Several ranks compute what one process computes: FSDP2, experts over ranks, a sequence over ranks.

Logits, decisions and counts are compared bit for bit in the control arithmetic; gradients are float64 sums whose order
depends on the number of ranks. What the ranks do is in `rank_passes`; here is the unsharded pass and the comparison.
"""

import json

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.tiny_models import tiny_model
from tests.parity.chains import VOCABULARY
from tests.parity.rank_checks import SPLIT_SCHEMES, STATIC, calibrated, continued, stepped, trained_batches
from tests.parity.rank_passes import (
    KINDS_OF_NUMBERS,
    LAYOUTS_OF_IDS,
    expert_module,
    gradients,
    guided_pass,
    half,
    num_tokens,
    padded_batch,
    setting,
    train,
)
from tests.parity.ranks import run_on_ranks

from tracefp4.formats import NVFP4_TENSOR_POW2
from tracefp4.guidance import ReplayBatch, Site
from tracefp4.guidance.session import replay
from tracefp4.ops.dequantize import dequantize
from tracefp4.ops.quantize import quantize
from tracefp4.rl.batching import token_logprobs
from tracefp4.rl.optimizer import MasterWeightAdamW

FUNCTIONS = (
    "fsdp",
    "fsdp_other_dimensions",
    "fsdp_checkpointing",
    "fsdp_stale_copies",
    "experts_same_tokens",
    "experts_own_tokens",
    "expert_modules",
    "context",
    "refusals",
    "transformers_plans",
    "maxima",
    "saved_by_ranks",
    "resumed_on_ranks",
    "document",
)
# relative to the largest gradient of a tensor: float64 sums over tokens in another order, through a few layers
SUMS = 1e-12
# float32 sums over a handful of rows in another order
SUMS_32 = 1e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(FUNCTIONS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def whole():
    """Two training steps of one process on the whole batch."""
    chain, samples, records = setting()
    batch = chain.batch(samples)
    return batch, train(chain, batch, records, denominator=num_tokens(samples))


def real_rows(part, mask):
    """Rows of real tokens, by sample and position; a site may have several rows per token."""
    return part.view(mask.numel(), -1, *part.shape[1:])[mask.reshape(-1)]


def assert_close(found, wanted, tolerance):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def assert_same_gradients(found, wanted, tolerance=SUMS):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        assert_close(found[name], gradient, tolerance)


def assert_halves_are_whole(parts, chain, samples, wanted, batch):
    """Each rank computed its half of the samples as the whole pass computed them."""
    masks = [chain.batch(half(samples, rank)).attention_mask for rank in range(2)]
    logits = torch.cat([part["logits"][mask] for part, mask in zip(parts, masks, strict=True)])
    assert_bitwise(logits, wanted["logits"][batch.attention_mask])
    assert len(wanted["seen"]) == 10
    for key, rows in wanted["seen"].items():
        found = [real_rows(part["seen"][key], mask) for part, mask in zip(parts, masks, strict=True)]
        assert_bitwise(torch.cat(found), real_rows(rows, batch.attention_mask))
    counts = wanted["counts"]
    assert counts.values_changed > 0 and counts.positions_guided > 0
    for name in ("values", "positions_guided", "positions_missing", "values_changed", "blocks_floored"):
        assert sum(getattr(part["counts"], name) for part in parts) == getattr(counts, name), name


def assert_trains_as_whole(parts, whole):
    chain, samples, _ = setting()
    batch, wanted = whole
    for step, expected in enumerate(wanted["steps"]):
        found = [part["steps"][step] for part in parts]
        assert_halves_are_whole(found, chain, samples, expected, batch)
        for part in found:
            assert_same_gradients(part["gradients"], expected["gradients"])
            assert part["norm"] == pytest.approx(expected["norm"], rel=SUMS)
    assert not torch.equal(wanted["steps"][0]["logits"], wanted["steps"][1]["logits"])
    for part in parts:
        for name, weight in wanted["weights"].items():
            assert_bitwise(part["weights"][name], weight)


def test_fsdp_trains_as_one_process(ranks, whole):
    # Mutations: the record's rows taken from the whole batch; a scale over the micro-batch; a copy of the FP4 weights
    # that outlives the optimizer's step.
    assert_trains_as_whole(ranks["fsdp"], whole)
    assert [part["quantized"] for part in ranks["fsdp"]] == [[4, 4]] * 2  # two matrices, two versions


def test_dst_1_fsdp_may_cut_inside_a_block_because_whole_matrices_are_quantized(ranks):
    # Mutation: quantizing the shard. 48 columns over two ranks are one and a half blocks each.
    chain, samples, records = setting(moe_intermediate_size=48)
    found = ranks["fsdp_other_dimensions"]
    assert {shape for part in found for name, shape in part["shapes"].items() if "down" in name} == {
        (8, 64, 24)
    }
    batch = chain.batch(samples)
    wanted = guided_pass(chain, batch, records, denominator=num_tokens(samples))
    assert_halves_are_whole(found, chain, samples, wanted, batch)


def test_rpl_1_fsdp_recomputes_activations_under_the_same_records(ranks, whole):
    # Mutation: decisions that are consumed.
    chain, samples, _ = setting()
    batch, wanted = whole
    assert_halves_are_whole(ranks["fsdp_checkpointing"], chain, samples, wanted["steps"][0], batch)
    for part in ranks["fsdp_checkpointing"]:
        assert_same_gradients(part["gradients"], wanted["steps"][0]["gradients"])
        # two matrices, forward and recomputation, nothing kept
        assert part["quantized"] == [4, 4] and part["copies"] == 0


def test_a_gathered_weight_is_never_served_by_a_stale_copy(ranks):
    # FSDP gathers into memory it has used before, and torch's version counter stands still. Mutation: a cache that
    # trusts version and address.
    for rounds in ranks["fsdp_stale_copies"]:
        for found in rounds:
            for copy, weight in zip(found["copies"], found["whole"], strict=True):
                assert_bitwise(
                    copy, dequantize(quantize(weight, scheme=NVFP4_TENSOR_POW2), dtype=weight.dtype)
                )
        assert {version for found in rounds for version in found["versions"]} == {0}
        # every round changes one matrix of each layer, and the other's copy serves again
        assert [found["quantized"] for found in rounds] == [[2, 2], [3, 3], [4, 4], [5, 5]]


def test_dst_3_dst_5_experts_over_ranks_decide_as_one_process(ranks, whole):
    # Mutations: local expert ids under a record of global ones; a rank's own maximum; w2 rounded before its rows are
    # back in (token, slot) order; the gradient of the tokens left at a rank's part.
    for part in ranks["experts_same_tokens"]:
        assert part["held"] == {(4, 64, 64), (4, 64, 32)}
        for found, expected in zip(part["steps"], whole[1]["steps"], strict=True):
            assert_bitwise(found["logits"], expected["logits"])
            for key, rows in expected["seen"].items():
                assert_bitwise(found["seen"][key], rows)
            assert found["counts"] == expected["counts"]
            assert_same_gradients(found["gradients"], expected["gradients"])
            assert found["norm"] == pytest.approx(expected["norm"], rel=SUMS)
        for name, weight in whole[1]["weights"].items():
            assert_bitwise(part["weights"][name], weight)


def test_dst_5_experts_over_ranks_with_their_own_batches_train_as_one_process(ranks, whole):
    # Mutations: rows returned in the order they were sent in; counts of the wrong rank; a clip by a rank's own norm.
    assert_trains_as_whole(ranks["experts_own_tokens"], whole)


@pytest.mark.parametrize("kind", KINDS_OF_NUMBERS)
@pytest.mark.parametrize("layout", LAYOUTS_OF_IDS)
@pytest.mark.parametrize("tokens", ["same", "own"])
def test_dst_4_dst_5_experts_over_ranks_whatever_they_receive(ranks, tokens, layout, kind):
    # Mutations: empty experts or ranks without rows; a sum over ranks in the forward, which float32 would show.
    ids = LAYOUTS_OF_IDS[layout]
    torch.manual_seed(1)
    wanted = expert_module(None, ids, 0, **KINDS_OF_NUMBERS[kind])
    found = [part[tokens, layout, kind] for part in ranks["expert_modules"]]
    tolerance = SUMS if kind == "float64" else SUMS_32
    for part in found:
        for name, gradient in wanted["gradients"].items():
            assert_close(part["gradients"][name], gradient, tolerance)
    if tokens == "own":
        joined = {name: torch.cat([part[name] for part in found]) for name in ("y", "x", "weights")}
        seen = {key: torch.cat([part["seen"][key] for part in found]) for key in wanted["seen"]}
        found = [{**joined, "seen": seen}]
    for part in found:
        assert_bitwise(part["y"], wanted["y"])
        assert_bitwise(part["weights"], wanted["weights"])
        assert_close(part["x"], wanted["x"], tolerance)
        for key, rows in wanted["seen"].items():
            assert_bitwise(part["seen"][key], rows)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_pad_5_a_sequence_over_ranks_follows_its_records(ranks, layout):
    # Mutations: the other layout's order; keys exchanged before rounding; a mask by column of the slice.
    chain, samples, records = setting()
    batch = padded_batch(chain, samples)
    wanted = guided_pass(chain, batch, records, denominator=num_tokens(samples))
    expected = gradients(chain.model)
    rows, columns = batch.positions.shape
    found = [part[layout] for part in ranks["context"]]
    for part in found:
        real = batch.attention_mask[:, part["columns"]]
        assert_bitwise(part["gathered"][batch.attention_mask], wanted["logits"][batch.attention_mask])
        for key, values in wanted["seen"].items():
            mine = values.view(rows, columns, -1, *values.shape[1:])[:, part["columns"]].flatten(0, 1)
            assert_bitwise(
                real_rows(part["seen"][key], real).flatten(0, 1),
                mine[real.reshape(-1)].reshape(-1, *values.shape[1:]),
            )
        assert_same_gradients(part["gradients"], expected)
        # two layers, K and V, 64 values a token: codes and block scales cross, nothing else
        places = rows * columns // 2
        assert part["exchanged"] == [(torch.uint8, 32 * places), (torch.uint8, 4 * places)] * 4
    for name in ("values", "positions_guided", "positions_missing", "values_changed", "blocks_floored"):
        assert sum(getattr(part["counts"], name) for part in found) == getattr(wanted["counts"], name), name


def test_parts_of_a_matrix_and_unknown_splits_are_refused(ranks):
    for found in ranks["refusals"]:
        assert all(message.startswith("ConfigError") for message in found.values()), found
        assert (
            "(Shard(dim=0),)" in found["sharded weight"]
            and "call the wrapped module" in found["sharded weight"]
        )
        assert "wrapped: True" in found["experts under fsdp"]
        assert "'some'" in found["tokens"]
        assert "(4, 64, 64)" in found["some experts"] and "(8, 64, 64)" in found["some experts"]


def test_dst_5_experts_that_transformers_sharded_decide_as_one_process(ranks, whole):
    # Mutations: transformers' exchange left in place, whose router makes ids local; parameters cast on their shards.
    expected = whole[1]["steps"][0]
    for part in ranks["transformers_plans"]:
        assert_bitwise(part["logits"], expected["logits"])
        for key, rows in expected["seen"].items():
            assert_bitwise(part["seen"][key], rows)
        assert_same_gradients(part["gradients"], expected["gradients"])
        refused = part["refused"]
        assert all(message.startswith("ConfigError") for message in refused.values())
        assert "q_proj.weight is sharded" in refused["tensor parallel"]
        assert "of torch.float64" in refused["other dtype"] and "in torch.float32" in refused["other dtype"]
        assert "(4, 64, 64)" in refused["too early"] and "shard_experts" in refused["too early"]


def test_dst_3_ranks_share_the_largest_maximum(ranks):
    # Mutation: a mean: 4 for 6 and 2.
    expected = calibrated(6.0, 3.0)
    for found in ranks["maxima"]:
        assert found["largest"] == 6.0
        assert found["digest"] == expected.digest != found["own digest"]
        assert found["exponents"] == expected.static_exponents
    assert expected.static_exponents[Site("k", 0)] != expected.static_exponents[Site("v", 0)]


@pytest.mark.parametrize("split", ["rows", "columns"])
@pytest.mark.parametrize("scheme", SPLIT_SCHEMES, ids=lambda scheme: scheme.name)
def test_dst_1_dst_3_ranks_quantize_parts_to_the_bytes_of_the_whole(ranks, scheme, split):
    x = torch.randn(2, 32, 464, generator=torch.Generator().manual_seed(5))
    x[0, 30, 450] = 90.0
    whole = quantize(x, scheme=scheme)
    first, second = (part["parts"][scheme.name, split] for part in ranks["maxima"])
    dim = {"rows": -2, "columns": -1}[split]
    assert_bitwise(torch.cat([first[0], second[0]], dim), whole.packed)
    assert_bitwise(torch.cat([first[1], second[1]], dim), whole.block_scales)
    if scheme.outer == "row" and split == "rows":
        assert_bitwise(torch.cat([first[2], second[2]], -1), whole.outer)
    else:
        assert_bitwise(first[2], whole.outer)
        assert_bitwise(second[2], whole.outer)


@pytest.fixture(scope="module")
def uninterrupted():
    """Three steps of one process under static scales: samples, records, the last pass, and what is left."""
    chain, samples, records = setting(rules=STATIC)
    optimizer = MasterWeightAdamW(chain.model, lr=0.01)
    batch = chain.batch(samples)
    passed = stepped(chain, batch, records, optimizer, denominator=num_tokens(samples), steps=3)
    weights = {name: weight.clone() for name, weight in chain.model.state_dict().items()}
    return chain, batch, records, passed, {"weights": weights, "state": optimizer.state_tensors()}


def assert_same_outcome(weights, state, wanted):
    for name, weight in wanted["weights"].items():
        assert_bitwise(weights[name], weight)
    assert state.keys() == wanted["state"].keys() and any(name.startswith("exp_avg_sq.") for name in state)
    for name, tensor in wanted["state"].items():
        assert_close(state[name], tensor, SUMS)


def test_ckp_3_a_checkpoint_of_one_process_goes_on_on_two_ranks(ranks, uninterrupted):
    # Mutations: exponents calibrated again; moments that stay behind; the whole of a tensor in every shard.
    chain, batch, _, passed, wanted = uninterrupted
    assert {site.kind for site in chain.plan.static_exponents} == {"x", "w2", "k", "v"}
    found = ranks["resumed_on_ranks"]
    masks = [chain.batch(half(setting(rules=STATIC)[1], rank)).attention_mask for rank in range(2)]
    logits = torch.cat([part["logits"][mask] for part, mask in zip(found, masks, strict=True)])
    assert_bitwise(logits, passed["logits"][batch.attention_mask])
    for part in found:
        assert part["digest"] == chain.plan.digest and part["shards"] == {"DTensor"}
        assert_same_outcome(part["weights"], part["state"], wanted)


def test_ckp_3_a_checkpoint_of_two_ranks_goes_on_in_one_process(ranks, uninterrupted):
    _, batch, records, passed, wanted = uninterrupted
    first, second = ranks["saved_by_ranks"]
    assert first["state"].keys() == second["state"].keys()
    for name, tensor in first["state"].items():
        assert_bitwise(second["state"][name], tensor)
    model = tiny_model(seed=9, vocab_size=VOCABULARY).double()
    again = continued(model, json.loads(first["plan"]))
    optimizer = MasterWeightAdamW(model, lr=0.01)
    optimizer.load_state_tensors(first["state"])
    third = stepped(again, batch, records, optimizer, denominator=int(batch.attention_mask.sum()), steps=1)
    assert_bitwise(third["logits"][batch.attention_mask], passed["logits"][batch.attention_mask])
    assert_same_outcome(model.state_dict(), optimizer.state_tensors(), wanted)


def test_the_documented_loop_trains_as_one_process(ranks):
    chain, batches, count = trained_batches()
    optimizer = MasterWeightAdamW(chain.model, lr=1e-2)
    for batch in batches:
        with replay(
            ReplayBatch(positions=batch.positions, records=batch.records, sites=chain.plan.guided_sites)
        ):
            logprobs = token_logprobs(
                chain.logits(batch), input_ids=batch.input_ids, mask=batch.completion_mask
            )
            loss = -(batch.advantages[:, None] * logprobs)[batch.loss_mask].sum() / count
            loss.backward()
    norm = optimizer.step(grad_clip=1.0).norm
    assert norm > 0
    for part in ranks["document"]:
        assert part["norm"] == pytest.approx(norm, rel=SUMS) and part["num_held"] == 4
        for name, weight in chain.model.state_dict().items():
            assert_bitwise(part["weights"][name], weight)


@pytest.mark.slow
def test_experts_over_one_dimension_of_a_mesh_and_fsdp_over_the_other(tmp_path, whole):
    # Mutation: the group of all ranks where one dimension's is meant.
    batch, wanted = whole
    expected = wanted["steps"][0]
    found = run_on_ranks(("experts_on_a_mesh",), tmp_path, num_ranks=4)["experts_on_a_mesh"]
    for row, part in enumerate(found):
        assert part["held"] == {(2, 64, 64), (2, 64, 32)}
        assert_bitwise(part["logits"][part["mask"]], expected["logits"][row][batch.attention_mask[row]])
        for key, rows in expected["seen"].items():
            places = rows.view(*batch.positions.shape, -1, *rows.shape[1:])[row]
            assert_bitwise(real_rows(part["seen"][key], part["mask"]), places[batch.attention_mask[row]])
        assert_same_gradients(part["gradients"], expected["gradients"])
