"""`tracefp4 bench guidance`: how far an FP4 rollout is from its trainer, and what each codec removes at what price.

One engine decodes token by token under FP4 weights, activations and KV cache and records every rounding. Trainers score
the sampled tokens in one pass over whole sequences: BF16, FP4 rounded to nearest, and FP4 following the records as each
codec keeps them. The floor is the smallest mean |d log p| of a BF16 rollout and a BF16 trainer on this model, with and
without routing replay, on the BF16 engine's own tokens and on the FP4 engine's: the difference that everyone accepts.
Weights, tokens and seeds are shared, so only rounding differs between the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracefp4.bench.guidance_model import Size, arithmetic_of, prompts_of, token_rows
from tracefp4.bench.guidance_rows import (
    GuidanceRow,
    Tried,
    is_shortened,
    large_bytes,
    own_bytes,
)
from tracefp4.bench.guidance_speed import SiteValues, site_values
from tracefp4.diagnostics.agreement import AgreementCounts
from tracefp4.guidance import Site
from tracefp4.patching import Plan, PlanRules
from tracefp4.patching.rules import AUTO
from tracefp4.rl.planning import calibrated_plan
from tracefp4.rl.policy import Policy
from tracefp4.rl.rates import CANDIDATES, RateChoice, choose_rates
from tracefp4.rl.same_tokens import (
    BF16_RULES,
    LIVE_BF16_RULES,
    SameTokens,
    mismatch_row,
    routing_only,
    signed,
)
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.trainer import Scored
from tracefp4.rollout import SamplingParams

FP4_RULES = PlanRules(guidance="full")
CALIBRATION_ROWS = 32
PROMPT_SEED, CALIBRATION_SEED = 1001, 1002
MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 24576}


@dataclass(kw_only=True)
class Comparison:
    """One policy, its rollouts, and the rows measured so far."""

    bed: SameTokens
    """Model, arithmetic and sizes."""
    size: Size
    """The rollout's sizes."""
    seed: int
    """Of the draws."""
    on_row: Callable[[GuidanceRow], None]
    """Called with every row as it is measured."""
    on_event: Callable[[str], None]
    """Called with one line of text before anything that takes seconds."""
    rows: list[GuidanceRow] = field(default_factory=list)
    """In the order measured."""

    def __post_init__(self) -> None:
        prompts = token_rows(
            self.bed.policy.tokenizer,
            num_rows=min(CALIBRATION_ROWS, self.size.num_sequences),
            num_tokens=self.size.prompt_tokens + self.size.completion_tokens,
            seed=CALIBRATION_SEED + self.seed,
        )
        self.base: Plan = calibrated_plan(
            self.bed.policy, FP4_RULES, prompts=prompts, arithmetic=self.bed.arithmetic
        )
        self.bf16 = self.bed.plan(BF16_RULES)
        self.samples: list[TrainingSample] = []

    @property
    def floor(self) -> float:
        """Smallest mean |d log p| of the BF16 pairs."""
        return min(row.mean for row in self.rows if row.within_floor is None)

    def plan(self, rules: PlanRules) -> Plan:
        """Return the FP4 plan of the rollout under other rules of following."""
        return self.bed.plan(rules).with_exponents(self.base.static_exponents)

    def sample(self) -> None:
        """Make the FP4 rollout that every trainer scores."""
        self.on_event(f"FP4 rollout of {self.size.num_sequences} x {self.size.completion_tokens} tokens")
        self.samples = self._sampled(self.base)

    def measure_floor(self) -> None:
        """Measure the BF16 pairs, and what a BF16 trainer makes of the FP4 rollout."""
        live = self.bed.plan(LIVE_BF16_RULES)
        self.on_event("BF16 rollout, its own tokens")
        own = self._sampled(self.bf16)
        self._add("bf16", ("BF16", "BF16, live routing"), own, self.bed.score(live, own), is_floor=True)
        self._add("bf16.replayed", ("BF16", "BF16"), own, self.bed.score(self.bf16, own), is_floor=True)
        self.on_event("BF16 rollout, the FP4 rollout's tokens")
        forced = self.bed.force(self.bf16, self.samples)
        self._add(
            "bf16.same_tokens", ("BF16", "BF16"), forced, self.bed.score(self.bf16, forced), is_floor=True
        )
        routed = [routing_only(sample, self.bf16) for sample in self.samples]
        self._add("fp4_bf16", ("FP4", "BF16"), self.samples, self.bed.score(self.bf16, routed))

    def measure_nearest(self) -> None:
        """Measure rounding to nearest (QAT), with the router's own choice and with the rollout's."""
        for name, trainer, replays in (
            ("nearest.live", "nearest, live routing", False),
            ("nearest", "nearest", True),
        ):
            chosen = self.plan(PlanRules(guidance="none", replay_routing=replays))
            scored = self.bed.score(chosen, self.samples, measure=True)
            self._add(name, ("FP4", trainer), self.samples, scored)

    def measure_codec(self, way: Tried, speed: SiteValues | None) -> None:
        """Measure one codec on some layers."""
        chosen = self.plan(PlanRules(guidance=way.codec, layers=way.layers))
        rates = (None, None) if speed is None or way.layers != "all" else speed.rates(way.codec)
        self.measure_choice(way, chosen, rates)

    def measure_choice(
        self, way: Tried, chosen: Plan, rates: tuple[float | None, float | None] = (None, None)
    ) -> None:
        """Measure a plan whose codecs are known."""
        scored = self.bed.score(chosen, signed(self.samples, chosen), measure=True)
        names = [name for site, name in sorted(chosen.codecs.items()) if site.kind == "x"]
        activations, kv = large_bytes(names, layers=way.layers)
        widths = self._widths()
        self._add(
            way.id,
            ("FP4", f"follows {way.codec}"),
            self.samples,
            scored,
            layers=way.layers,
            guided=chosen.guided_sites,
            cost={
                "activation_bytes": activations,
                "kv_bytes": kv,
                "own_bytes": own_bytes(chosen.codecs, widths=widths),
                "is_shortened": is_shortened(chosen.codecs, widths=widths),
                "encode_rate": rates[0],
                "decode_rate": rates[1],
            },
        )

    def measure_auto(self) -> RateChoice:
        """Choose a codec per site for this floor, on a calibration rollout of its own, and measure the choice."""
        undecided = self.plan(PlanRules(guidance=AUTO))
        self.on_event("calibration rollout for the automatic rate")
        calibration = self._sampled(undecided, seed=CALIBRATION_SEED + self.seed)
        choice = choose_rates(
            self.bed, undecided, calibration, floor=self.floor, candidates=CANDIDATES, on_event=self.on_event
        )
        chosen = undecided.with_codecs(choice.codecs)
        self.measure_choice(Tried(codec=AUTO, layers="all"), chosen)
        return choice

    def _sampled(self, chosen: Plan, *, seed: int | None = None) -> list[TrainingSample]:
        """Roll out under a plan; another seed gives other prompts and draws."""
        seed = PROMPT_SEED + self.seed if seed is None else seed
        prompts = prompts_of(self.bed.policy, self.size, seed=seed)
        params = SamplingParams(max_tokens=self.size.completion_tokens, temperature=1.0, seed=seed)
        return self.bed.sample(chosen, prompts, params)

    def _widths(self) -> dict[str, int]:
        record = self.samples[0].record
        assert record is not None
        return {site.kind: part.width for site, part in record.sites.items()}

    def _add(
        self,
        name: str,
        pair: tuple[str, str],
        samples: Sequence[TrainingSample],
        scored: Scored,
        *,
        layers: str = "-",
        guided: Sequence[Site] = (),
        cost: Mapping[str, Any] | None = None,
        is_floor: bool = False,
    ) -> None:
        found = mismatch_row(samples, scored.logprobs)
        counts = _counted(scored, guided)
        row = GuidanceRow(
            id=name,
            rollout=pair[0],
            trainer=pair[1],
            layers=layers,
            mean=found["mean"],
            p99=found["p99"],
            largest=found["max"],
            k3=found["k3"],
            residual=counts.rates().get("mismatch_after"),
            local=counts.rates().get("mismatch_before"),
            undecoded=counts.undecoded if counts.syndrome_blocks else None,
            within_floor=None if is_floor else found["mean"] <= self.floor,
            **(cost or {}),
        )
        self.rows.append(row)
        self.on_row(row)


