"""Prints this node's address, its interface, and a port to listen on. A standalone script, copied into every job.

usage: node_network.py INTERFACE PEER PORT

INTERFACE may be empty: then the address is the one that this node reaches PEER by, and if PEER is empty too, the one
that its host name stands for. PORT 0 means any free one. The line begins with a mark, since libraries may print others.
Mistakes are one line on stderr and status 1.
"""

import socket
import sys

import psutil


def main(interface: str, peer: str, port: int) -> str:
    """``ADDRESS INTERFACE PORT``."""
    addresses = {
        name: found.address
        for name, all_of_it in psutil.net_if_addrs().items()
        for found in all_of_it
        if found.family == socket.AF_INET
    }
    if interface and interface not in addresses:
        there = ", ".join(sorted(addresses))
        sys.exit(f"{socket.gethostname()} has no network interface {interface!r} with an IPv4 address; it has {there}")
    address = addresses[interface] if interface else own_address(peer)
    if not interface:
        interface = next((name for name, found in addresses.items() if found == address), "")
    return f"{address} {interface} {free_port(address, port)}"


def own_address(peer: str) -> str:
    """This node's address as seen by others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if peer:
            probe.connect((peer, 9))  # sends nothing; chooses the route
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def free_port(address: str, port: int) -> int:
    """The port itself if nobody listens on it, any free one for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended job's connections do not count
        try:
            probe.bind((address, port))
        except OSError as error:
            sys.exit(
                f"port {port} of {address} ({socket.gethostname()}) cannot be used for Ray: {error.strerror}; "
                f"choose another with --ray-port, or 0 for any free one"
            )
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    print("network", main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
