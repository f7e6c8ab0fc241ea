"""Record an FP4 rollout and replay its rounding in the trainer: same tokens, same weights, three ways to round.

Pass a checkpoint directory of the Qwen3-MoE family, or nothing for a tiny random model.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tracefp4 import LocalEngine, PlanRules, ReplayBatch, SamplingParams, apply, plan, replay
from tracefp4.formats import EMULATED
from tracefp4.patching import calibrate
from tracefp4.rl.checkpoint import save_model
from tracefp4.rl.policy import Policy, load_policy
from tracefp4.rl.tiny import TinyShape, build_model, build_tokenizer

QUESTION = "What is 12 + 30 - 7?"


def tiny_policy() -> Policy:
    """Make a random model and its tokenizer, save them as a checkpoint, and load it."""
    tokenizer = build_tokenizer([QUESTION])
    with TemporaryDirectory() as directory:
        save_model(build_model(TinyShape(), tokenizer=tokenizer), tokenizer, Path(directory))
        return load_policy(directory)


def main() -> None:
    torch.set_num_threads(1)
    policy = load_policy(sys.argv[1]) if len(sys.argv) > 1 else tiny_policy()
    model, prompt = policy.model, policy.tokenizer(QUESTION)["input_ids"]

    # One plan for both sides: routed experts and KV cache in FP4, every layer recorded and followed.
    fp4 = plan(model, PlanRules(guidance="mantissa"))
    print(f"{fp4.num_quantized} of {len(fp4.decisions)} modules become FP4, for example:")
    print(
        "  " + "\n  ".join(f"{d.name}: {d.reason}" for d in fp4.decisions if d.layer == 0 and d.is_quantized)
    )
    applied = apply(model, fp4, arithmetic=EMULATED)
    ids = torch.tensor([prompt])
    fp4 = calibrate(model, fp4, input_ids=ids, attention_mask=torch.ones_like(ids))
    applied.undo()
    apply(model, fp4, arithmetic=EMULATED)

    # The rollout: token by token, over an FP4 cache. Without stop tokens all completions are equally long.
    engine = LocalEngine(
        model.config,
        model.state_dict(),
        precision=fp4.layers,
        arithmetic=EMULATED,
        plan_digest=fp4.digest,
        num_pages=256,
        max_batch=16,
        max_tokens_per_step=256,
    )
    (answers,) = engine.generate([prompt], SamplingParams(max_tokens=48, n=8))
    records = [answer.record.recode("mantissa") for answer in answers if answer.record is not None]
    size = records[0].num_bytes()
    print(
        f"one record: {records[0].length} positions, {size.total / records[0].length:.0f} bytes per position"
    )

    # The trainer: one pass over whole sequences. Only the sites that it follows differ between the passes.
    tokens = torch.tensor([answer.prompt_ids + answer.token_ids for answer in answers])
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    rollout = torch.tensor([answer.logprobs for answer in answers])
    for name, sites in (("nearest", ()), ("guided", None)):
        batch = ReplayBatch(positions=positions, records=records, sites=sites)
        with torch.no_grad(), replay(batch):
            logprobs = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        train = logprobs[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, len(prompt) - 1 :]
        moved = batch.counters.total()
        share = int(moved.values_changed) / moved.values
        print(f"{name:8} mean |d log p| {(train - rollout).abs().mean():.5f}   values moved {share:.2%}")


if __name__ == "__main__":
    main()
