"""Which layers a stage holds: against Megatron-core's own count and offset, and what is refused."""

from types import SimpleNamespace

import pytest

from gtpo_megatron.config.parallel import LayerSplit, ParallelConfig
from gtpo_megatron.errors import ConfigError

SPLITS = [
    (num_layers, LayerSplit(pipeline, virtual, last))
    for num_layers in (4, 12, 28, 64)
    for pipeline in (2, 3, 4)
    for virtual in (1, 2, 3)
    for last in (None, *range(1, num_layers))
    if LayerSplit(pipeline, virtual, last).problem(num_layers) is None
]


@pytest.mark.megatron
@pytest.mark.usefixtures("megatron")
def test_megatron_builds_the_same_layers(monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.transformer import transformer_block, transformer_layer

    assert len(SPLITS) > 100
    for num_layers, split in SPLITS:
        config = SimpleNamespace(
            num_layers=num_layers,
            pipeline_model_parallel_size=split.pipeline,
            virtual_pipeline_model_parallel_size=split.virtual if split.virtual > 1 else None,
            num_layers_in_first_pipeline_stage=None,
            num_layers_in_last_pipeline_stage=split.last_rank_layers,
            pipeline_model_parallel_layout=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
        )
        for stage in range(split.num_stages):
            chunk, rank = divmod(stage, split.pipeline)
            monkeypatch.setattr(parallel_state, "is_inside_encoder", lambda: False, raising=False)
            vp_stage = chunk if split.virtual > 1 else None
            first = transformer_layer.get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=rank)
            count = transformer_block.get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=rank)
            assert range(first, first + count) == split.layers(num_layers, stage), (num_layers, split, stage)


def test_every_layer_is_held_once_in_order():
    for num_layers, split in SPLITS:
        held = [number for stage in range(split.num_stages) for number in split.layers(num_layers, stage)]
        assert held == list(range(num_layers)), split


@pytest.mark.parametrize(
    ("num_layers", "split", "message"),
    [
        (4, LayerSplit(3), r"= 3 must divide num_layers=4 of this model; choose a product from \[1, 2, 4\], or give"),
        (64, LayerSplit(4, 1, 14), r"last_stage_layers=14 .* leaves 50 for 3 other stages .* choose from \[1, 4, 7"),
        (64, LayerSplit(4, 2, 13), r"of 2 chunks; choose from \[4, 10, 16"),
        (4, LayerSplit(2, 1, 4), r"choose from \[1, 2, 3\]"),
    ],
)
def test_what_cannot_be_dealt_is_said(num_layers, split, message):
    problem = split.problem(num_layers)
    assert problem is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(problem)


@pytest.mark.parametrize(("pipeline", "last"), [(1, 3), (2, 0), (2, -1), (2, True)])
def test_a_last_stage_that_no_configuration_can_have(pipeline, last):
    with pytest.raises(ConfigError, match="last_stage_layers"):
        ParallelConfig(num_ranks=2, pipeline_parallel_size=pipeline, last_stage_layers=last)
