"""`guidance = "auto"`: the cheapest codec of every site with which this model's trainer stays as close as BF16 does.

A calibration rollout is recorded whole. The floor is the mean |log p_train - log p_rollout| of a BF16 rollout and a
BF16 trainer of the same weights, the smaller one with and without routing replay. One pass that follows the whole
records tries every candidate at every site (`ReplayBatch.candidates`): its residual is the share of values that it
would leave wrong. For a limit L, `choose_codecs` takes the cheapest codec of each site with a residual of at most L;
what L costs in log-probability is then measured, not modelled, by scoring the samples under that choice. A bisection
over the residuals at which the choice gets cheaper finds the largest L with

    mean |d log p| <= MARGIN * floor

so what is chosen has been verified end to end, and where nothing cheaper holds it is the richest candidate. Where the
plan gates, the verification does too, with bands measured in the first pass. The choice belongs to the plan
(`Plan.with_codecs`), hence to its digest and the manifest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracefp4.errors import RecordError
from tracefp4.guidance import Site
from tracefp4.guidance.gate import NoiseGate
from tracefp4.guidance.rates import Residuals, choose_codecs, codec_row_bytes
from tracefp4.patching import Plan
from tracefp4.rl.same_tokens import BF16_RULES, LIVE_BF16_RULES, SameTokens, mismatch_row, signed
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.trainer import Scored
from tracefp4.rollout import SamplingParams

CANDIDATES = (
    "full", "mantissa", "mantissa_lean", "secded", "secded+coset1", "secded+bch128_2", "bch64_4+bch128_2", "bch64_3",
    "bch64_3+bch128_2", "bch64_2+bch128_2", "bch128_4+bch128_2", "bch128_3+coset1", "bch128_3+bch128_2",
    "bch128_2+bch128_2", "bch256_4+bch128_2", "bch256_3+bch128_2", "bch256_2+bch128_2", "bch512_4+bch128_2",
    "bch512_3+bch128_2",
)  # fmt: skip
"""Codecs that are tried at every site, `full` among them, so that there is always one that leaves nothing wrong."""
MARGIN = 0.9
"""Share of the floor that a choice may use on the calibration samples: other samples differ by about a tenth."""
SAMPLES_PER_PROMPT = 4
"""Completions of a calibration prompt: enough tokens for the two means that are compared."""
MAX_TRIES = 8
"""Choices that are scored end to end; each costs one pass over the calibration samples."""

OnEvent = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """One choice that was scored end to end."""

    limit: float
    """Largest residual that a site was allowed."""
    mean: float
    """Mean |log p_train - log p_rollout| under it, nats."""
    bytes_per_token: int
    """Codec bytes per token over all guided sites."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateChoice:
    """What was chosen, and the evidence."""

    codecs: Mapping[Site, str]
    """Codec of every guided site."""
    floor: float
    """Mean |log p_train - log p_rollout| of the BF16 pair."""
    chosen: Try
    """The choice, as it was scored."""
    holds: bool
    """True when the chosen codecs stay at or below MARGIN * floor; False when not even the richest ones do."""
    tries: tuple[Try, ...]
    """Everything that was scored, in order."""

    def summary(self) -> dict[str, Any]:
        """Return what a manifest says of the choice."""
        names = sorted(self.codecs.values())
        return {
            "floor": self.floor,
            "margin": MARGIN,
            "mean": self.chosen.mean,
            "bytes_per_token": self.chosen.bytes_per_token,
            "holds": self.holds,
            "sites_by_codec": {name: names.count(name) for name in sorted(set(names))},
            "tries": [
                {"limit": t.limit, "mean": t.mean, "bytes_per_token": t.bytes_per_token} for t in self.tries
            ],
        }


def bf16_floor(bed: SameTokens, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Measure the mean |d log p| of a BF16 rollout and a BF16 trainer, with and without routing replay; the smaller.

    Args:
        bed: the model.
        prompts: token ids.
        params: sampling at temperature 1.
    """
    replayed, live = bed.plan(BF16_RULES), bed.plan(LIVE_BF16_RULES)
    samples = bed.sample(replayed, prompts, params)
    return min(
        mismatch_row(samples, bed.score(chosen, samples).logprobs)["mean"] for chosen in (replayed, live)
    )


def choose_rates(
    bed: SameTokens,
    undecided: Plan,
    samples: Sequence[TrainingSample],
    *,
    floor: float,
    candidates: Sequence[str] = CANDIDATES,
    on_event: OnEvent = lambda text: None,
) -> RateChoice:
    """Choose a codec for every guided site.

    Args:
        bed: the model that sampled.
        undecided: a plan with guidance "auto" and static exponents calibrated.
        samples: of an engine under this plan, with whole records.
        floor: of the BF16 pair, see `bf16_floor`.
        candidates: names of codecs, the richest first; the first one must keep everything. Those that cannot be
            decoded under the scheme of a guided site are left out.
        on_event: called with one line of text per pass.

    Returns:
        The choice that was verified, for `undecided.with_codecs(choice.codecs)`.

    Raises:
        RecordError: no sample has a record, or none has a valid row at some guided site.
    """
    return _Search(
        bed=bed, undecided=undecided, samples=samples, floor=floor, candidates=candidates, on_event=on_event
    ).run()


def calibrate_rates(
    bed: SameTokens,
    undecided: Plan,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    seed: int,
    on_event: OnEvent = lambda text: None,
) -> RateChoice:
    """Make the calibration rollouts, BF16 and FP4, and choose a codec for every guided site.

    Args:
        bed: the model.
        undecided: a plan with guidance "auto" and static exponents calibrated.
        prompts: token ids; SAMPLES_PER_PROMPT completions of each.
        max_tokens: longest completion.
        seed: of the draws.
        on_event: called with one line of text per pass.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        n=SAMPLES_PER_PROMPT,
        seed=seed,
        stop_token_ids=bed.policy.defaults.stop_token_ids,
    )
    on_event(f"automatic rate: BF16 floor on {len(prompts)} prompts")
    floor = bf16_floor(bed, prompts, params)
    on_event("automatic rate: FP4 calibration rollout")
    samples = bed.sample(undecided, prompts, params)
    return choose_rates(bed, undecided, samples, floor=floor, on_event=on_event)


