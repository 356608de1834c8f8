"""Where the ranks of a run meet: a port that is taken from the moment on that it is told to anybody."""

import datetime
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its list

ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Environment of processes that are all on this machine: nobody else shall reach what gloo and NCCL listen on.

By itself gloo takes the address that the host name stands for, and NCCL the first network there is.
"""


def bound_store(
    host: str, *, timeout: datetime.timedelta = datetime.timedelta(seconds=300), multi_tenant: bool = False
) -> TCPStore:
    """A store on a free port of one address of this machine; it lives as long as the object.

    torch's own would listen on every network, and a store believes whoever can reach it.

    Args:
        host: name or address, as those who shall meet reach it.
        timeout: of a wait for a key.
        multi_tenant: further stores of this process on the same port are this one.
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
            master_listen_fd=listener.detach(),  # from here on the store's
        )


class MeetingPoint:
    """A store on this machine; ``torch.distributed`` in this process finds it by its port and starts no other.

    A port that is only looked up and given back can be taken by another process while the ranks still load their
    libraries; then they do not meet, or meet strangers. This process must be rank 0, as the host of a ``tcp://``
    address always is, and have one such object.

    Args:
        host: this machine's name or address, as the other ranks reach it.

    Attributes:
        init_method: for ``init_process_group``; good as long as the object lives.
    """

    def __init__(self, host: str) -> None:
        self._store = bound_store(host, multi_tenant=True)
        self.init_method = f"tcp://{f'[{host}]' if ':' in host else host}:{self._store.port}"
