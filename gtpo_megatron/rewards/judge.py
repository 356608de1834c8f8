"""A model as the judge: one that writes a score, or a reward model with a classification head."""

import re

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import DataError
from gtpo_megatron.judge.scores import find_score, without_thinking
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.request import Reward, RewardRequest
from gtpo_megatron.untrusted.text import shown


@states(needs_judge=True, fills_template=True)
async def judge(request: RewardRequest) -> Reward:
    """The score that a chat model writes, divided by ``reward.judge.full_score``.

    Raises:
        DataError: the judge fails, is cut, writes no score, or one outside of 0 to the full score.
    """
    config = request.judge.config
    values = {
        "prompt": request.prompt_text,
        "response": request.content,
        "answer": request.answer,
        "ended": request.ended,
        "num_prompt_tokens": str(request.num_prompt_tokens),
        "num_response_tokens": str(request.num_response_tokens),
    }
    for name in config.columns:
        if name not in request.columns:
            raise DataError(f"judge.template has {{{name}}}, and the row has {', '.join(request.columns) or 'none'}")
        values[name] = _as_text(request.columns[name])
    answer = await request.judge.chat([{"role": "user", "content": config.filled(values)}])
    if answer.is_cut:  # a score in it may be one that it only thinks about, or the first digit of a longer number
        raise DataError(
            f"the judge's answer was cut before its end: raise reward.judge.max_tokens={config.max_tokens}; "
            f"it ends with ...{shown(answer.text[-200:])}"
        )
    score = _score(answer.text, config)
    if not 0 <= score <= config.full_score:
        raise DataError(f"the judge wrote a score of {score:g}; expected 0 to {config.full_score:g}")
    parts = {"judge_score": score, "judge_tokens": float(answer.tokens)}
    return Reward(score / config.full_score, parts=parts, info={"judge": answer.text})


def _score(text: str, config: JudgeConfig) -> float:
    """The last score of the answer, in any usual form, or as the user's pattern has it; what is thought is no answer.

    Raises:
        DataError: there is none.
    """
    said = without_thinking(text)
    if not config.score_pattern:
        found = find_score(said, full_score=config.full_score)
        if found is None:
            raise DataError(_no_score(text, said))
        return found
    matches = list(re.finditer(config.score_pattern, said))
    if not matches:
        raise DataError(_no_score(text, said))
    written = matches[-1][1]
    try:
        return float(written)
    except (TypeError, ValueError):  # a group that takes no part, or takes more than a number
        raise DataError(f"the judge wrote the score {shown(written)}; expected a number") from None


def _no_score(text: str, said: str) -> str:
    where = "" if said == text else " after its thinking" if said.strip() else ", but thinking alone"
    return f"the judge wrote no score{where}: ...{shown(text[-200:])}"


@states(needs_judge=True)
async def reward_model(request: RewardRequest) -> Reward:
    """The score of a model with a classification head and one label, before any activation.

    Raises:
        DataError: the endpoint fails, or the model has several labels.
    """
    messages = [*request.messages, {"role": "assistant", "content": request.content}]
    answer = await request.judge.classify(messages)
    if len(answer.scores) != 1:
        raise DataError(f"the reward model gave {len(answer.scores)} scores; expected 1, of a model with one label")
    return Reward(answer.scores[0], parts={"judge_tokens": float(answer.tokens)})


def _as_text(value: object) -> str:
    """A column's value for the template: text as it is, lists one item per line."""
    if isinstance(value, list):
        return "\n".join(f"- {_as_text(one)}" for one in value)
    return value if isinstance(value, str) else str(value)
