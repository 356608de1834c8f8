"""What an evaluation takes from a run."""

from dataclasses import fields, replace

from gtpo_megatron.config.evaluate import EngineConfig, defaults_of_run
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from recipes import tiny_cpu

OF_TRAINING = {
    *("group_size", "num_engines", "max_engine_restarts", "entropy_source", "placement", "returns_routing"),
    *("max_staleness", "partial", "over_sample", "stragglers", "pipeline_parallel_size", "nodes_per_engine"),
}
"""What the sampler of a run has besides: more engines and machines, turns with the trainer, and what it alone reads."""


def test_a_run_is_measured_by_an_engine_like_its_own():
    """Whatever else an engine may be told is the run's too, which this fails for until it is."""
    run = tiny_cpu.gtpo()
    rollout = replace(
        run.rollout,
        dtype="float32",
        head_dtype="model",
        kv_cache_mib=64,
        max_concurrent_sequences=7,
        tensor_parallel_size=2,
        expert_parallel=True,
    )
    found = defaults_of_run(replace(run, rollout=rollout)).engine.rollout(SamplingConfig())
    engine = [field.name for field in fields(RolloutConfig) if field.name not in {*OF_TRAINING, "sampling"}]
    assert {name: getattr(found, name) for name in engine} == {name: getattr(rollout, name) for name in engine}
    unlike = [name for name in engine if getattr(rollout, name) == getattr(RolloutConfig(), name)]
    assert not unlike, "a value that is the default shows nothing"


def test_defaults_of_the_engine_are_those_of_a_run():
    assert EngineConfig().rollout(SamplingConfig()) == RolloutConfig()
