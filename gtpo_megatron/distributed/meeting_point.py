"""Where the ranks of a run meet: a port that is taken from the moment on that it is told to anybody."""

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its list


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
        self._store = TCPStore(host, 0, None, is_master=True, wait_for_workers=False, multi_tenant=True)
        self.init_method = f"tcp://{f'[{host}]' if ':' in host else host}:{self._store.port}"
