"""Your own model: a folder in Hugging Face format, ``my-model`` where you stand, or ``--model.path FOLDER``.

A model with random weights answers nothing, so it learns something simpler: to write digits.
"""

from dataclasses import replace
from pathlib import Path

from gtpo_megatron.config.run import RunConfig
from recipes import tiny_cpu


def digits(response: str, answer: str) -> float:  # noqa: ARG001 - the reward does not look at the answer
    """The share of the characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def recipe() -> RunConfig:
    """The quickstart with another model and this reward."""
    tiny = tiny_cpu.gtpo(num_steps=20)
    return replace(
        tiny,
        name="own_model",
        model=replace(tiny.model, path="my-model"),
        reward=replace(tiny.reward, function=f"{Path(__file__).resolve()}:digits"),
        algorithm=replace(tiny.algorithm, success_threshold=0.2),
    )
