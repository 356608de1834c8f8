"""The address that rank 0 gives to the others, on real processes."""

import socket
import time

import pytest
import torch
import torch.distributed as dist
from psutil import CONN_LISTEN, Process

from gtpo_megatron.distributed.rendezvous import Rendezvous
from gtpo_megatron.orchestration.on_ray.processes import RankProcess
from gtpo_megatron.weights.push.transports.process_group import open_store
from tests.dist_utils import run_processes


def meet(rank, world_size, _, told):
    """Rank 0 opens the point, tells it, and joins; the result is what the group sums up, and the port."""
    if rank == 0:
        point = Rendezvous("127.0.0.1")
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
    port = int(rank.rendezvous().rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_ranks_meet_at_a_port_that_was_never_free_again(tmp_path):
    assert run_processes(meet, 2, tmp_path / "told") == [3.0, 3.0]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("opens", [Rendezvous, lambda host: open_store(host, deadline_s=5)])
def test_a_store_listens_on_the_address_that_it_is_told_and_on_no_other(opens, host):
    """A store has no password: torch's own listens on every network of the machine."""
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    before = listeners()
    opened = opens(host)
    new = listeners() - before
    assert {ip for ip, _ in new} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert len(new) == 1
    del opened


def listeners():
    """Address and port of what this process listens on."""
    return {tuple(found.laddr) for found in Process().net_connections("tcp") if found.status == CONN_LISTEN}


def has_ipv6():
    """A kernel may know IPv6 without having an address of it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
