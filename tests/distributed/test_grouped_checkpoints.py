"""A checkpoint of a CPU's layers, whose experts run one after another, is one of a GPU's grouped layers, and back."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.grouped_rank import GroupedTask
from tests.distributed.test_actor_checkpoint import one_step, save, start
from tests.distributed.test_expert_layouts import LAYOUTS
from tests.distributed.tiny_world import make_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch's checkpoint warn of deprecations of their own
]

ROOT = Path(__file__).parents[2]


def run_grouped(tmp_path, task):
    """On ranks that are programs of their own: a process that has imported Megatron knows no Transformer Engine."""
    path = tmp_path / "task.pickle"
    path.write_bytes(pickle.dumps(task))
    Path(task.target).mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.distributed.grouped_rank", str(path), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(task.config.parallel.num_ranks)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), errors[0][-3000:]


def trained(rank, world_size, init_method, config, folder):
    actor = start(rank, init_method, config)
    one_step(actor, config, 1)
    save(actor, folder)
    return one_step(actor, config, 2)["optimizer/grad_norm"]


def resumed(rank, world_size, init_method, config, folder):
    actor = start(rank, init_method, config)
    actor.checkpoint.load(Path(folder), checksums={})
    actor._policy_version = 1  # which the push after a resume says
    return one_step(actor, config, 2)["optimizer/grad_norm"]


@pytest.mark.timeout(600)  # nine processes that import torch, on a busy machine
@pytest.mark.parametrize(
    ("family", "cpu", "gpu"),
    [
        ("qwen3_moe", "ep2_sharded_optimizer", "ep2_sharded_optimizer"),
        ("qwen3_moe", "ep2", "tp2_etp2"),
        ("glm4_moe", "tp2_etp1_ep2", "ep2_pp2"),
        ("gpt_oss", "tp2_etp1_ep2", "ep2_pp2"),
    ],
)
def test_a_checkpoint_goes_to_grouped_experts_and_back(tmp_path, family, cpu, gpu):
    """Weights and Adam's moments to the last bit under the same keys; a CPU goes on from the grouped ranks' own."""
    folder, source, target = (tmp_path / name for name in ("model", "source", "target"))
    make_expert_model(folder, family)
    source.mkdir()
    config = make_config(folder, LAYOUTS[cpu])
    norms = run_processes(trained, config.parallel.num_ranks, config, str(source), timeout_s=300)
    grouped = make_config(folder, LAYOUTS[gpu])
    task = GroupedTask(config=grouped, init_method=f"file://{tmp_path}/store", source=str(source), target=str(target))
    run_grouped(tmp_path, task)
    one, other = (CheckpointReader(path, verify="none") for path in (source, target))
    assert set(one.tensors) == set(other.tensors)
    assert any("mlp.experts.experts.linear_fc1.weight" in name for name in one.tensors)
    for name in one.tensors:
        left, right = (reader.read([name])[name] for reader in (one, other))
        rows = min(len(left), len(right))  # the vocabulary is padded for the layout
        assert torch.equal(left[:rows], right[:rows]), name
    again = run_processes(resumed, config.parallel.num_ranks, config, str(target), timeout_s=300)
    assert again == pytest.approx(norms, rel=1e-6)
