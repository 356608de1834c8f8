"""A rollout engine in a process of its own, driven call by call: vLLM takes over the process that it is in."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.rollout.engine_arguments import engine_environment
from gtpo_megatron.rollout.requests import SampleRequest
from recipes.tiny_cpu import ASSETS

MODEL = str(ASSETS / "tiny_qwen2")
_engine: Any = None


class EngineHost:
    """Owns the process."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model: str = MODEL,
        max_sequence_tokens: int = 224,
        conversation: dict[str, Any] | None = None,
        **environment: str,
    ) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._pool.submit(_start, model, config, max_sequence_tokens, conversation or {}, environment).result()

    def ask(self, question: str, *args: Any) -> Any:
        """``question(engine, *args)``, a function of ``engine_questions``, which imports vLLM."""
        return self._pool.submit(_ask, question, *args).result()

    def generate(self, requests: list[SampleRequest], sampling: SamplingConfig, seed: int = 0) -> Any:
        """A batch."""
        return self._pool.submit(_generate, requests, sampling, seed).result()

    def close(self) -> None:
        """Ends the process."""
        self._pool.submit(_close).result()
        self._pool.shutdown()


def _start(
    model: str,
    config: RolloutConfig,
    max_sequence_tokens: int,
    conversation: dict[str, Any],
    environment: dict[str, str],
) -> None:
    global _engine
    os.environ.update(engine_environment(config, has_gpus=False) | environment)
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    _engine = VllmEngine(model, config, max_sequence_tokens=max_sequence_tokens, seed=0, num_threads=1, **conversation)


def _close() -> None:
    _engine.close()


def _ask(question: str, *args: Any) -> Any:
    from tests.integration import engine_questions

    return getattr(engine_questions, question)(_engine, *args)


def _generate(requests: list[SampleRequest], sampling: SamplingConfig, seed: int) -> Any:
    return _engine.generate(requests, sampling, seed=seed)
