"""The folder that a run, an evaluation or a preflight reads, for each way of naming a model."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gtpo_megatron.config.model import is_gguf, is_hub_name
from gtpo_megatron.config.serialize import AnyConfig
from gtpo_megatron.weights.hf.hub import hub_folder

Config = TypeVar("Config", bound=AnyConfig)


MODELS = ("model", "reference", "teacher")
"""Sections of a configuration that name a model in ``path``; not every kind of configuration has all."""


def with_model_folder(config: Config, earlier: AnyConfig | None = None) -> Config:
    """The configuration with folders as ``path`` of its models; see :func:`model_folder`, which may raise.

    Args:
        config: as it was asked for.
        earlier: of the run that is continued.
    """
    found = {}
    for name in MODELS:
        section, before = getattr(config, name, None), getattr(earlier, name, None)
        if section is None or not section.path:
            continue
        folder = model_folder(section.path, "" if before is None else before.path)
        if folder is not None:
            found[name] = replace(section, path=str(folder))
    return replace(config, **found) if found else config


def model_folder(path: str, earlier: str = "") -> Path | None:
    """The folder made or downloaded for a model that is named otherwise; None: the name is that of a folder.

    Raises:
        ConfigError: a GGUF file that cannot be converted, or a model that the hub does not give.
        CheckpointError: the disk is full.
        ModuleNotFoundError: a conversion is due, and the package gguf is missing.
    """
    if is_gguf(path):
        from gtpo_megatron.orchestration.gguf_model import converted_folder  # with torch

        return converted_folder(path)
    if not is_hub_name(path):
        return None
    return hub_folder(path, earlier)
