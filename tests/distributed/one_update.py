"""One step on any layout of ranks, held against transformers: what tests of layouts share."""

import copy
import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.data.packing import num_places
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.model_file import read_tensors, write_slices
from tests.distributed.tiny_world import dense_step, make_rewards, make_rollouts, own_tokens
from tests.reference.expert_balance import load_statistics

DEALINGS = {
    ("one", 1): [list(range(8))],
    ("permuted", 1): [[5, 0, 7, 2, 6, 1, 4, 3]],
    # groups are split over replicas, and replicas make different numbers of micro-batches
    ("split", 2): [[0, 3, 5], [1, 2, 4, 6, 7]],
    ("split", 4): [[0, 3], [5], [1, 2, 4], [6, 7]],
    # the first replica has nothing and must run backward all the same
    ("uneven", 2): [[], list(range(8))],
    ("uneven", 4): [[], list(range(8)), [], []],
}
"""By name and number of replicas."""

GRADIENT_TOLERANCE = 3e-5
"""Of the largest element of the tensor, float32: 2.1e-5 was seen, of a delta net's adapter with AVX512."""


def one_update(rank, world_size, init_method, config, buffer_path, failed, dealing, rollouts, shares_tokens=False):
    """What every rank does in a step, and what it can tell of it."""
    from megatron.core.tensor_parallel import mappings

    from gtpo_megatron.actor import forward_backward
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already
    from gtpo_megatron.actor.model.policy_model import parameters_by_name

    reduce, is_contiguous = mappings._reduce, []

    def watched(tensor, group):
        if group.size() > 1:
            is_contiguous.append(tensor.is_contiguous())
        return reduce(tensor, group)

    mappings._reduce = watched
    if shares_tokens:
        forward_backward.MIN_PREFIX_TOKENS = 1
    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    rows = DEALINGS[dealing, config.parallel.data_parallel_size][actor.coordinates.data_index]
    scored = actor.score_tokens(RolloutShard.of(rollouts, rows))
    actor.credit_tokens(make_rewards(failed))
    metrics = scored | actor.update(1)
    write_slices(buffer_path, actor, config)
    trained = {name: one for name, one in parameters_by_name(actor._chunks).items() if one.requires_grad}
    gradients = {name: parameter.main_grad for name, parameter in trained.items()}
    write_slices(f"{buffer_path}_gradients", actor, config, gradients)
    mine = RolloutShard.of(rollouts, rows).rollouts
    packed = actor._micro_batching.cut(mine, range(len(rows)))
    found = {
        "num_shared": sum(num_places(prefix) for micro in packed for prefix in micro.prefixes),
        "coordinates": actor.coordinates,
        "metrics": metrics,
        "rows": rows,
        "reduced_contiguous": is_contiguous,
        "gradient_dtypes": {gradient.dtype for gradient in gradients.values()},
        "rotary_dtypes": {chunk.rotary_pos_emb.inv_freq.dtype for chunk in actor._chunks},
    }
    if actor._trained.adapters is not None:
        found["adapters"] = {
            part.projection: [(one.detach(), one.main_grad) for one in part.tensors().values()]
            for part in actor._trained.adapters.parts
        }
    if actor.coordinates.has_logits:
        found |= {
            "logprobs": actor.batch.old_logprobs,
            "entropy": actor.batch.token_entropy,
            "ref_logprobs": actor.batch.ref_logprobs,
            "teacher_logprobs": actor.batch.teacher_logprobs,
            "advantages": actor.batch.advantages,
        }
    actor.close()
    mappings._reduce = reduce
    return found


def compare(
    tmp_path,
    model,
    config,
    failed=(),
    dealing=None,
    *,
    rollouts=None,
    scores_atol=2e-5,
    scores_rtol=1e-4,
    norm_rtol=1e-5,
    ref_model=None,
    teacher_model=None,
    shares_tokens=False,
):
    """Runs the layout and holds everything it computed against the answer of one process of transformers.

    Args:
        rollouts: None: eight of different lengths, in which somebody else wrote some tokens.
        shares_tokens: sequences share prefixes of a single token too, and some do, where the layout lets them.

    Returns:
        The merged metrics.
    """
    # Adam's first step is lr * g / (|g| + eps): with the usual eps, the sign of g however small
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, adam_eps=1e-4))
    reference = copy.deepcopy(model)
    rollouts = rollouts or make_rollouts(loss_mask=own_tokens())
    expected = dense_step(reference, config, rollouts, make_rewards(failed), ref_model, teacher_model)
    path = tmp_path / "buffer"
    dealing = dealing or ("one" if config.parallel.data_parallel_size == 1 else "split")
    ranks = run_processes(
        one_update,
        config.parallel.num_ranks,
        config,
        str(path),
        failed,
        dealing,
        rollouts,
        shares_tokens,
        timeout_s=120,
    )
    does_share = shares_tokens and config.parallel.context_parallel_size == 1
    assert any(found["num_shared"] for found in ranks) == does_share
    for found in ranks:
        assert_full_precision(found)
        for name in ("logprobs", "entropy", "advantages", "ref_logprobs", "teacher_logprobs"):
            if found.get(name) is not None:
                wanted = expected[name][found["rows"]][:, : found[name].shape[1]]
                torch.testing.assert_close(found[name], wanted, rtol=scores_rtol, atol=scores_atol)
    scalars = to_scalars(merge(found["metrics"] for found in ranks if found["coordinates"].reports))
    assert scalars["policy/loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert scalars["optimizer/grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm_rtol)
    if expected["loads"]:
        loads = [scalars[f"experts/{name}"] for name in ("load_max_over_mean", "dead_frac", "load_entropy_frac")]
        assert loads == pytest.approx(load_statistics(expected["loads"]), rel=1e-12)
    if not config.parallel.distributed_optimizer:  # which leaves on each rank the sums of its own part only
        compare_gradients(read_tensors(f"{path}_gradients", config.model.path), expected["gradients"])
    for name, tensor in read_tensors(path, config.model.path).items():
        # a step is up to 1e-2
        wanted = expected["weights"][name]
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=5e-5, msg=lambda text, name=name: f"{name}: {text}")
    return scalars


def assert_full_precision(found):
    """Of what a rank told: gradients are summed, and positions turned, in float32 whatever the model's dtype.

    Megatron-core 0.16.1 sums a copy of a tensor that is not contiguous, and goes on with the tensor: none may come.
    """
    assert found["gradient_dtypes"] == found["rotary_dtypes"] == {torch.float32}
    assert all(found["reduced_contiguous"])


def compare_gradients(found, expected):
    """Every parameter's clipped gradient, which a first step of Adam hides: it is near the gradient's sign."""
    for name, wanted in expected.items():
        worst = (found[name] - wanted).abs().max() / wanted.abs().max()
        assert worst < GRADIENT_TOLERANCE, f"the gradient of {name} is off by {worst:.1e} of its largest element"
