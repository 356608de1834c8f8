"""A real engine with tensor parallelism in a process of Ray's: it is either whole or dead."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.orchestration.on_ray.collect import collect, collect_survivors
from gtpo_megatron.orchestration.on_ray.processes import EngineProcess
from gtpo_megatron.orchestration.stages.rollouts import in_chunks, received
from gtpo_megatron.rollout.engine_arguments import engine_environment
from gtpo_megatron.rollout.requests import SampleRequest
from recipes import tiny_cpu
from tests.integration.own_ray import own_ray
from tests.integration.runs import LEAVINGS, shared_memory_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    LEAVINGS,
]

DEADLINE_S = 600.0


class LoadedEngine(EngineProcess):
    """With the folder's weights, which an engine of a run never reads: it waits for a push."""

    def start(self):
        from gtpo_megatron.rollout.vllm_engine import VllmEngine

        config = self._config
        self.instance = VllmEngine(
            config.model.path, config.rollout, max_sequence_tokens=config.model.max_sequence_tokens, seed=config.seed
        )
        self.instance.on_worker_death(self._end)


@pytest.fixture
def engine(tmp_path):
    import ray

    config = tiny_cpu.gtpo()
    config = replace(config, rollout=replace(config.rollout, tensor_parallel_size=2, kv_cache_mib=16))
    variables = engine_environment(config.rollout, has_gpus=False) | {"OMP_NUM_THREADS": "1"}
    with own_ray():
        actor = ray.remote(LoadedEngine).options(num_cpus=0, runtime_env={"env_vars": variables})
        process = actor.remote(to_plain(config), str(tmp_path), str(Path.cwd()), prefix="[engine]")
        collect({"engine": process.start.remote()}, stage="start", deadline_s=DEADLINE_S)
        yield process


def test_an_engine_whose_worker_dies_dies_with_it(engine, tmp_path):
    sampling = tiny_cpu.gtpo().rollout.sampling

    def sample():
        """Handle of the responses, if the engine lives, and who died."""
        requests = [SampleRequest(prompt_ids=(1, 2, 3), group_id=0, sample=sample) for sample in range(2)]

        def chunks(held):
            return dict(enumerate(in_chunks(held.generate(requests, sampling, seed=1))))

        stream = engine.sample.options(num_returns="streaming").remote(chunks)
        _, dead = collect_survivors({"engine": stream.completed()}, stage="rollout", deadline_s=DEADLINE_S)
        return None if dead else received(stream)[0], dead

    handle, dead = sample()
    assert (len(handle.response_lengths), dead) == (2, set())
    _, pid = collect({"engine": engine.identity.remote()}, stage="start", deadline_s=DEADLINE_S)["engine"]
    workers = [child for child in psutil.Process(pid).children() if "resource_tracker" not in " ".join(child.cmdline())]
    assert len(workers) == 2
    left = shared_memory_of([pid, *(worker.pid for worker in workers)])
    os.kill(workers[1].pid, signal.SIGKILL)
    assert sample() == (None, {"engine"})
    assert "a worker of this engine died" in (tmp_path / "log.txt").read_text()
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers)
    for path in left:
        path.unlink(missing_ok=True)
