"""Environments and a tokenizer for tests of trajectories of several turns."""

from dataclasses import dataclass, field

from tests.models.tiny_models import tiny_model
from tests.rollout.engines import make_engine, sampled

from tracefp4.rl.environments import End, EpisodeLimits, Reply
from tracefp4.rl.episodes import Episodes
from tracefp4.rl.rewards import RewardConfig, Scorer
from tracefp4.rl.tasks import Task

# 40 ids: 3 is "a", 4 is "b", 7 is "ab" (case ALN-5), the others one letter each
LETTERS = [*"!?%ab*+", "ab", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"]
END_ID = 2


class Letters:
    """A tokenizer that is not the inverse of its own decoder: "a" and "b" next to each other become one token."""

    chat_template = None

    def __len__(self):
        return len(LETTERS)

    def encode(self, text, *, add_special_tokens=True):
        ids = []
        while text:
            part = "ab" if text.startswith("ab") else text[0]
            ids.append(LETTERS.index(part))
            text = text[len(part) :]
        return ids

    def decode(self, ids, *, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return "".join(LETTERS[i] for i in ids if not (skip_special_tokens and i == END_ID))


@dataclass
class World:
    """An environment whose episodes answer by a function of (task, turn)."""

    answer: object
    """(task, turn) -> what the episode answers."""
    stop: tuple = ()
    turns: list = field(default_factory=list)
    """(task index, seed, turn) in the order of calls."""
    num_opened: int = 0
    num_closed: int = 0

    def prompt(self, task):
        return None

    def open(self, task, *, seed):
        self.num_opened += 1
        return WorldEpisode(self, task, seed)


@dataclass
class WorldEpisode:
    world: World
    task: Task
    seed: int

    def answer(self, turn):
        self.world.turns.append((self.task.index, self.seed, turn))
        return self.world.answer(self.task, turn)

    def close(self):
        self.world.num_closed += 1


def says(*contents, reward=None):
    """Answers turn i with contents[i], then ends."""

    def answer(task, turn):
        return Reply(content=contents[turn.index]) if turn.index < len(contents) else End(reward=reward)

    return answer


def talkative(reward=1.0):
    """A factory for recipes: two letters after the first turn, then the end; the reward is the turn's first letter."""

    def answer(task, turn):
        if turn.index == 0:
            return Reply(content="9" + turn.text[:1], tool_calls=1)
        return End(reward=reward * (ord((turn.text or "0")[0]) % 2))

    return World(answer)


def text_length(prompt, completion, answer):
    """Reward: characters of the text, line breaks included."""
    return float(len(completion))


def tasks(*prompts):
    return [Task(source="letters", index=i, prompt=text) for i, text in enumerate(prompts)]


def make_episodes(world, *, model=None, engine=None, on_error="zero", **changes):
    """Episodes over a tiny engine in the control arithmetic."""
    if engine is None:
        tokenizer = Letters()
        engine = make_engine(model or tiny_model(), control=True, decode=tokenizer.decode)
    scorer = Scorer(
        RewardConfig(verifier="function", function="tests.rl.worlds:text_length", on_error=on_error)
    )
    limits = EpisodeLimits(max_turns=changes.pop("max_turns", 8), turn_tokens=changes.pop("turn_tokens", 0))
    return Episodes(world, engine=engine, tokenizer=Letters(), scorer=scorer, limits=limits, **changes)


def drawn(max_tokens, *, n=2, seed=1, **changes):
    return sampled(max_tokens, n=n, seed=seed, **changes)
