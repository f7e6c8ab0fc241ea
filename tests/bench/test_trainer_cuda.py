"""Training steps on a GPU: what following records makes the host wait for."""

import warnings
from dataclasses import replace

import pytest
import torch

from tracefp4.bench import trainer
from tracefp4.rl.config import ModelConfig
from tracefp4.rl.placement import placement_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SYNC = "called a synchronizing CUDA operation"


def num_waits(bed, arm, count):
    """Times that the host waited for the device in one step, after one that was not counted."""
    samples = bed.samples[:count]
    bed._step(arm, samples)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            bed._step(arm, samples)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNC in str(warning.message) for warning in caught)


def test_a_micro_batch_that_follows_waits_no_more_often_than_one_in_bf16():
    # Mutations: expert ids looked at on the device; a table of bits copied from the host at every site.
    sizes = trainer.default_sizes("qwen3-30b-a3b", layers=1, vocab=256)
    sizes = replace(sizes, tokens=(1024,), micro_batch_tokens=256, length=128)
    bed = trainer._Bed(
        sizes, placement_of(ModelConfig(path="", device="cuda")), seed=0, on_event=lambda text: None
    )
    waits = {(arm, count): num_waits(bed, arm, count) for arm in trainer.ARMS for count in (2, 8)}
    of_batch = {arm: waits[arm, 8] - waits[arm, 2] for arm in trainer.ARMS}
    assert of_batch["nearest"] == of_batch["bf16"] == of_batch["guided"], waits
    # what is counted once a step is read once
    assert waits["guided", 2] <= waits["bf16", 2] + 3, waits
