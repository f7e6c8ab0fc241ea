"""The small GRPO: tasks, rewards, advantages, batches and the loss. It never imports a foreign engine or
trainer."""

from tracefp4.rl.advantages import AdvantageConfig, Advantages, group_advantages
from tracefp4.rl.batching import Batch, micro_batches, pad, token_logprobs
from tracefp4.rl.loss_metrics import merge_metrics
from tracefp4.rl.losses import LossConfig, LossData, LossOutput, grpo_loss, loss_denominator
from tracefp4.rl.rewards import Reward, RewardConfig, Scorer
from tracefp4.rl.samples import TrainingSample
from tracefp4.rl.tasks import JsonlTasks, ReasoningGymTasks, Task, TaskStream, encode_prompt
from tracefp4.rl.verifiers import extract_answer

__all__ = [
    "AdvantageConfig",
    "Advantages",
    "Batch",
    "JsonlTasks",
    "LossConfig",
    "LossData",
    "LossOutput",
    "ReasoningGymTasks",
    "Reward",
    "RewardConfig",
    "Scorer",
    "Task",
    "TaskStream",
    "TrainingSample",
    "encode_prompt",
    "extract_answer",
    "group_advantages",
    "grpo_loss",
    "loss_denominator",
    "merge_metrics",
    "micro_batches",
    "pad",
    "token_logprobs",
]
