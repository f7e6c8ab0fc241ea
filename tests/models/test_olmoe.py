"""OLMoE in the engine: norms over whole projections, clipped q, k and v; equal to transformers and to the trainer."""

import pytest
import torch
from tests.assertions import assert_bitwise
from tests.models.native import LOGITS_CLOSE, following, relative_error
from tests.models.test_native_pass import recorded
from tests.models.test_qwen3_moe import CLOSE, make, run_in_chunks
from tests.models.tiny_models import EXACT, bf16, fp4, tiny_olmoe
from tests.parity.chains import make_chain
from tests.rollout.recorded import shifted

from tracefp4.errors import ConfigError
from tracefp4.formats.arithmetic import CONTROL, EMULATED, NATIVE
from tracefp4.models.qwen3_moe_config import read_sizes

CHANGES = [{}, {"clip_qkv": 1.5}, {"norm_topk_prob": True, "num_key_value_heads": 1}]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes) or "default")
def test_equals_transformers_when_nothing_is_rounded(changes):
    model = tiny_olmoe(**changes)
    tokens = torch.randint(0, 40, (13,))
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
    for chunks in (13, 5):
        found, _ = run_in_chunks(make(model, bf16(), EXACT), tokens.tolist(), chunks)
        assert (found[0] - expected).abs().max() < CLOSE * expected.abs().max()
    if "clip_qkv" in changes:
        model.config.clip_qkv = None
        other, _ = run_in_chunks(make(model, bf16(), EXACT), tokens.tolist(), 13)
        assert (other[0] - expected).abs().max() > 0.1


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes) or "default")
def test_the_definition_that_follows_the_record_of_a_native_pass_computes_its_logits(changes):
    model = tiny_olmoe(seed=1, **changes)
    tokens = torch.randint(0, 40, (14,)).tolist()
    completion = recorded(model, tokens, precision=fp4())
    definition = make(model, fp4(), EMULATED)
    native, _ = run_in_chunks(make(model, fp4(), NATIVE), tokens, 14)
    wanted = native[0, : completion.record.length]
    assert relative_error(following(definition, tokens, completion.record), wanted) < LOGITS_CLOSE
    wrong = following(definition, tokens, shifted(completion.record))
    assert relative_error(wrong, wanted[: len(wrong)]) > 8 * LOGITS_CLOSE


@pytest.mark.parametrize("changes", [{}, {"clip_qkv": 1.5}], ids=["default", "clip"])
def test_engine_and_trainer_are_equal_bit_for_bit_in_control_arithmetic(changes):
    chain = make_chain(arithmetic=CONTROL, model=tiny_olmoe(**changes))
    samples = chain.rollouts(num_prompts=2, max_tokens=6)
    found = chain.trainer_pass(chain.batch(samples))
    for sample, (logits, rows) in zip(samples, found, strict=True):
        expected, seen = chain.engine_pass([*sample.prompt_ids, *sample.token_ids], 4)
        assert_bitwise(logits, expected)
        for key, parts in seen.items():
            assert_bitwise(rows[key][0].flatten(0, 1), parts[0])


def test_a_limit_that_bf16_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match=r"clip_qkv = 1\.3"):
        read_sizes(tiny_olmoe(clip_qkv=1.3).config)
