"""One rollout's samples become one or more optimizer steps, and the step's numbers."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.diagnostics.mismatch import mismatch_by_lag, mismatch_metrics
from tracefp4.errors import ConfigError
from tracefp4.rl.config import RunConfig
from tracefp4.rl.fetching import RecordFetcher
from tracefp4.rl.loss_metrics import merge_metrics
from tracefp4.rl.losses import LossConfig
from tracefp4.rl.policy import GenerationDefaults
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.schedule import warmup_constant
from tracefp4.rl.trainer import PolicyTrainer
from tracefp4.rollout import SamplingParams

# evaluations draw from their own stream, so comparing two policies pairs their noise
EVALUATION_SEED = 77
_SHARES = ("guidance/", "rounding/")


def sampling_params(config: RunConfig, defaults: GenerationDefaults) -> Callable[[int], SamplingParams]:
    """Return the sampling parameters of a step; what the recipe leaves open comes from the checkpoint.

    Raises:
        ConfigError: top-p or top-k is on: the trainer's log-probs are of the full distribution, so importance
            weights would compare two different ones.
    """
    rollout = config.rollout
    temperature = defaults.temperature if rollout.temperature is None else rollout.temperature
    top_p = defaults.top_p if rollout.top_p is None else rollout.top_p
    top_k = defaults.top_k if rollout.top_k is None else rollout.top_k
    if top_p != 1.0 or top_k != 0:
        raise ConfigError(
            f"rollout: training samples must come from the full distribution; got top_p={top_p}, top_k={top_k} (from "
            "the recipe or the checkpoint's generation config). Set rollout.top_p = 1.0 and rollout.top_k = 0."
        )
    if temperature <= 0:
        raise ConfigError(
            f"rollout.temperature must be above 0 for training; got {temperature}. Set it to 1.0."
        )

    def params(step: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=rollout.max_tokens,
            temperature=temperature,
            n=rollout.samples_per_prompt,
            seed=config.train.seed * 1_000_003 + step,
            stop_token_ids=defaults.stop_token_ids,
            stop=rollout.stop,
            keeps_stop=True,
        )

    return params


def evaluation_params(config: RunConfig, defaults: GenerationDefaults) -> SamplingParams:
    """Return the sampling of evaluations: one completion per item at run.eval_temperature, always the same draws."""
    return SamplingParams(
        max_tokens=config.rollout.max_tokens,
        temperature=config.run.eval_temperature,
        seed=EVALUATION_SEED,
        stop_token_ids=defaults.stop_token_ids,
        stop=config.rollout.stop,
        keeps_stop=True,
    )


class Updater:
    """Splits a rollout's samples over optimizer steps and reports loss, ratios and mismatch."""

    def __init__(
        self, trainer: PolicyTrainer, config: RunConfig, *, reference: PolicyTrainer | None = None
    ) -> None:
        """Keep the trainer and translate the recipe's [loss] table.

        Args:
            trainer: the policy.
            config: the recipe.
            reference: scores the KL term's reference policy, unguided; needed when loss.kl_coef > 0.

        Raises:
            ConfigError: loss.kl_coef is above 0 and there is no reference.
        """
        if config.loss.kl_coef > 0 and reference is None:
            raise ConfigError(
                f"loss.kl_coef: {config.loss.kl_coef} needs a reference policy; got none. Load the starting "
                "checkpoint as one, or set loss.kl_coef = 0."
            )
        self.trainer, self.config, self.reference = trainer, config, reference
        self.loss = loss_config(config)
        self.steps_taken = 0

    def update(
        self, samples: Sequence[TrainingSample], *, optimizer_step: int, version: int
    ) -> dict[str, Any]:
        """Train on the samples that carry a gradient; `steps_taken` then says how many optimizer steps were taken.

        Samples of a group whose rewards are all equal (advantage 0) are left out of forward, backward and the
        denominators, of the KL term too. Without any trained token no step is taken. A step whose gradient norm is
        not finite is not taken either and is counted in `optimizer_steps_skipped`.

        Args:
            samples: of one rollout, with rewards, groups and advantages; may be empty (all too old).
            optimizer_step: optimizer steps of the run so far.
            version: of the weights that are updated.

        Returns:
            Metrics. `grad_norm` is None when no step was taken; mismatch metrics are of the samples that went
            through the model and are absent without any.
        """
        self.steps_taken = 0
        kept = with_gradient(samples)
        metrics: dict[str, Any] = {"trained_samples": 0, "samples_skipped": len(samples) - len(kept)}
        if samples:
            lags = [sample.version_lag(version) for sample in samples]
            metrics |= {"version_lag_mean": sum(lags) / len(lags), "version_lag_max": max(lags)}
        if not any(self._is_trained(sample) for sample in kept):
            return metrics
        started = time.perf_counter()
        found, own = self._train(kept, optimizer_step=optimizer_step)
        return {
            **metrics,
            **found,
            "train_seconds": time.perf_counter() - started,
            **mismatch_of(kept, own),
            **mismatch_of_lags(kept, own, version=version),
            **followed_of_lags(kept, version=version, fetcher=self.trainer.fetcher),
        }

    def _train(
        self, samples: Sequence[TrainingSample], *, optimizer_step: int
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Take the optimizer steps: (metrics over them, log-probs of every sample when it was first scored)."""
        settings = self.config.train
        num_steps = settings.optimizer_steps_per_rollout
        old = None if num_steps == 1 else list(self.trainer.score(samples).logprobs)
        ref = self._reference_logprobs(samples)
        seen: list[Tensor | None] = list(old) if old is not None else [None] * len(samples)
        parts = []
        trained = 0
        for chosen in _shards(len(samples), num_steps, seed=settings.seed * 7919 + optimizer_step):
            metrics, logprobs = self.trainer.update(
                [samples[i] for i in chosen],
                old_logprobs=None if old is None else [old[i] for i in chosen],
                ref_logprobs=None if ref is None else [ref[i] for i in chosen],
                loss=self.loss,
                lr_scale=warmup_constant(
                    optimizer_step + self.steps_taken, warmup_steps=settings.warmup_steps
                ),
                grad_clip=settings.grad_clip,
                trains_truncated=settings.truncated != "mask",
            )
            is_taken = metrics["optimizer_steps_skipped"] == 0
            self.steps_taken += is_taken
            trained += len(chosen) if is_taken else 0
            parts.append(metrics)
            for place, i in enumerate(chosen):
                seen[i] = logprobs[place] if seen[i] is None else seen[i]
        own = [value for value in seen if value is not None]
        return {"trained_samples": trained, **merge_steps(parts)}, own

    def _is_trained(self, sample: TrainingSample) -> bool:
        """Whether any token of the sample is in the loss."""
        is_masked = sample.is_truncated and self.config.train.truncated == "mask"
        return sample.num_trained > 0 and not is_masked

    def _reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[Tensor] | None:
        """Score the reference policy; it computes in bf16 and follows no record, neither codes nor routing."""
        if self.reference is None:
            return None
        bare = [replace(sample, record=None, handle=None) for sample in samples]
        return list(self.reference.score(bare).logprobs)


def with_gradient(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Leave out the samples that say nothing: advantage exactly 0, in a group whose rewards are all equal.

    An advantage of 0 alone is not enough: a sample whose reward is its group's mean belongs to the objective and
    stays in the denominators. Neither are equal rewards alone: a caller's own advantages are not overruled.
    """
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_index, set()).add(sample.reward)
    return [sample for sample in samples if sample.advantage != 0.0 or len(rewards[sample.group_index]) > 1]


