"""A relay push through memory of GPUs that ranks and workers share, with a stand-in for CUDA's memory handles."""

import dataclasses
import re

import pytest

from gtpo_megatron.errors import WeightSyncError
from tests.dist_utils import run_processes
from tests.distributed import cuda_ipc
from tests.distributed.test_weight_transports import Ends, push_and_check
from tests.unit.weights.push.test_plan import push_layout
from tests.unit.weights.test_reshard import architecture

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def ends():
    """Two ranks with a worker each, on whose GPU it is."""
    arch = architecture()
    layout = push_layout(arch, tp=2, workers=2, bucket_bytes=256, itemsize=2, padded_vocab_size=14)
    found = Ends("relay", arch, layout, deadline_s=30.0)
    found.slots = {
        worker: dataclasses.replace(slots, shape=dataclasses.replace(slots.shape, on_gpu=True))
        for worker, slots in found.slots.items()
    }
    yield found
    found.close()


def push(index, _, __, ends, folder, gpus):
    num_ranks = len(ends.layout.sources)
    # a rank sees all GPUs of the node, a worker its own only
    cuda_ipc.install(folder, gpu=gpus[index], number=index if index < num_ranks else 0)
    try:
        return push_and_check(index, None, None, ends)
    except WeightSyncError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_and_workers_that_number_a_gpu_differently_share_its_memory(ends, tmp_path):
    sums = run_processes(push, 4, ends, tmp_path, [0, 1, 0, 1], timeout_s=60)
    assert {path.name for path in tmp_path.iterdir()} == {"0-0", "1-0"}  # allocated once for all pushes
    assert all(not isinstance(found, str) for found in sums), sums


@pytest.mark.slow
def test_a_worker_on_another_gpu_is_told(ends, tmp_path):
    told = run_processes(push, 4, ends, tmp_path, [0, 1, 1, 1], timeout_s=60)
    assert re.search(r"cannot be opened on GPU 0: .*peer access.*must be on the same GPU", told[2]), told
