"""Rendezvous of ranks over a store whose port is bound before it is announced."""

import datetime
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its list

ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Environment of a run on one machine: gloo and NCCL listen on the loopback interface only."""


def bound_store(
    host: str, *, timeout: datetime.timedelta = datetime.timedelta(seconds=300), multi_tenant: bool = False
) -> TCPStore:
    """Opens a store on a free port of one address of this machine.

    A store of torch's own would listen on every interface, without authentication.

    Args:
        host: name or address under which the clients reach this machine.
        timeout: timeout of waiting for a key.
        multi_tenant: further stores of this process on the same port share this one.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        return TCPStore(
            host,
            listener.getsockname()[1],
            None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=multi_tenant,
            master_listen_fd=listener.detach(),  # owned by the store from here on
        )


class Rendezvous:
    """A store on this machine, which ``torch.distributed`` in this process finds by its port and shares.

    It keeps its port bound, so no other process can take it while the ranks still load their libraries. The process
    must be rank 0, and have one such object.

    Args:
        host: name or address under which the other ranks reach this machine.

    Attributes:
        init_method: address for ``init_process_group``; valid as long as the object lives.
    """

    def __init__(self, host: str) -> None:
        self._store = bound_store(host, multi_tenant=True)
        self.init_method = f"tcp://{f'[{host}]' if ':' in host else host}:{self._store.port}"
