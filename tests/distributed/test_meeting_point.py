"""The address that rank 0 gives to the others, on real processes."""

import socket
import time

import pytest
import torch
import torch.distributed as dist

from gtpo_megatron.distributed.meeting_point import MeetingPoint
from gtpo_megatron.orchestration.ray_processes import RankProcess
from tests.dist_utils import run_processes


def meet(rank, world_size, _, told):
    """Rank 0 opens the point, tells it, and joins; the result is what the group sums up, and the port."""
    if rank == 0:
        point = MeetingPoint("127.0.0.1")
        port = int(point.init_method.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # taken before anybody joins
        told.with_suffix(".partial").write_text(point.init_method)
        told.with_suffix(".partial").rename(told)
    while not told.exists():
        time.sleep(0.01)
    init_method = told.read_text()
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_rank_process_keeps_the_port_that_it_tells(monkeypatch):
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    rank = RankProcess.__new__(RankProcess)
    port = int(rank.meeting_point().rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_ranks_meet_at_a_port_that_was_never_free_again(tmp_path):
    assert run_processes(meet, 2, tmp_path / "told") == [3.0, 3.0]