def merge_steps(parts: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Merge the metrics of one rollout's optimizer steps.

    What the loss measures per token is merged by `merge_metrics`. `grad_norm` is the mean over the steps that were
    taken (None without any), `guidance/...` and `rounding/...` the mean over the steps that have them (a step in which
    every value was followed has looked for no clipped one), and `optimizer_steps_skipped` a count.
    """
    shares: dict[str, list[float]] = {}
    of_loss: list[dict[str, float]] = []
    for part in parts:
        of_loss.append({name: value for name, value in part.items() if not name.startswith(_SHARES)})
        for name in part.keys() - of_loss[-1].keys():
            shares.setdefault(name, []).append(part[name])
    merged: dict[str, float | None] = dict(merge_metrics(of_loss))
    merged |= {name: sum(found) / len(found) for name, found in sorted(shares.items())}
    norms = [part["grad_norm"] for part in parts if not part["optimizer_steps_skipped"]]
    merged["grad_norm"] = sum(norms) / len(norms) if norms else None
    merged["optimizer_steps_skipped"] = sum(part["optimizer_steps_skipped"] for part in parts)
    return merged


def loss_config(config: RunConfig) -> LossConfig:
    """Translate the recipe's [loss] table into the loss's own constants."""
    loss = config.loss
    return LossConfig(
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        tis_cap=loss.tis_cap or None,
        aggregation=loss.aggregation,
        constant_length=config.rollout.max_tokens if loss.aggregation == "dr_grpo" else None,
        kl_coefficient=loss.kl_coef,
    )


def mismatch_of(samples: Sequence[TrainingSample], logprobs: Sequence[Tensor]) -> dict[str, float]:
    """Return the standard mismatch metrics of these samples: log p_train against the recorded log p_rollout.

    Only tokens that the policy sampled count; the environment's have no log p_rollout.
    """
    train = _padded(logprobs)
    rollout, mask = _rollout_side(samples)
    return mismatch_metrics(train, rollout_logprobs=rollout, mask=mask)


def mismatch_of_lags(
    samples: Sequence[TrainingSample], logprobs: Sequence[Tensor], *, version: int
) -> dict[str, float]:
    """Return `lag<n>/mismatch/...` for every lag n that occurs; {} when all tokens are of this version."""
    rollout, mask = _rollout_side(samples)
    lag = _padded([torch.tensor(sample.weight_versions, device="cpu") for sample in samples]).to(torch.int64)
    lag = torch.where(mask, version - lag, 0)
    if not bool(lag.any()):
        return {}
    found = mismatch_by_lag(_padded(logprobs), rollout_logprobs=rollout, mask=mask, version_lag=lag)
    return {f"lag{n}/{name}": value for n, metrics in found.items() for name, value in metrics.items()}


def followed_of_lags(
    samples: Sequence[TrainingSample], *, version: int, fetcher: RecordFetcher | None = None
) -> dict[str, float]:
    """Return `lag<n>/guidance/followed_fraction` for every lag n that occurs; {} when all tokens are of this version.

    The share of the tokens of that lag whose logits were recorded: token i of a completion after P prompt tokens came
    from position P + i - 1. Of records in a store, what `fetcher` read last counts.
    """
    tokens: Counter[int] = Counter()
    followed: Counter[int] = Counter()
    for sample in samples:
        rows = set[int]()
        if sample.record is not None:
            rows = set((sample.record.valid.nonzero()[:, 0] + sample.record.start).tolist())
        elif sample.handle is not None and fetcher is not None:
            rows = fetcher.followed_positions(sample)
        flags = zip(sample.weight_versions, sample.trained_flags, strict=True)
        for position, (sampled_under, is_trained) in enumerate(flags, start=len(sample.prompt_ids) - 1):
            if is_trained:
                tokens[version - sampled_under] += 1
                followed[version - sampled_under] += position in rows
    if not any(tokens):
        return {}
    return {f"lag{lag}/guidance/followed_fraction": followed[lag] / tokens[lag] for lag in sorted(tokens)}


def _rollout_side(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    """The rollout's log-probs [B, T], float64, and the mask of the tokens that the policy sampled."""
    rollout = _padded(
        [torch.tensor(sample.rollout_logprobs, dtype=torch.float64, device="cpu") for sample in samples]
    )
    return rollout, _padded([torch.tensor(sample.trained_flags, device="cpu") for sample in samples]).bool()


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([row.to(torch.float64) for row in rows], batch_first=True)


def _shards(num_samples: int, num_shards: int, *, seed: int) -> list[list[int]]:
    """Deal samples into shards of nearly equal size, none empty, in an order drawn from the seed."""
    num_shards = min(num_shards, num_samples)
    generator = torch.Generator().manual_seed(seed)
    order = (
        torch.randperm(num_samples, generator=generator, device="cpu").tolist()
        if num_shards > 1
        else list(range(num_samples))
    )
    return [order[i::num_shards] for i in range(num_shards)]
