"""Every family in real Megatron equals transformers with the same weights: logits, loss, gradients."""

import pytest
import torch
import transformers

from gtpo_megatron.data.packing import PackLayout, micro_batches
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.reshard import hf_shapes
from tests.dist_utils import run_processes
from tests.distributed.family_models import FAMILIES, make_family_model
from tests.distributed.model_file import read_tensors, write_slices
from tests.distributed.tiny_world import dense_scores, make_config, make_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

LAYOUTS = {
    "one": {"num_ranks": 1},
    "tp2": {"num_ranks": 2, "tensor_parallel_size": 2},
    "tp2_sp": {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
}
LOGITS_TOLERANCE = 5e-5
GRADIENT_TOLERANCE = 1e-5
"""Of the largest element of the tensor, float32."""
DELTA_TOLERANCE = 5e-5
"""The same where a state goes from token to token."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, make_family_model(folder / name, family)) for name, family in FAMILIES.items()}


def one_family(rank, init_method, config, buffer_path):
    """Logits of this rank's share of the vocabulary, the mean negative log-prob, and its gradient in Hugging Face form.

    Gradients take the way that weights take: through the export plan into the shared buffer.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already
    from gtpo_megatron.actor.forward_backward import run_micro_batches
    from gtpo_megatron.actor.model.policy_model import parameters_by_name

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    rollouts, logits, losses = make_rollouts(), {}, []
    batches = micro_batches(
        rollouts,
        range(rollouts.num_responses),
        budget_tokens=config.update.micro_batch_tokens,
        layout=PackLayout.of(config.parallel, actor.coordinates.context_index),
    )

    def finish(hidden, batch):
        whole = gather_from_sequence_parallel_region(hidden) if config.parallel.sequence_parallel else hidden
        scores = (whole[:, 0] @ actor._policy.output_weight().t()).detach()
        for place, row in enumerate(batch.rows):
            logits[row] = scores[batch.cu_seqlens[place] : batch.cu_seqlens[place + 1]]
        loss = -actor._head.score(hidden, batch).logprobs.sum() / rollouts.response_lengths.sum()
        losses.append(loss.item())
        return loss, None

    actor._model[0].zero_grad_buffer()
    run_micro_batches(actor._model, batches, finish, forward_only=False)
    gradients = {name: parameter.main_grad for name, parameter in parameters_by_name([actor._policy]).items()}
    write_slices(buffer_path, actor, config, gradients)
    actor.close()
    return logits, sum(losses)


def all_families(rank, world_size, init_method, configs, folder):
    """One process group for all: families follow each other."""
    return {
        name: one_family(rank, f"{init_method}_{name}", config, f"{folder}/{name}") for name, config in configs.items()
    }


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2", "tp2_sp"))]
)
def test_every_family_equals_transformers(models, tmp_path, layout):
    configs = {name: make_config(folder, LAYOUTS[layout]) for name, (folder, _) in models.items()}
    ranks = run_processes(all_families, LAYOUTS[layout]["num_ranks"], configs, str(tmp_path), timeout_s=150)
    for name, (folder, model) in models.items():
        check_family(name, folder, model, [found[name] for found in ranks], read_tensors(tmp_path / name, folder))


def check_family(name, folder, model, ranks, gradients):
    rollouts = make_rollouts()
    model.zero_grad()
    logprobs, _ = dense_scores(model, rollouts)
    loss = -logprobs.sum() / rollouts.response_lengths.sum()
    loss.backward()
    for row, (prompt, length) in enumerate(
        zip(rollouts.prompt_lengths.tolist(), rollouts.response_lengths.tolist(), strict=True)
    ):
        ids = torch.cat([rollouts.prompt_ids[row, :prompt], rollouts.response_ids[row, :length]])
        with torch.no_grad():
            expected = model(ids[None]).logits[0]
        found = torch.cat([logits[row] for logits, _ in ranks], dim=1)[: len(ids), : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS_TOLERANCE, msg=lambda text: f"{name}: {text}")
    for _, found_loss in ranks:
        assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    expected = dict(model.named_parameters())
    assert {key for key, _ in gradients.items()} == expected.keys()
    tolerance = DELTA_TOLERANCE if name == "qwen3_5" else GRADIENT_TOLERANCE
    for key, found in gradients.items():
        wanted = expected[key].grad
        assert wanted.abs().max() > 0
        worst = (found - wanted).abs().max() / wanted.abs().max()
        assert worst < tolerance, f"{name}: gradient of {key} is off by {worst:.1e} of its largest element"


def test_a_saved_folder_reads_as_its_maker_meant_it(models):
    """Rotary base, stretching and head size of config.json in both spellings, against transformers' own reading."""
    for name, (folder, model) in models.items():
        arch = read_architecture(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        rope = config.rope_parameters
        base = rope.get("full_attention", rope)["rope_theta"] * rope.get("alpha", 1.0) ** (
            arch.head_size / (arch.head_size - 2)
        )
        assert base == pytest.approx(arch.rope_theta, rel=1e-12), name
        attention = model.model.layers[-1].self_attn
        assert getattr(attention, "head_dim" if arch.latents is None else "qk_head_dim") == arch.head_size, name
        assert {key: tuple(value.shape) for key, value in model.named_parameters()} == hf_shapes(arch), name
