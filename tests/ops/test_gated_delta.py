"""gated_delta: its definition against transformers' functions, prefill against steps, and what is refused."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.ops.delta_cases import copy, layer, projected, states, their_layer
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

from tracefp4.errors import BackendError, FormatError
from tracefp4.formats.arithmetic import round_bf16
from tracefp4.ops.backend import Backend
from tracefp4.ops.gated_delta import DeltaState, Projected, gated_delta_prefill, gated_delta_step
from tracefp4.ops.gated_delta.reference import sum_over_keys
from tracefp4.ops.gated_delta.rule import CHUNK

KEY_DIM = 32


def token(given, t):
    return Projected(*(part[:, t] for part in given))


def tokens(given, begin, end):
    return Projected(*(part[:, begin:end] for part in given))


def by_steps(given, weights, state, slots, **options):
    steps = [
        gated_delta_step(token(given, t), weights, state, slots=slots, **options)
        for t in range(given.mixed.shape[1])
    ]
    return torch.stack(steps, dim=1)


def distance(got, wanted):
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_and_prefill_are_what_transformers_computes(rule, dtype):
    weights = layer(key_dim=KEY_DIM, value_dim=16, dtype=dtype)
    given, slots = projected(weights, 2, CHUNK + 9), torch.tensor([3, 1])
    wanted, last = their_layer(getattr(theirs, rule), given, weights, KEY_DIM)
    for advance in ("steps", "prefill"):
        state = states(weights, KEY_DIM, dtype=dtype, is_zero=True)
        if advance == "steps":
            got = by_steps(given, weights, state, slots)
        else:
            lengths = torch.full((2,), CHUNK + 9)
            got = gated_delta_prefill(given, weights, state, slots=slots, lengths=lengths)
        # transformers computes the rule in float32 whatever it is given
        assert distance(got, wanted) < 2e-5, advance
        assert distance(state.recurrent[slots].mT, last) < 2e-6, advance
        assert_bitwise(state.conv[slots], given.mixed[:, -3:])


def test_in_bf16_every_tensor_between_kernels_is_rounded_as_transformers_does():
    weights = layer(key_dim=KEY_DIM, value_dim=16)
    given, slots = projected(weights, 3, 12), torch.tensor([0, 4, 2])
    wanted, _ = their_layer(theirs.torch_recurrent_gated_delta_rule, given, weights, KEY_DIM)
    got = by_steps(given, weights, states(weights, KEY_DIM, dtype=torch.float32, is_zero=True), slots)
    # a different order of sums shows only where a value is next to the middle between two bf16 numbers
    assert (got != wanted).float().mean() < 0.02 and distance(got, wanted) < 2.0**-6


def test_emulated_bf16_is_bf16():
    weights = layer(key_dim=KEY_DIM, value_dim=16)
    wide = {name: getattr(weights, name).float() for name in ("taps", "norm", "a_log", "dt_bias")}
    wider = type(weights)(**wide, epsilon=weights.epsilon)
    given, slots = projected(weights, 3, 5), torch.arange(3)
    native, emulated = (states(w, KEY_DIM, dtype=torch.float32, is_zero=True) for w in (weights, wider))
    got = by_steps(Projected(*(p.float() for p in given)), wider, emulated, slots, emulates_bf16=True)
    assert_bitwise(got, by_steps(given, weights, native, slots).float())
    assert_bitwise(emulated.recurrent, native.recurrent)
    assert_bitwise(round_bf16(got), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_prefill_goes_on_where_steps_ended_and_the_other_way_round(dtype):
    weights = layer(key_dim=KEY_DIM, value_dim=16, dtype=torch.float64)
    given, slots = projected(weights, 2, 40), torch.tensor([4, 0])
    ends, outs = [], []
    for cut in (0, 1, 17, 40):
        state = states(weights, KEY_DIM, dtype=dtype)
        out = []
        if cut:
            lengths = torch.full((2,), cut)
            out.append(
                gated_delta_prefill(tokens(given, 0, cut), weights, state, slots=slots, lengths=lengths)
            )
        if cut < 40:
            out.append(by_steps(tokens(given, cut, 40), weights, state, slots))
        outs.append(torch.cat(out, dim=1))
        ends.append(state)
    allowed = {torch.bfloat16: 2.0**-6, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for out, end in zip(outs[1:], ends[1:], strict=True):
        assert distance(out, outs[0]) < allowed and distance(end.recurrent, ends[0].recurrent) < allowed
        assert_bitwise(end.conv, ends[0].conv)
    untouched = [1, 2, 3]
    assert_bitwise(ends[0].recurrent[untouched], states(weights, KEY_DIM, dtype=dtype).recurrent[untouched])


def test_sequences_of_other_lengths_share_a_prefill():
    weights = layer(key_dim=KEY_DIM, value_dim=16, dtype=torch.float32)
    given, lengths = projected(weights, 4, 70), torch.tensor([70, 1, 2, 0])
    slots, state = torch.tensor([2, 0, 4, 3]), states(weights, KEY_DIM, dtype=torch.float32)
    alone = copy(state)
    got = gated_delta_prefill(given, weights, state, slots=slots, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        part = Projected(*(x[row : row + 1, :length] for x in given))
        if length:
            size = torch.tensor([length])
            one = gated_delta_prefill(part, weights, alone, slots=slots[row : row + 1], lengths=size)
            assert distance(got[row : row + 1, :length], one) < 1e-5
    assert_bitwise(state.conv, alone.conv)
    assert distance(state.recurrent, alone.recurrent) < 1e-6
    assert_bitwise(state.recurrent[3], states(weights, KEY_DIM, dtype=torch.float32).recurrent[3])


def test_a_state_in_bf16_is_the_float32_step_rounded_once():
    weights = layer(key_dim=KEY_DIM, value_dim=16)
    given, slots = projected(weights, 2), torch.tensor([1, 3])
    narrow = states(weights, KEY_DIM)
    wide = DeltaState(narrow.conv.clone(), narrow.recurrent.float())
    got, wanted = (gated_delta_step(given, weights, s, slots=slots) for s in (narrow, wide))
    assert (
        narrow.recurrent != wide.recurrent.bfloat16()
    ).float().mean() < 1e-3  # sums over keys take another order
    assert distance(got, wanted) < 2.0**-7


def test_a_sequence_without_a_state_gives_zeros_and_writes_nothing():
    weights = layer(key_dim=KEY_DIM, value_dim=16)
    given, state = projected(weights, 3), states(weights, KEY_DIM)
    before, alone = copy(state), copy(state)
    got = gated_delta_step(given, weights, state, slots=torch.tensor([-1, 2, -7]))
    one = Projected(*(part[1:2] for part in given))
    wanted = gated_delta_step(one, weights, alone, slots=torch.tensor([2]))
    assert_bitwise(got[1:2], wanted)
    assert not got[[0, 2]].any()
    for part, was, other in zip(state, before, alone, strict=True):
        assert_bitwise(part[[0, 1, 3, 4]], was[[0, 1, 3, 4]])
        assert_bitwise(part[2], other[2])
        assert bool((part[2] != was[2]).any())
    nothing = Projected(*(part[:0] for part in given))
    assert gated_delta_step(nothing, weights, state, slots=torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def test_sums_over_keys_have_the_order_that_is_written_down():
    x = torch.randn(3, 128) * torch.exp2(torch.randint(-20, 20, (3, 128)).float())
    for unit in (4, 8):
        lanes = [torch.zeros(3) for _ in range(8)]
        for i in range(128):
            lanes[i // unit % 8] = lanes[i // unit % 8] + x[:, i]
        four = [lanes[n] + lanes[n + 4] for n in range(4)]
        assert_bitwise(sum_over_keys(x, unit), (four[0] + four[2]) + (four[1] + four[3]))
    assert_bitwise(sum_over_keys(torch.ones(2, 24), 8), torch.full((2,), 24.0))


def test_what_does_not_fit_is_refused():
    weights = layer(key_dim=KEY_DIM, value_dim=16)
    given, state, slots = projected(weights, 2), states(weights, KEY_DIM), torch.tensor([0, 1])
    wide = weights.dt_bias.double()
    for wrong in (
        {"projected": given._replace(z=given.z.float())},
        {
            "weights": type(weights)(
                **{n: getattr(weights, n) for n in ("taps", "a_log", "norm", "epsilon")}, dt_bias=wide
            )
        },
    ):
        with pytest.raises(FormatError, match="one float dtype"):
            gated_delta_step(
                **{"projected": given, "weights": weights, "state": state, "slots": slots} | wrong
            )
    with pytest.raises(FormatError, match=r"states \[S, Hv, Dv, Dk\]"):
        gated_delta_step(given, weights, state._replace(recurrent=state.recurrent[0]), slots=slots)
    for wrong_state in (
        state._replace(conv=state.conv[:, 1:].contiguous()),
        state._replace(recurrent=state.recurrent[..., :-1].contiguous()),
    ):
        with pytest.raises(FormatError, match="shapes do not fit"):
            gated_delta_step(given, weights, wrong_state, slots=slots)
    with pytest.raises(FormatError, match=r"slots as int64 \[2\]"):
        gated_delta_step(given, weights, state, slots=slots.int())
    many = Projected(*(part[:, None] for part in given))
    with pytest.raises(FormatError, match=r"lengths as int64 \[2\]"):
        gated_delta_prefill(many, weights, state, slots=slots, lengths=slots[:1])
    with pytest.raises(BackendError, match="gated_delta cannot run CUDA here"):
        gated_delta_step(given, weights, state, slots=slots, backend=Backend.CUDA)
