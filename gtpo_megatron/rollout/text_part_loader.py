"""How an engine reads the text part of a folder whose model also sees."""

import dataclasses
from collections.abc import Iterator

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from gtpo_megatron.rollout.engine_arguments import TEXT_PART_FORMAT
from gtpo_megatron.weights.text_part import text_name


class TextPartLoader(DefaultModelLoader):
    """vLLM's own loader, which gives a model of text its tensors by their names and leaves the others out."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="hf"))

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the text, under its name in a folder of text alone."""
        for stored, tensor in super().get_all_weights(model_config, model):
            if (name := text_name(stored)) is not None:
                yield name, tensor


def register() -> None:
    """Tells vLLM of it, in this process."""
    register_model_loader(TEXT_PART_FORMAT)(TextPartLoader)
