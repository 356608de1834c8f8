"""Files and folders of this machine that a configuration names: they must be there, and be seen inside a container."""

from collections.abc import Iterator
from pathlib import Path

from gtpo_megatron.config.algorithm.named import algorithm_name
from gtpo_megatron.config.model import is_gguf
from gtpo_megatron.config.named_function import named_file
from gtpo_megatron.config.problems import DatasetRef
from gtpo_megatron.config.reward import weighted_names
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import AnyConfig
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.conversations.verifiers import is_of_verifiers
from gtpo_megatron.weights.gguf.source import gguf_file

BEGINNING = "adapter.path"
"""Of a run that begins; one that has a checkpoint does not read it."""


def named_data(config: AnyConfig) -> Iterator[tuple[str, DatasetRef]]:
    """Field and data set of each that a run or a warm start reads."""
    yield "data.train_path", config.data.train
    if isinstance(config, SftConfig):
        if config.data.heldout is not None:
            yield "data.heldout_path", config.data.heldout
    else:
        yield from ((f"evaluation ({label})", dataset) for label, dataset in config.evaluation.sets.items())


def named_files(config: AnyConfig) -> Iterator[tuple[str, Path]]:
    """Field and path of each; data sets and models of the hub, and importable modules, are none."""
    yield from ((field, Path(dataset.path)) for field, dataset in named_data(config) if dataset.path)
    yield from _files_of_run(config.of_ranks() if isinstance(config, SftConfig) else config)


def _files_of_run(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Those besides data sets."""
    if is_local(config.model.path):
        named = config.model.path
        yield "model.path", gguf_file(named) if is_gguf(named) else Path(named)
    paths = [
        ("reference.path", config.reference.path),
        ("teacher.path", config.teacher.path),
        (BEGINNING, config.adapter.path),
        ("reward.packages", config.reward.packages),
        ("reward.judge.api_key_file", config.reward.judge.api_key_file),
    ]
    yield from ((field, Path(path)) for field, path in paths if path)
    for field, name in _functions(config):
        if (file := named_file(name)) is not None:
            yield field, file


def _functions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What is named as ``module:function`` or ``FILE.py:function``."""
    yield from (("reward.function", name) for _, name in weighted_names(config.reward.function))
    if not is_of_verifiers(config.environment.name):
        yield "environment.name", config.environment.name
    yield from (("logging.sinks", name) for name in config.logging.sinks)
    yield "algorithm", algorithm_name(type(config.algorithm))


def is_local(model: str) -> bool:
    """A folder rather than a name of the hub, ``owner/name``."""
    return Path(model).exists() or model.startswith((".", "/", "~")) or model.count("/") != 1
