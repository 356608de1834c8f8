"""Sizes that an interleaved pipeline accepts, and where layers find what they ask for."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import PackLayout, micro_batches
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu
from tests.distributed.family_models import FAMILIES, MIXTURES, make_family_model
from tests.distributed.tiny_world import make_rollouts

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_every_number_of_micro_batches_has_a_group_size(num_stages):
    from gtpo_megatron.actor.forward_backward import interleaved_group_size

    for num_micro_batches in range(num_stages, 50):
        size = interleaved_group_size(num_micro_batches, num_stages)
        rest = num_micro_batches % size
        # what Megatron's schedule asks for
        assert num_stages <= size <= num_micro_batches
        assert rest == 0 or rest >= num_stages
        # and not many more activations are held than with one micro-batch a stage
        assert size < 3 * num_stages


@pytest.mark.parametrize(
    ("others", "parallel", "is_cpu", "shares"),
    [
        ([], {}, True, True),
        ([], {"num_ranks": 2, "tensor_parallel_size": 2}, True, True),
        ([], {"num_ranks": 2, "context_parallel_size": 2}, True, False),
        ([], {}, False, False),
        (["qwen3"], {}, True, True),
        (["qwen3_moe"], {}, True, False),
        (["qwen3_5"], {}, True, False),
    ],
)
def test_prefixes_are_shared_where_every_model_can_read_them(tmp_path, monkeypatch, others, parallel, is_cpu, shares):
    """A teacher reads the student's micro-batches; experts, delta nets, context ranks and a GPU want all tokens."""
    from gtpo_megatron.actor import cpu_platform, forward_backward

    monkeypatch.setattr(cpu_platform, "is_cpu", lambda: is_cpu)
    models = [read_architecture(Path(tiny_cpu.gtpo().model.path))]
    for name in others:
        make_family_model(tmp_path / name, (FAMILIES | MIXTURES)[name])
        models.append(read_architecture(tmp_path / name))
    wanted = forward_backward.MIN_PREFIX_TOKENS if shares else 0
    assert forward_backward.min_prefix_tokens(ParallelConfig(**{"num_ranks": 1} | parallel), models) == wanted


@pytest.mark.parametrize("has_transformer_engine", [False, True])
def test_local_layers_find_out_where_sequences_start_without_the_device(monkeypatch, has_transformer_engine):
    """A layer that asks a GPU for a number waits until it has nothing left to do."""
    from gtpo_megatron.actor import cpu_platform, forward_backward

    device, seen = torch.device("meta"), []
    monkeypatch.setattr(cpu_platform, "device", lambda: device)
    monkeypatch.setattr(cpu_platform, "has_transformer_engine", lambda: has_transformer_engine)
    monkeypatch.setattr(forward_backward, "_padding_mask", lambda *_: {})

    def schedule(*, forward_step_func, data_iterator, model, **_):
        forward_step_func(data_iterator[0], model[0])
        return []

    def chunk(input_ids, position_ids, _, *, packed_seq_params):
        seen.append((input_ids.device, packed_seq_params.cu_seqlens_q.device, packed_seq_params.cu_seqlens_kv.device))

    monkeypatch.setattr(forward_backward, "get_forward_backward_func", lambda: schedule)
    rollouts = make_rollouts()
    batches = micro_batches(rollouts, range(4), budget_tokens=64, layout=PackLayout())
    forward_backward.run_micro_batches([chunk], batches, lambda *_: None, forward_only=True)
    bounds = device if has_transformer_engine else torch.device("cpu")
    assert seen == [(device, bounds, bounds)]


class SeesProducts(torch.autograd.Function):
    """Of one number, and notes whether products may be rounded: forward, and backward."""

    seen: ClassVar[list] = []

    @staticmethod
    def forward(_, x):
        SeesProducts.seen.append(("forward", torch.backends.mkldnn.matmul.fp32_precision))
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        SeesProducts.seen.append(("backward", torch.backends.mkldnn.matmul.fp32_precision))
        return gradient


@pytest.mark.parametrize("are_rounded", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_products_of_backward_passes_alone_are_rounded(monkeypatch, are_rounded, fails):
    """Where the processor has AMX: of the output layer and of all others, and not of the next forward pass."""
    from gtpo_megatron.actor import forward_backward
    from gtpo_megatron.kernels.cpu_products import BackwardPasses

    weight = torch.ones((), requires_grad=True)

    def schedule(*, forward_step_func, data_iterator, model, num_microbatches, **_):
        kept = []
        for _ in range(num_microbatches):
            hidden, finish = forward_step_func(data_iterator[0], model[0])
            loss, _, one = finish(hidden)
            kept.append(one)
            loss.backward()
            if fails:
                raise KeyError
        return kept

    monkeypatch.setattr(forward_backward, "get_forward_backward_func", lambda: schedule)
    monkeypatch.setattr(forward_backward, "_padding_mask", lambda *_: {})
    monkeypatch.setattr(BackwardPasses, "are_rounded", are_rounded)
    monkeypatch.setattr(SeesProducts, "seen", [])
    batches = micro_batches(make_rollouts(), range(4), budget_tokens=8, layout=PackLayout())
    chunk = lambda *_, **__: SeesProducts.apply(weight)  # noqa: E731 - a model of one number
    arguments = ([chunk], batches, lambda hidden, _: (SeesProducts.apply(hidden), 0))
    if fails:
        with pytest.raises(KeyError):
            forward_backward.run_micro_batches(*arguments, forward_only=False)
    else:
        assert len(forward_backward.run_micro_batches(*arguments, forward_only=False)) == len(batches) > 1
    one = [("forward", "none")] * 2 + [("backward", "bf16" if are_rounded else "none")] * 2
    assert SeesProducts.seen == one * (1 if fails else len(batches))
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
