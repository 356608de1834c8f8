"""Random states of a rank that checkpoints hold, beside Megatron's."""

import random

import numpy as np
import pytest

from tests.dist_utils import run_processes
from tests.distributed.test_actor_checkpoint import start
from tests.distributed.tiny_world import make_config, make_model

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch warn of deprecations of their own
]


def test_two_starts_have_the_same_random_states(tmp_path):
    make_model(tmp_path, tied=False)
    config = make_config(tmp_path, {"num_ranks": 1})

    def drawn(rank, world_size, init_method):
        random.seed()  # as a fresh process
        np.random.seed()  # noqa: NPY002
        start(rank, init_method, config)
        return random.random(), float(np.random.random())  # noqa: NPY002

    assert run_processes(drawn, 1, timeout_s=120) == run_processes(drawn, 1, timeout_s=120)
