"""Address, interface and port of a node."""

import socket
import subprocess
import sys

from launchers.job_folder import SCRIPTS


def ask(interface, peer, port):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "node_network.py"), interface, peer, str(port)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_loopback_reaches_itself():
    mark, address, interface, port = ask("", "127.0.0.1", 0).stdout.split()
    assert (mark, address, interface) == ("network", "127.0.0.1", "lo")
    assert 1024 <= int(port) < 65536
    assert ask("lo", "", 0).stdout.split()[1:3] == ["127.0.0.1", "lo"]


def test_an_interface_that_is_not_there():
    answer = ask("ib9", "", 0)
    assert answer.returncode == 1
    assert "no network interface 'ib9'" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_port_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        answer = ask("lo", "", port)
    assert answer.returncode == 1
    assert f"port {port} of 127.0.0.1" in answer.stderr
    assert "choose another with --ray-port" in answer.stderr
