"""Engines over tiny models, and what tests read off them."""

import torch
from tests.models.tiny_models import fp4, tiny_model

from tracefp4.formats.arithmetic import CONTROL, EMULATED
from tracefp4.rollout import LocalEngine, SamplingParams

PLAN = "plan"


def make_engine(model=None, *, control=False, **changes):
    model = tiny_model() if model is None else model
    settings = {
        "precision": fp4(model.config.num_hidden_layers),
        "arithmetic": CONTROL if control else EMULATED,
        "plan_digest": PLAN,
        "num_pages": 64,
        "page_size": 4,
        "max_batch": 8,
        "max_tokens_per_step": 64,
    }
    return LocalEngine(model.config, model.state_dict(), **(settings | changes))


def make_prompts(count, *, vocab_size=40, seed=0, shortest=3, longest=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def sampled(max_tokens=6, **changes):
    return SamplingParams(max_tokens=max_tokens, **changes)


def outputs(completions):
    """Tokens and log-probs, comparable with ==."""
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in row] for row in completions]
