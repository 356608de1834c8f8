"""Random episodes that branch, told twice: as a tree of turns, and as the row and branches that the package has."""

import random
from dataclasses import dataclass, field

import torch

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.branches import NOTHING, Branch

FRESH, AGAIN, ON = "fresh", "again", "on"


@dataclass
class Turn:
    """What the policy read between ``after`` and itself, and what it wrote; tokens are numbers that occur once."""

    after: "Turn | None"
    context: list[int]
    own: list[int]
    is_fresh: bool = False  # it reads nothing of what was before, the episode's prompt included

    def path(self):
        """Tokens from the first that the policy read, as (token, whether it wrote it)."""
        before = self.after.path() if self.after else []
        return before + [(token, False) for token in self.context] + [(token, True) for token in self.own]


@dataclass
class Episode:
    prompt: list[int]
    turns: list[Turn]
    row: list[int] = field(default_factory=list)  # the response
    is_own: list[bool] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    def sequence(self, turn):
        """All tokens of a turn's path, the prompt included where it is read."""
        first = turn
        while first.after:
            first = first.after
        return ([] if first.is_fresh else [(token, False) for token in self.prompt]) + turn.path()

    def turn_of(self, token):
        return next(turn for turn in self.turns if token in turn.own)

    def own_before(self, token):
        """The policy's tokens that a token of its was sampled after."""
        path = [one for one, is_own in self.turn_of(token).path() if is_own]
        return path.index(token)

    def depth(self, token):
        """Turns that the turn of a token was sampled after."""
        turn, count = self.turn_of(token), 0
        while turn.after:
            turn, count = turn.after, count + 1
        return count


def random_episode(seed, *, max_turns=7):
    """An episode of 1 to ``max_turns`` turns: on from any of them, anew, or once more after what one has read."""
    draw = random.Random(seed)
    numbers = iter(range(1 + 1000 * seed, 1000 * (seed + 1)))
    some = lambda low, high: [next(numbers) for _ in range(draw.randint(low, high))]  # noqa: E731
    episode = Episode(some(1, 4), [])
    ends: dict[int, tuple[int, int]] = {}  # by id of a turn, where in the row its tokens begin (as a fork) and end
    for number in range(draw.randint(1, max_turns)):
        kind = draw.choice([ON, ON, FRESH, AGAIN]) if number else ON
        at = len(episode.row)
        if not number:
            turn = Turn(None, [], some(1, 3))
            ends[id(turn)] = (0, len(turn.own))
        elif kind == FRESH:
            turn = Turn(None, some(1, 4), some(1, 3), is_fresh=True)
            episode.branches.append(Branch(at, NOTHING))
            ends[id(turn)] = (at + len(turn.context), at + len(turn.context) + len(turn.own))
        elif kind == AGAIN:
            other = draw.choice(episode.turns)
            fork = ends[id(other)][0]
            turn = Turn(other.after, [], some(1, 3), is_fresh=other.is_fresh)
            turn.read = other  # its context is the other's, which the row has once
            episode.branches.append(Branch(at, fork))
            ends[id(turn)] = (fork, at + len(turn.own))
        else:
            after = draw.choice(episode.turns[-2:])
            turn = Turn(after, some(0 if after is not episode.turns[-1] else 1, 3), some(1, 3))
            fork = ends[id(after)][1]
            if fork != at:
                episode.branches.append(Branch(at, fork))
            begin = at + len(turn.context) if turn.context else (fork if fork != at else at)
            ends[id(turn)] = (begin, at + len(turn.context) + len(turn.own))
        episode.row += turn.context + turn.own
        episode.is_own += [False] * len(turn.context) + [True] * len(turn.own)
        if kind == AGAIN:
            turn.context = list(turn.read.context)
        episode.turns.append(turn)
    return episode


def batch_of(episodes):
    """The episodes as responses of one batch."""
    width = max(len(one.row) for one in episodes)
    padded = lambda rows, fill: torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])  # noqa: E731
    prompts = max(len(one.prompt) for one in episodes)
    return RolloutBatch(
        prompt_ids=torch.tensor([[*one.prompt, *[0] * (prompts - len(one.prompt))] for one in episodes]),
        prompt_lengths=torch.tensor([len(one.prompt) for one in episodes]),
        response_ids=padded([one.row for one in episodes], 0),
        response_lengths=torch.tensor([len(one.row) for one in episodes]),
        loss_mask=padded([one.is_own for one in episodes], False),
        rollout_logprobs=torch.zeros(len(episodes), width),
        group_ids=torch.arange(len(episodes)) // 4,
        truncated=torch.zeros(len(episodes), dtype=torch.bool),
        policy_version=0,
        branches=tuple(tuple(one.branches) for one in episodes),
    )