def _counted(scored: Scored, guided: Sequence[Site]) -> AgreementCounts:
    """Counts of the guided sites, of all sites without guidance."""
    wanted = {(site.kind, site.layer) for site in guided}
    parts = [counts for key, counts in scored.agreement.items() if key in wanted or not wanted]
    return sum(parts, AgreementCounts())


def best_row(rows: Sequence[GuidanceRow]) -> GuidanceRow | None:
    """Return the row at or below the floor with the fewest activation bytes; None if there is none.

    Rows whose codes are longer than the measured model's rows are passed over: they promise too much.
    """
    good = [row for row in rows if row.within_floor and row.activation_bytes and not row.is_shortened]
    return min(good, key=lambda row: (row.activation_bytes, row.mean), default=None)


def new_comparison(
    policy: Policy,
    size: Size,
    *,
    seed: int,
    on_row: Callable[[GuidanceRow], None],
    on_event: Callable[[str], None],
) -> Comparison:
    """Put a policy on its bed: real bf16 on an accelerator, emulated bf16 on a CPU.

    Args:
        policy: float32 weights, on the device where everything runs.
        size: the rollout's sizes.
        seed: of prompts and draws.
        on_row: called with every row.
        on_event: called with one line of text before anything that takes seconds.
    """
    device = next(policy.model.parameters()).device
    bed = SameTokens(
        policy=policy,
        arithmetic=arithmetic_of(device),
        rollout=size.rollout,
        micro_batch_tokens=MICRO_BATCH_TOKENS.get(device.type, 4096),
    )
    return Comparison(bed=bed, size=size, seed=seed, on_row=on_row, on_event=on_event)


def measure_everything(comparison: Comparison, *, ways: Sequence[Tried], is_auto: bool) -> RateChoice | None:
    """Measure every row: the floor, nearest rounding, each codec, and the automatic rate.

    Args:
        comparison: gets the rows.
        ways: codecs and layers.
        is_auto: whether codecs are also chosen per site.

    Returns:
        The automatic choice, None if it was not asked for.
    """
    comparison.sample()
    comparison.measure_floor()
    comparison.measure_nearest()
    comparison.on_event("catching the trainer's values for encode and decode rates")
    speed = site_values(comparison.bed, comparison.base, comparison.samples) if ways else None
    for way in ways:
        comparison.measure_codec(way, speed)
    return comparison.measure_auto() if is_auto else None
