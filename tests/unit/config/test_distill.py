"""A teacher is there if the algorithm reads one, and only then."""

import dataclasses

import pytest

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import DistillConfig, GRPOConfig, TeacherConfig
from gtpo_megatron.config.serialize import load_config, to_yaml
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu


def test_a_teacher_that_is_missing_or_unread_is_refused():
    run = tiny_cpu.distill()
    with pytest.raises(ConfigError, match=r"algorithm DistillConfig without teacher.path.*set --teacher.path FOLDER"):
        dataclasses.replace(run, teacher=TeacherConfig())
    with pytest.raises(ConfigError, match=r"teacher.path=.* with algorithm GRPOConfig: it reads no teacher"):
        dataclasses.replace(run, algorithm=GRPOConfig())


def test_the_base_of_adapters_takes_no_memory_as_a_teacher():
    run = tiny_cpu.distill()
    assert run.has_own_teacher
    adapted = dataclasses.replace(run, adapter=AdapterConfig(rank=4))
    assert adapted.has_own_teacher
    base = dataclasses.replace(
        adapted, teacher=TeacherConfig(path=f"{run.model.path}/../{run.model.path.rpartition('/')[2]}")
    )
    assert not base.has_own_teacher
    # without adapters the first weights are no longer there after an update
    assert dataclasses.replace(run, teacher=TeacherConfig(path=run.model.path)).has_own_teacher
    assert not tiny_cpu.gtpo().has_own_teacher


def test_it_comes_back_from_yaml(tmp_path):
    config = dataclasses.replace(
        tiny_cpu.distill(),
        algorithm=DistillConfig(teacher_coef=0.5, reward_coef=1.0, entropy_coef=0.25, entropy_axis="matrix"),
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config
