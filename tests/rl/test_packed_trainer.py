"""A trainer that packs gives what a trainer that pads gives: log-probs bit for bit, losses and gradients too."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from tests.parity.chains import make_chain
from tests.parity.modes import GRADIENT

from tracefp4.patching import Applied
from tracefp4.rl.losses import AGGREGATIONS, LossConfig
from tracefp4.rl.optimizer import StepResult
from tracefp4.rl.trainer import PolicyTrainer

# two of the samples fit into a padded micro-batch, more into a packed one
BUDGET = 40


@dataclass
class Gradients:
    """In the optimizer's place: takes the gradients and no step."""

    model: torch.nn.Module
    taken: list = field(default_factory=list)

    def forget_gradients(self):
        self.model.zero_grad()

    def step(self, *, lr_scale, grad_clip):
        self.taken = [parameter.grad for parameter in self.model.parameters()]
        self.forget_gradients()
        return StepResult(norm=0.0, is_taken=True)


@pytest.fixture(scope="module")
def chain():
    return make_chain()


@pytest.fixture(scope="module")
def samples(chain):
    """Seven samples of several lengths, some truncated, some of several turns."""
    found = [
        replace(sample, advantage=(-1.0) ** i * (1 + i), group_index=i // 2)
        for i, sample in enumerate(chain.rollouts(num_prompts=7, max_tokens=11))
    ]
    found[1] = replace(found[1], is_truncated=True, finish_reason="length")
    flags = [i % 3 != 1 for i in range(len(found[2].token_ids))]
    found[2] = replace(found[2], trained_mask=flags)
    short = replace(found[5].truncate(found[5].num_tokens - 4), finish_reason="stop", is_truncated=True)
    return [*found[:5], short, found[6]]


def trainers(chain):
    padded = PolicyTrainer(
        applied=Applied(model=chain.model, plan=chain.plan, patched=()),
        arithmetic=chain.arithmetic,
        pad_id=0,
        temperature=0.9,
        micro_batch_tokens=BUDGET,
        optimizer=Gradients(chain.model),
    )
    return padded, replace(padded, packing=True)


def test_pad_3_packed_log_probs_are_those_of_padded_samples(chain, samples):
    # Mutations: labels across borders; values that return to another sample; one record for the whole row.
    padded, packed = (trainer.score(samples, measure=True) for trainer in trainers(chain))
    assert [len(values) for values in padded.logprobs] == [len(sample.token_ids) for sample in samples]
    for one, other in zip(padded.logprobs, packed.logprobs, strict=True):
        assert one.dtype == torch.float64 and torch.equal(one, other)
    assert packed.agreement == padded.agreement and len(packed.agreement) > 0
    assert packed.routing == padded.routing
    assert packed.positions_missing == padded.positions_missing > 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_pad_3_packed_losses_and_gradients_are_those_of_padded_samples(chain, samples, aggregation):
    # Mutations: a denominator per row instead of per sample; a loss mask that crosses a border.
    loss = LossConfig(
        aggregation=aggregation, constant_length=11 if aggregation == "dr_grpo" else None, kl_coefficient=0.1
    )
    found = []
    for trainer in trainers(chain):
        old = list(trainer.score(samples).logprobs)
        reference = [values - 0.1 for values in old]
        metrics, seen = trainer.update(
            samples, old_logprobs=old, ref_logprobs=reference, loss=loss, lr_scale=1.0, grad_clip=0.0,
            trains_truncated=False,
        )  # fmt: skip
        found.append((metrics, seen, trainer.optimizer.taken))
    (metrics, seen, gradients), (again, same, others) = found
    assert metrics["num_tokens"] == sum(s.num_trained for s in samples if not s.is_truncated)
    assert again == pytest.approx(metrics, rel=GRADIENT, abs=GRADIENT)
    assert all(torch.equal(a, b) for a, b in zip(seen, same, strict=True))
    for one, other in zip(gradients, others, strict=True):
        assert (one - other).abs().max() <= GRADIENT * one.abs().max()
    assert max(float(gradient.abs().max()) for gradient in gradients) > 0


def test_bat_1_gradients_add_up_over_micro_batches_of_any_size(chain, samples):
    # Mutation: the mean of micro-batch means.
    found = []
    for trainer in trainers(chain):
        for budget in (BUDGET, 20, 10_000):
            sized = replace(trainer, micro_batch_tokens=budget)
            sized.update(
                samples, old_logprobs=None, ref_logprobs=None, loss=LossConfig(), lr_scale=1.0, grad_clip=0.0
            )
            found.append(sized.optimizer.taken)
    for gradients in found[1:]:
        for one, other in zip(found[0], gradients, strict=True):
            assert (one - other).abs().max() <= GRADIENT * one.abs().max()


def test_a_packed_row_computes_no_padding(chain, samples):
    padded, packed = trainers(chain)
    computed = {}
    for name, trainer in (("padded", padded), ("packed", packed)):
        places = []
        handle = chain.model.model.embed_tokens.register_forward_hook(
            lambda module, args, out, places=places: places.append(args[0].shape)
        )
        trainer.score(samples)
        handle.remove()
        assert all(shape.numel() <= BUDGET for shape in places)
        computed[name] = (len(places), sum(shape.numel() for shape in places))
    assert computed["packed"][1] == sum(sample.num_tokens for sample in samples)
    assert computed["packed"][0] < computed["padded"][0], computed
