"""The reference policy's configuration: bad values and contradictions in one line."""

import dataclasses

import pytest

from gtpo_megatron.config.algorithm import GRPOConfig, ReferenceConfig, ReferenceKLConfig
from gtpo_megatron.config.serialize import load_config, to_yaml
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu


def test_a_run_has_a_reference_if_something_reads_it():
    plain = tiny_cpu.grpo()
    assert not plain.has_reference
    assert tiny_cpu.grpo_kl().has_reference
    assert dataclasses.replace(plain, reference=ReferenceConfig(measured=True)).has_reference


@pytest.mark.parametrize("field", [{"path": "models/base"}, {"reset_every_steps": 3}])
def test_a_reference_that_nothing_reads_is_refused(field):
    with pytest.raises(ConfigError, match=r"reference\.(path|reset_every_steps)=.* nothing compares with a reference"):
        dataclasses.replace(tiny_cpu.grpo(), reference=ReferenceConfig(**field))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"reset_every_steps": -1}, "reset_every_steps=-1"),
        ({"path": 3}, "path=3: got int"),
        ({"measured": 1}, "measured"),
    ],
)
def test_bad_values_are_one_line(field, message):
    with pytest.raises(ConfigError, match=message):
        ReferenceConfig(**field)


def test_it_comes_back_from_yaml(tmp_path):
    config = dataclasses.replace(
        tiny_cpu.grpo_kl(),
        algorithm=GRPOConfig(reference_kl=ReferenceKLConfig(coef=0.1, estimator="k1", gradient="unbiased")),
        reference=ReferenceConfig(path="models/base", reset_every_steps=7),
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
