"""Statistics of experts' loads, against scalar loops."""

import pytest
import torch

from gtpo_megatron.observability.metrics import to_scalars
from tests.reference.expert_balance import load_statistics

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]


@pytest.mark.parametrize(
    "loads",
    [[[5, 5, 5, 5]], [[8, 0, 0, 0], [2, 2, 2, 2]], [[3, 0, 1], [0, 7, 2], [1, 1, 1]], [[0, 0]], [[1 << 40, 1]], [[4]]],
)
def test_statistics_equal_the_loops(loads):
    from gtpo_megatron.actor.experts.balance import load_metrics

    found = to_scalars(load_metrics(torch.tensor(loads)))
    wanted = load_statistics(loads) if len(loads[0]) > 1 else (1.0, 0.0, 0.0)
    names = ("experts/load_max_over_mean", "experts/dead_frac", "experts/load_entropy_frac")
    assert [found[name] for name in names] == pytest.approx(wanted, rel=1e-12)
