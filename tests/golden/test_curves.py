"""Ten updates at full precision: a refactoring must leave these curves as they are.

They hold to the last bit, on the stacks that their files have (processor, torch, megatron-core). Another one adds in
another order, and two updates later that is another curve: Adam divides by the root of small second moments, and
Clip-Cov draws its tokens by the bits of their old log-probs. So what every stack must find are the losses, gradient
norms and entropies of updates that move no weight, from old log-probs that are whole nats (``updates_at_rest``).

``make golden`` rewrites both: a stack that the files do not have is added, a curve that has changed takes the place of
all others. On a stack that the files do not have, remove ``curve_*.txt`` first if the curves have changed. Say why in
the commit.
"""

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.config.algorithm import TeacherConfig
from gtpo_megatron.config.model import BalanceConfig
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.credit_cases import ALGORITHMS
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.family_models import FAMILIES, make_family_model
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),
]

FOLDER = Path(__file__).parent
NAMES = ("policy/loss", "optimizer/grad_norm", "policy/entropy_nats")
EXPERTS = "gtpo_experts"
"""GTPO on a mixture of experts, each expert on one of two ranks."""
AT_REST = "updates_at_rest.json"
AT_REST_TOLERANCE = 1e-5
"""Relative, absolute where a loss is near 0: kernels of SSE, AVX2, AVX512 differ by 7e-7 in norms, 5e-7 in losses."""


def processor():
    """Vendor, family and model: math libraries choose their kernels by them, two with AVX512 may round differently."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    return "-".join(facts.get(name, "") for name in ("vendor_id", "cpu family", "model"))


def stack():
    """What the last bit depends on."""
    capability, megatron = torch.backends.cpu.get_cpu_capability(), version("megatron-core")
    return f"{processor()},{capability},torch-{torch.__version__},megatron-{megatron}"


def ten_updates(actor):
    """Five steps of two updates on one fixed batch."""
    return [two_updates(actor, step) for step in range(1, 6)]


def updates_at_rest(actor):
    """One step of two updates that move no weight, from log-probs that are equal to the bit on every stack.

    Whole nats are up to half a nat beside the policy's own log-probs: ratios of 0.6 to 1.65, which are clipped.
    """
    return [two_updates(actor, 1, old_logprobs_of=torch.round)]


def two_updates(actor, step, old_logprobs_of=lambda found: found):
    """The metrics ``NAMES`` of one step, whose batch all ranks work on together."""
    scores = actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), range(8)))
    scored = actor.batch
    old_logprobs = old_logprobs_of(scored.old_logprobs)
    # a sampler whose policy is near the trainer's; only DPPO's curve looks at it
    sampled = dataclasses.replace(scored.rollouts, rollout_logprobs=1.1 * old_logprobs)
    actor.batch = dataclasses.replace(scored, rollouts=sampled, old_logprobs=old_logprobs)
    actor.credit_tokens(make_rewards())
    row = to_scalars(merge([scores | actor.update(step)]))
    return [row[name] for name in NAMES]


def all_curves(rank, world_size, init_method, configs, curve_of):
    """One after the other on the same ranks, each with an actor of its own."""
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    found = {}
    for name, config in configs.items():
        try:
            actor = MegatronActor(config, global_rank=rank, init_method=f"{init_method}_{name}")
            found[name] = curve_of(actor)
            actor.close()
        except Exception as error:
            error.add_note(f"in the curve of {name}")
            raise
    return found


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Of every curve, by its name."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=True)
    teacher = tmp_path_factory.mktemp("teacher")
    make_family_model(teacher, FAMILIES["qwen3"])
    found = {
        name: make_config(
            folder,
            {"num_ranks": 2, "tensor_parallel_size": 2},
            updates={"updates_per_rollout": 2, "mini_batch_prompts": 1},
            algorithm=algorithm,
            teacher=TeacherConfig(path=str(teacher) if algorithm.needs_teacher else ""),
        )
        for name, algorithm in ALGORITHMS.items()
    }
    experts = tmp_path_factory.mktemp("experts")
    make_expert_model(experts, "qwen3_moe", num_layers=2)
    found[EXPERTS] = make_config(
        experts,
        {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2},
        updates={"updates_per_rollout": 2, "mini_batch_prompts": 1},
        balance=BalanceConfig(aux_loss_coef=0.01, z_loss_coef=0.001),
    )
    return found


@pytest.fixture(scope="module")
def curves(configs):
    found, other_rank = run_processes(all_curves, 2, configs, ten_updates, timeout_s=170)
    assert found == other_rank
    return found


@pytest.fixture(scope="module")
def at_rest(configs):
    still = {
        # below the last bit of every weight; 0 is not a learning rate
        name: dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-20))
        for name, config in configs.items()
    }
    found, other_rank = run_processes(all_curves, 2, still, updates_at_rest, timeout_s=170)
    assert found == other_rank
    return {name: dict(zip(NAMES, rows[0], strict=True)) for name, rows in found.items()}


def read_curves(path):
    """By the stack that made them; lines of hexadecimal floats below a line with the stack's name."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("# "):
            curve = found.setdefault(line.split()[1], [])
        else:
            curve.append([float.fromhex(value) for value in line.split()])
    return found


def write_curves(path, curves):
    lines = []
    for name, curve in curves.items():
        lines.append(f"# {name} " + " ".join(NAMES))
        lines += [" ".join(float(value).hex() for value in row) for row in curve]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", [*ALGORITHMS, EXPERTS])
def test_curve(name, request):
    path, is_rewritten = FOLDER / f"curve_{name}.txt", request.config.getoption("--rewrite-golden")
    golden = read_curves(path)
    if stack() not in golden and not is_rewritten:  # nor are the curves made, which takes a while
        pytest.skip(f"no bits of {stack()} in {path.name}, only of {', '.join(golden)}; see test_updates_at_rest")
    curve = request.getfixturevalue("curves")[name]
    if is_rewritten:
        others_hold = golden.get(stack(), curve) == curve
        golden = (golden if others_hold else {}) | {stack(): curve}
        write_curves(path, golden)
    assert curve == golden[stack()]


AFTER_CURVES = pytest.mark.nightly if stack() in read_curves(FOLDER / "curve_gtpo.txt") else pytest.mark.slow
"""What a stack that has the curves is told by them already."""


@AFTER_CURVES
def test_updates_at_rest(at_rest, request):
    path = FOLDER / AT_REST
    if request.config.getoption("--rewrite-golden"):
        path.write_text(json.dumps(at_rest, indent=1) + "\n", encoding="utf-8")
    golden = json.loads(path.read_text(encoding="utf-8"))
    assert at_rest.keys() == golden.keys()
    tolerance = {"rel": AT_REST_TOLERANCE, "abs": AT_REST_TOLERANCE}
    for name, expected in golden.items():
        assert at_rest[name] == pytest.approx(expected, **tolerance), name