@dataclass(kw_only=True)
class _Search:
    """A bisection over the residuals that occur."""

    bed: SameTokens
    undecided: Plan
    samples: Sequence[TrainingSample]
    floor: float
    candidates: Sequence[str]
    on_event: OnEvent

    def run(self) -> RateChoice:
        """Find the largest limit that holds."""
        records = [sample.record for sample in self.samples if sample.record is not None]
        if not records:
            raise RecordError(
                f"Codecs are chosen from whole records; got {len(self.samples)} samples without any. Record the "
                "guided sites of the calibration rollout."
            )
        parts = {site: part for record in records for site, part in record.sites.items()}
        guided = {site: parts[site] for site in self.undecided.guided_sites if site in parts}
        self.candidates = [name for name in self.candidates if self.undecided.can_follow(name)]
        self._prices = codec_row_bytes(guided, codecs=self.candidates)
        measured = self._measured()
        shares = measured.residuals.shares()
        unmeasured = [
            str(site)
            for site in self.undecided.guided_sites
            if site not in shares or site not in measured.noise
        ]
        if unmeasured:
            raise RecordError(
                f"Codecs are chosen from what was measured at every guided site; got no valid row at {unmeasured}. "
                "Calibrate on samples whose records are valid there, or name a codec instead of auto."
            )
        self._residuals: Residuals = {site: shares[site] for site in guided}
        self._bands = None
        if self.undecided.rules.is_gated:
            self._bands = NoiseGate.calibrated({site: measured.noise[site] for site in guided}).bands
        limits = self._limits()
        tries: list[Try] = []
        best = self._try(limits[0], tries)
        low, high = 0, len(limits) - 1
        while self._holds(best) and low < high and len(tries) < MAX_TRIES:
            middle = (low + high + 1) // 2
            found = self._try(limits[middle], tries)
            if self._holds(found):
                low, best = middle, found
            else:
                high = middle - 1
        if not self._holds(best):
            self.on_event(
                f"no choice keeps mean |d log p| at or below {MARGIN * self.floor:.5f}: the richest codecs are taken"
            )
        return RateChoice(
            codecs=self._choice(best.limit),
            floor=self.floor,
            chosen=best,
            holds=self._holds(best),
            tries=tuple(tries),
        )

    def _limits(self) -> list[float]:
        """Residuals at which the choice gets cheaper, ascending, from the one that leaves least wrong."""
        limits, cheapest = [], None
        for limit in sorted({share for found in self._residuals.values() for share in found.values()}):
            price = self._price(self._choice(limit))
            if cheapest is None or price < cheapest:
                limits.append(limit)
                cheapest = price
        return limits

    def _price(self, codecs: Mapping[Site, str]) -> int:
        return sum(self._prices[site][name] for site, name in codecs.items())

    def _measured(self) -> Scored:
        """Follow whole records, and try every candidate at every guided site."""
        self.on_event(f"trying {len(self.candidates)} codecs at {len(self.undecided.guided_sites)} sites")
        richest = self.undecided.with_codecs(dict.fromkeys(self.undecided.guided_sites, self.candidates[0]))
        return self.bed.score(
            richest, signed(self.samples, richest), measure=True, candidates=self.candidates
        )

    def _choice(self, limit: float) -> dict[Site, str]:
        return choose_codecs(self._residuals, row_bytes=self._prices, allowed=limit)

    def _holds(self, found: Try) -> bool:
        return found.mean <= MARGIN * self.floor

    def _try(self, limit: float, tries: list[Try]) -> Try:
        """Score one choice end to end."""
        codecs = self._choice(limit)
        plan = self.undecided.with_codecs(codecs)
        logprobs = self.bed.score(plan, signed(self.samples, plan), bands=self._bands).logprobs
        found = Try(
            limit=limit,
            mean=mismatch_row(self.samples, logprobs)["mean"],
            bytes_per_token=self._price(codecs),
        )
        tries.append(found)
        self.on_event(
            f"residual up to {limit:.2e}: {found.bytes_per_token} bytes per token, mean |d log p| {found.mean:.5f} "
            f"(floor {self.floor:.5f})"
        )
        return found
