"""What a run is: one frozen dataclass per table of a recipe, composed into RunConfig. Plain data, no torch.

A recipe is TOML for people; `cli.config` reads it strictly into these classes, and the resolved form, with
every default, goes into the run directory as JSON. Each class checks its own ranges; nothing here runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tracefp4.errors import ConfigError
from tracefp4.patching.rules import PlanRules


def _require(is_valid: bool, name: str, value: object, allowed: str) -> None:
    if not is_valid:
        raise ConfigError(
            f"{name}: got {value!r}; allowed: {allowed}. Change it in the recipe or with --set."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """`[model]`: the checkpoint that the run starts from."""

    path: str
    """Local directory of a Hugging Face checkpoint of the Qwen3-MoE family, tokenizer included. Required."""
    device: str = "auto"
    """Where engine and trainer compute: `cpu`, `cuda`, `cuda:1`; `auto` is `cuda` where there is one. A resumed run
    stays on the kind of device, and in the arithmetic, that it was started on."""
    arithmetic: Literal["auto", "emulated", "native"] = "auto"
    """`native`: bf16 tensors; `emulated`: bf16 values in float32 storage, rounded where bf16 would be written; `auto`
    is `native` on `cuda` and `emulated` on `cpu`, where bf16 products are about 100 times slower."""

    def __post_init__(self) -> None:
        known = self.device in ("auto", "cpu", "cuda") or self.device.removeprefix("cuda:").isdigit()
        _require(known, "model.device", self.device, "'auto', 'cpu', 'cuda' or 'cuda:N'")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """`[task]`: where prompts come from and how answers are judged."""

    kind: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    """`reasoning_gym`: a generated task by name; `jsonl`: a file with one problem per line."""
    name: str = ""
    """Name of the reasoning-gym task, e.g. `basic_arithmetic`. Required for that kind."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the reasoning-gym task, passed to it as they stand."""
    path: str = ""
    """The JSONL file: `prompt` or chat `messages`, and `answer`, per line. Required for that kind."""
    seed: int = 0
    """Seed of the prompt stream; the held-out items use another one derived from it."""
    reward: str = "task"
    """`task` (the task's own score), `math_verify`, or a dotted function `package.module:function`."""
    eval_path: str = ""
    """JSONL file of held-out items; needed to evaluate a JSONL task (a generated task has its own held-out seed)."""
    answer_tag: str = "answer"
    """The answer is the last <tag>...</tag> of a completion; empty: the whole completion is the answer."""
    reward_timeout_s: float = 10.0
    """Wall-clock limit of one reward call, in seconds."""
    reward_on_error: Literal["zero", "raise"] = "zero"
    """What a reward or an environment that raises or times out becomes: reward 0 (counted), or the end of the run."""
    reward_isolation: Literal["timer", "process"] = "timer"
    """How the limit is enforced: `timer` interrupts Python code; `process` kills a worker, whatever it runs."""
    environment: str = ""
    """What answers the policy between its turns: `calculator`, or a factory `package.module:factory`; empty: nothing,
    completions have one turn. rollout.max_tokens then limits a whole trajectory, the environment's tokens included."""
    environment_options: Mapping[str, object] = field(default_factory=dict)
    """Keywords of the environment's factory."""
    environment_timeout_s: float = 10.0
    """Wall-clock limit of one call of the environment, in seconds."""
    environment_workers: int = 0
    """Threads that call environments while the engine goes on; 0: they are called between engine steps, in a fixed
    order, which a run needs that is to end in the same bytes every time."""
    max_turns: int = 8
    """Most turns of the policy in one trajectory; used with an environment."""
    turn_tokens: int = 0
    """Longest turn, in sampled tokens; 0: no limit beyond rollout.max_tokens."""

    def __post_init__(self) -> None:
        _require(
            self.kind != "reasoning_gym" or bool(self.name), "task.name", self.name, "a reasoning-gym task"
        )
        _require(self.kind != "jsonl" or bool(self.path), "task.path", self.path, "a JSONL file")
        _require(self.reward_timeout_s > 0, "task.reward_timeout_s", self.reward_timeout_s, "above 0 seconds")
        known = self.reward in ("task", "math_verify") or self.reward.count(":") == 1
        _require(known, "task.reward", self.reward, "'task', 'math_verify' or 'package.module:function'")
        self._check_environment()

    def _check_environment(self) -> None:
        known = self.environment in ("", "calculator") or self.environment.count(":") == 1
        allowed = "'calculator', 'package.module:factory' or nothing"
        _require(known, "task.environment", self.environment, allowed)
        limit = self.environment_timeout_s
        _require(limit > 0, "task.environment_timeout_s", limit, "above 0 seconds")
        _require(self.max_turns >= 1, "task.max_turns", self.max_turns, "1 or more")
        for name in ("environment_workers", "turn_tokens"):
            _require(getattr(self, name) >= 0, f"task.{name}", getattr(self, name), "0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """`[rollout]`: how completions are sampled, and the size of the engine."""

    num_prompts: int = 16
    """Prompts per rollout (Q)."""
    samples_per_prompt: int = 8
    """Completions per prompt (R), the GRPO group."""
    max_tokens: int = 64
    """Longest completion, in tokens."""
    partial_groups: int = 0
    """Prompts under way beyond num_prompts (partial rollouts): a step trains as soon as num_prompts groups are
    complete; what is unfinished then goes on under the new weights. 0: every step waits for its longest completion."""
    temperature: float | None = None
    """Sampling temperature, above 0; absent: the checkpoint's generation config decides (1 if it is silent)."""
    top_p: float | None = None
    """Nucleus mass; absent: from the checkpoint. Training refuses anything but 1."""
    top_k: int | None = None
    """Number of most likely tokens kept; absent: from the checkpoint. Training refuses anything but 0."""
    num_pages: int = 512
    """Pages of the KV pool, shared by all sequences."""
    page_size: int = 16
    """Tokens per page."""
    max_batch: int = 64
    """Sequences that run at once."""
    max_tokens_per_step: int = 2048
    """Most tokens in one engine step, prefill and decode together."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the tokens of the text are part of it, so that the policy learns to write them."""
    prefix_cache: bool = False
    """Keep the pages of finished sequences, with their records, for prompts that begin alike. Every weight update
    clears them, and the samples of one prompt share its pages anyway: it pays with several turns or long system
    prompts."""
    max_swapped_pages: int | None = None
    """Most KV pages that may wait in host memory; pages beyond come back from recorded codes. Absent: no limit."""
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """How the engine stores what gated delta layers remember (Qwen3.5): bfloat16 takes half the memory and moves half
    the bytes at every step, auto is as wide as the trainer computes it. Only for models with such layers."""
    keep_pool: bool = True
    """Whether the engine keeps the memory of its pages while the trainer works. False: it is the trainer's between two
    rollouts, as in vLLM's sleep mode, and the next rollout makes the pages and captures its decode passes again, which
    takes time. True is the default, as there: num_pages says what is taken, for the whole run. Results are the same."""

    def __post_init__(self) -> None:
        for name in (
            "num_prompts",
            "samples_per_prompt",
            "max_tokens",
            "num_pages",
            "page_size",
            "max_batch",
        ):
            _require(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "1 or more")
        surplus = self.partial_groups
        allowed = f"0 (off) to rollout.num_prompts ({self.num_prompts}), or steps could not train what is due"
        _require(0 <= surplus <= self.num_prompts, "rollout.partial_groups", surplus, allowed)
        if self.temperature is not None:
            _require(self.temperature > 0, "rollout.temperature", self.temperature, "above 0")
        if self.top_p is not None:
            _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "above 0, at most 1")
        if self.top_k is not None:
            _require(self.top_k >= 0, "rollout.top_k", self.top_k, "0 (off) or more")
        _require(
            self.max_tokens_per_step >= self.max_batch,
            "rollout.max_tokens_per_step",
            self.max_tokens_per_step,
            f"at least rollout.max_batch ({self.max_batch})",
        )
        _require(all(self.stop), "rollout.stop", self.stop, "texts that are not empty")
        if self.max_swapped_pages is not None:
            limit = self.max_swapped_pages
            _require(limit >= 0, "rollout.max_swapped_pages", limit, "0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """`[train]`: the optimizer and its steps."""

    steps: int = 100
    """Rollouts of the run; each is followed by `optimizer_steps_per_rollout` optimizer steps."""
    lr: float = 1e-5
    """Peak learning rate of AdamW."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0; constant afterwards."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the two Adam moments."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    optimizer_states: Literal["float32", "8bit", "host"] = "float32"
    """Adam's two moments beside the float32 master weights: `float32` on the device (8 bytes a parameter), `8bit` there
    (2 bytes, needs the `adam8bit` extra), or `host`: moments and masters in pinned host memory, streamed through the
    device at every step."""
    micro_batch_tokens: int = 4096
    """Most tokens in one forward pass of the trainer, padding included unless samples are packed."""
    optimizer_steps_per_rollout: int = 1
    """Optimizer steps that one rollout's samples are split over."""
    rollout_ahead: int = 0
    """Rollouts that are sampled ahead of training: 0 trains on fresh samples, n on samples n versions old. The
    last n rollouts of a run are not trained on."""
    max_version_diff: int = 3
    """Largest lag, in weight versions, of a sample that is still used; older ones are dropped and counted. A sample is
    as old as its oldest position. With rollout.partial_groups a step waits for those that could not be used later."""
    seed: int = 0
    """Seed of everything that the run draws."""
    packing: bool = False
    """Put the samples of a micro-batch into one row without padding; results are those of padded rows."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """`full`: keep one activation per decoder layer and recompute the rest in the backward pass, under the same
    guidance; `none` keeps all."""
    truncated: Literal["mask", "penalize", "train"] = "mask"
    """Completions that ran into max_tokens: left out of the loss, given reward 0, or trained as they are."""
    transmission_every: int = 25
    """Steps between measurements of how much of an update the quantized forward sees; 0 never measures."""
    transmission_samples: int = 8
    """Samples of the step that such a measurement scores: four extra passes over them."""
    agreement_every: int = 10
    """Steps between measurements of how many codes differ from the rollout's, by site and layer; 0 never."""
    agreement_samples: int = 8
    """Samples of the step that such a measurement scores: one extra pass over them, with their full records."""
    saturation_alarm: float = 0.01
    """Share of a site's blocks above the largest scale from which on a run warns, because values have outgrown a static
    exponent; 1 never warns."""

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batch_tokens", "optimizer_steps_per_rollout"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "1 or more")
        for name in ("warmup_steps", "weight_decay", "grad_clip", "rollout_ahead", "max_version_diff"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        for name in ("transmission", "agreement"):
            every, samples = getattr(self, f"{name}_every"), getattr(self, f"{name}_samples")
            _require(every >= 0, f"train.{name}_every", every, "0 (never) or more")
            _require(samples >= 1, f"train.{name}_samples", samples, "1 or more")
        limit = self.saturation_alarm
        _require(0 <= limit <= 1, "train.saturation_alarm", limit, "0 to 1")
        _require(self.lr > 0, "train.lr", self.lr, "above 0")
        _require(
            all(0 <= beta < 1 for beta in self.betas), "train.betas", self.betas, "two numbers in [0, 1)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """`[loss]`: the policy-gradient loss."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """`token_mean`: mean over all trained tokens; `dr_grpo`: sum over tokens divided by a constant."""
    advantage_std: bool = True
    """Divide the advantages of a group by its unbiased standard deviation + 1e-6."""
    tis_cap: float = 5.0
    """Cap of the truncated importance weight old/rollout; 0 switches the weight off."""
    kl_coef: float = 0.0
    """Weight of the KL penalty towards the starting checkpoint; 0 loads no reference model."""

    def __post_init__(self) -> None:
        _require(0 < self.clip_low < 1, "loss.clip_low", self.clip_low, "above 0, below 1")
        _require(self.clip_high > 0, "loss.clip_high", self.clip_high, "above 0")
        _require(self.tis_cap >= 0, "loss.tis_cap", self.tis_cap, "0 (off) or more")
        _require(self.kl_coef >= 0, "loss.kl_coef", self.kl_coef, "0 (off) or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """`[run]`: what is written, where, and how often."""

    dir: str = "runs/run"
    """Run directory: resolved config, manifest, metrics, checkpoints, records."""
    checkpoint_every: int = 10
    """Steps between checkpoints; 0 writes only the last one."""
    keep_last: int = 2
    """Checkpoints that are kept."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard (needs the `tensorboard` extra)."""
    wandb: bool = False
    """Also send metrics to Weights & Biases (needs the `wandb` extra and its own log-in)."""
    time_limit_s: float = 0.0
    """Wall-clock seconds of the process, opening included: no further step begins once another one, the checkpoint and
    the last evaluation would not fit, judged by how long each took last. At least one step is taken; the run then ends
    as after its last step, and --resume goes on. 0: no limit."""
    eval_every: int = 0
    """Steps between evaluations on held-out items; 0 evaluates before and after only."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    eval_items: int = 256
    """Held-out items per evaluation; 0 skips evaluation."""

    def __post_init__(self) -> None:
        _require(bool(self.dir), "run.dir", self.dir, "a directory name")
        _require(self.keep_last >= 1, "run.keep_last", self.keep_last, "1 or more")
        for name in ("checkpoint_every", "eval_every", "eval_items", "time_limit_s"):
            _require(getattr(self, name) >= 0, f"run.{name}", getattr(self, name), "0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordsConfig:
    """`[records]`: where guidance records are between rollout and training, and for how long they stay."""

    store: str = "memory"
    """`memory`: with the samples, in this process; `directory`: records/ in the run directory; `shared`: shared memory
    of this host; or the address of a `tracefp4 store serve`, such as `tcp://10.0.0.5:5555`."""
    key: str = ""
    """Key file of the server at that address, as `tracefp4 store key` wrote it; empty: the server has none."""
    when_full: Literal["wait", "drop_trajectory"] = "wait"
    """What happens when the store cannot keep up: the rollout waits, or whole trajectories lose their guidance
    (their positions round to nearest, counted)."""
    max_queue_mb: float = 256.0
    """Records that wait to be written, at most, in MiB."""
    keep_versions: int = 4
    """Weight versions whose records are kept; older ones are removed, so the space they take is bounded."""
    capacity_mb: float = 1024.0
    """Size of the shared memory, in MiB."""

    def __post_init__(self) -> None:
        has_server = self.store.startswith(("tcp://", "ipc://"))
        known = self.store in ("memory", "directory", "shared") or has_server
        allowed = "'memory', 'directory', 'shared', or an address such as 'tcp://host:5555'"
        _require(known, "records.store", self.store, allowed)
        _require(
            has_server or not self.key, "records.key", self.key, "empty, unless records.store is an address"
        )
        _require(self.keep_versions >= 1, "records.keep_versions", self.keep_versions, "1 or more")
        for name in ("max_queue_mb", "capacity_mb"):
            _require(getattr(self, name) > 0, f"records.{name}", getattr(self, name), "above 0 MiB")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run: the tables of a recipe, in this order."""

    model: ModelConfig
    """The starting checkpoint."""
    task: TaskConfig
    """Prompts and rewards."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling and engine."""
    quantization: PlanRules = field(default_factory=PlanRules)
    """What is FP4, what is recorded, and how it is followed; the same in engine and trainer."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimizer."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Loss."""
    records: RecordsConfig = field(default_factory=RecordsConfig)
    """Store of guidance records."""
    run: RunSettings = field(default_factory=RunSettings)
    """Output."""

    def __post_init__(self) -> None:
        rules = self.quantization
        _require(
            rules.mode != "bf16" or rules.guidance == "none",
            "quantization.guidance",
            rules.guidance,
            'only "none" with quantization.mode = "bf16", which records nothing',
        )
        _require(
            rules.gate != "noise" or rules.guidance != "none",
            "quantization.gate",
            rules.gate,
            '"auto" or "none" with quantization.guidance = "none", which leaves nothing to gate',
        )
        samples = self.rollout.num_prompts * self.rollout.samples_per_prompt
        _require(
            samples >= self.train.optimizer_steps_per_rollout,
            "train.optimizer_steps_per_rollout",
            self.train.optimizer_steps_per_rollout,
            f"at most the {samples} samples of one rollout",
        )
        oldest = self.train.rollout_ahead + 1
        _require(
            self.records.store == "memory" or self.records.keep_versions >= oldest,
            "records.keep_versions",
            self.records.keep_versions,
            f"at least {oldest} with train.rollout_ahead = {self.train.rollout_ahead}, or they leave too early",
        )
        if self.rollout.partial_groups:
            self._check_partial()

    def _check_partial(self) -> None:
        """Refuse what partial rollouts cannot do."""
        environment = self.task.environment
        allowed = "none with rollout.partial_groups above 0: an episode's state is in no checkpoint"
        _require(not environment, "task.environment", environment, allowed)
        lag, ahead = self.train.max_version_diff, self.train.rollout_ahead
        allowed = f"above train.rollout_ahead ({ahead}) with rollout.partial_groups, or nothing can go on"
        _require(lag > ahead, "train.max_version_diff", lag, allowed)
