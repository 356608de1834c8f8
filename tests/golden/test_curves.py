"""Ten updates at full precision: a refactoring must leave these curves as they are.

Compared to the last bit on the stack that the files were made on (processor, torch, megatron-core), and to 1e-3
on others, which add in another order. ``make golden`` rewrites them; say why in the commit.
"""

import dataclasses
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.config.algorithm import (
    CISPOConfig,
    ClipCovConfig,
    DAPOConfig,
    DPPOConfig,
    DrGRPOConfig,
    DynamicSamplingConfig,
    EAPOConfig,
    EntropyAdvantageConfig,
    FIPOConfig,
    GRPOConfig,
    GRPOSConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    STAREConfig,
    TopEntropyConfig,
)
from gtpo_megatron.config.algorithm.length_penalty import NoLengthPenalty
from gtpo_megatron.config.balance import BalanceConfig
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.xdist_group("golden curves"),
    pytest.mark.filterwarnings("ignore"),
]

FOLDER = Path(__file__).parent
NAMES = ("policy/loss", "optimizer/grad_norm", "policy/entropy_nats")
ALGORITHMS = {
    "gtpo": GTPOConfig(),
    "grpo_s": GRPOSConfig(),
    "dapo": DAPOConfig(dynamic_sampling=DynamicSamplingConfig(enabled=False), length_penalty=NoLengthPenalty()),
    "grpo": GRPOConfig(),
    "dr_grpo": DrGRPOConfig(norm_tokens=12),
    "gspo": GSPOConfig(),
    "cispo": CISPOConfig(),
    "entropy_advantage": EntropyAdvantageConfig(),
    "top_entropy": TopEntropyConfig(),
    # shares of a batch of 53 tokens that choose some
    "clip_cov": ClipCovConfig(clip_fraction=0.1, cov_low=-1.0),
    "kl_cov": KLCovConfig(penalised_fraction=0.1),
    "rloo": RLOOConfig(),
    "reinforce_plus_plus": REINFORCEPlusPlusConfig(baseline="group"),
    "eapo": EAPOConfig(),
    # above the entropy of these curves, so that weights act
    "stare": STAREConfig(variant="C2", entropy_target=9.0),
    "fipo": FIPOConfig(influence_eps_low=0.2, length_penalty=NoLengthPenalty()),
    "dppo": DPPOConfig(norm_tokens=12),
}
EXPERTS = "gtpo_experts"
"""GTPO on a mixture of experts, each expert on one of two ranks."""
OTHER_STACK_TOLERANCE = 1e-3
"""Relative, of the first step. Adam divides by the root of small second moments, which multiplies a rounding by about
10 a step, and a token that is chosen by it or not changes the curve altogether."""


def processor():
    """Vendor, family and model: math libraries choose their kernels by them, two with AVX512 may round differently."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    return "-".join(facts.get(name, "") for name in ("vendor_id", "cpu family", "model"))


def stack():
    """What the last bit depends on."""
    capability, megatron = torch.backends.cpu.get_cpu_capability(), version("megatron-core")
    return f"{processor()},{capability},torch-{torch.__version__},megatron-{megatron}"


def ten_updates(rank, init_method, config):
    """Five steps of two updates on one fixed batch, which both ranks work on together."""
    from gtpo_megatron.actor.actor import MegatronActor  # imported by the parent already

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    curve = []
    for step in range(1, 6):
        scores = actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), range(8)))
        # a sampler whose policy is near the trainer's; only DPPO's curve looks at it
        scored = actor.held.scored("assign_credit")
        sampled = dataclasses.replace(scored.shard.rollouts, rollout_logprobs=1.1 * scored.scores.old_logprobs)
        shard = dataclasses.replace(scored.shard, rollouts=sampled)
        actor.held.keep(dataclasses.replace(scored, shard=shard), stage="score_tokens")
        actor.assign_credit(make_rewards())
        curve.append(to_scalars(merge([scores | actor.update(step)])))
    actor.close()
    return [[row[name] for name in NAMES] for row in curve]


def all_curves(rank, world_size, init_method, configs):
    """One after the other on the same ranks, each with an actor of its own."""
    found = {}
    for name, config in configs.items():
        try:
            found[name] = ten_updates(rank, f"{init_method}_{name}", config)
        except Exception as error:
            error.add_note(f"in the curve of {name}")
            raise
    return found


@pytest.fixture(scope="module")
def curves(megatron, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=True)
    configs = {
        name: make_config(
            folder,
            {"num_ranks": 2, "tensor_parallel_size": 2},
            updates={"updates_per_rollout": 2, "mini_batch_prompts": 1},
            algorithm=algorithm,
        )
        for name, algorithm in ALGORITHMS.items()
    }
    experts = tmp_path_factory.mktemp("experts")
    make_expert_model(experts, "qwen3_moe", num_layers=2)
    configs[EXPERTS] = make_config(
        experts,
        {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2},
        updates={"updates_per_rollout": 2, "mini_batch_prompts": 1},
        balance=BalanceConfig(aux_loss_coef=0.01, z_loss_coef=0.001),
    )
    found, other_rank = run_processes(all_curves, 2, configs, timeout_s=170)
    assert found == other_rank
    return found


@pytest.mark.parametrize("name", [*ALGORITHMS, EXPERTS])
def test_curve(curves, name, request):
    curve = curves[name]
    path = FOLDER / f"curve_{name}.txt"
    if request.config.getoption("--rewrite-golden"):
        lines = [f"# {stack()} " + " ".join(NAMES)]
        lines += [" ".join(float(value).hex() for value in row) for row in curve]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    golden = [[float.fromhex(value) for value in row.split()] for row in rows]
    if header.split()[1] == stack():
        assert curve == golden
    else:
        assert curve[0] == pytest.approx(golden[0], rel=OTHER_STACK_TOLERANCE, abs=1e-6)
