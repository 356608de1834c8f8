"""Network, Ray and disk: what lies between the nodes."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.preflight.expectations import gib, rate
from gtpo_megatron.companions.preflight.finding import Finding, assessed, not_here, noted
from gtpo_megatron.companions.preflight.probes import system
from gtpo_megatron.companions.preflight.room import Room
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.disk_space import check_disk_space, checkpoint_bytes
from gtpo_megatron.weights.architecture import read_architecture

SENT_BYTES = 256 << 20
SENT_BYTES_HERE = 32 << 20
"""Over the loopback, which has nothing to prove but that it is there."""

WRITTEN_BYTES, WRITTEN_BYTES_HERE = 1 << 30, 64 << 20
STORED_BYTES = 32 << 20

LONGEST_SAVE_S = 600.0
"""A job is told 900 s before its time limit to save (``--stop-before-s``): a save may take two thirds of that."""


def reach(room: Room) -> Iterator[Finding]:
    """Every other node calls the node of rank 0; on one machine another process does."""
    machines = room.processes
    first = machines.ranks[0]
    hosts = room.one_per_host()
    callers = hosts[1:] or machines.engines[:1]
    size = SENT_BYTES if len(hosts) > 1 else SENT_BYTES_HERE
    is_ray = room.config.cluster.mode == "ray"
    address = room.ask((first,), system.address_in_ray)[first] if is_ray else "127.0.0.1"
    port = room.ask((first,), system.listen, address, size)[first]
    for name in callers:  # one after another, so that each has the link to itself
        answer = room.ask((name,), system.call, address, port, size)[name]
        yield reached(machines.hosts[name], machines.hosts[first], answer, size)
    yield adapters({machines.hosts[name]: found for name, found in room.ask(hosts, system.adapters).items()})


def reached(there: str, here: str, answer: Mapping[str, Any], size: int) -> Finding:
    """Whether everything arrived; its rate decides nothing, since NCCL takes better ways than TCP where it can."""
    nominal = f" of {answer['megabits']} Mbit/s" if answer["megabits"] else ""
    return assessed(
        f"TCP from {there} to {here}",
        f"{1e6 * answer['there_and_back']:.0f} us there and back, {rate(size / answer['seconds'])} over "
        f"{answer['interface'] or 'an interface without a name'}{nominal}",
        is_good=answer["arrived"] == size,
        expected=f"{size >> 20} MiB arrive",
        remedy="name the network that nodes share with --network-interface; no firewall may stand between them",
        figures={"bytes_per_s": size / answer["seconds"], "there_and_back_s": answer["there_and_back"]},
    )


def adapters(hosts: Mapping[str, Mapping[str, str]]) -> Finding:
    """Ports of InfiniBand or RoCE that NCCL may use: active, the same on all nodes.

    One that is down on every node is meant to be, such as the second port of a card; NCCL passes it over.
    """
    what = "InfiniBand or RoCE"
    if not any(hosts.values()):
        return not_here(what, "no adapter in /sys/class/infiniband that NCCL_IB_HCA allows")
    inactive = [{port for port, state in ports.items() if "ACTIVE" not in state} for ports in hosts.values()]
    unused = set.intersection(*inactive)
    said = f"down on all nodes: {', '.join(sorted(unused))}" if unused else ""
    used = {host: {port: state for port, state in ports.items() if port not in unused} for host, ports in hosts.items()}
    if not any(used.values()):
        return noted(what, said, why="NCCL takes TCP in their place")
    down = [
        f"{port} of {host}: {state}"
        for host, ports in used.items()
        for port, state in ports.items()
        if "ACTIVE" not in state
    ]
    on_nodes = {
        f"{len(ports)} port(s) a node: {', '.join(sorted(set(ports.values()))) or 'none'}" for ports in used.values()
    }
    rates = {tuple(sorted(ports.values())) for ports in used.values()}
    return assessed(
        what,
        "; ".join([*(down or sorted(on_nodes)), *([said] if said else [])]),
        is_good=not down and len(rates) == 1,
        expected="active, the same on all nodes",
        remedy="the network of these nodes is broken; NCCL_IB_HCA (--env) leaves out ports that are not to be used, "
        "--skip network this check",
    )


def ray(room: Room) -> Iterator[Finding]:
    """Nodes that have joined, the object store, and an object through it."""
    if room.config.cluster.mode != "ray":
        yield not_here("Ray", "cluster.mode='local' has none")
        return
    cluster = system.cluster()
    wanted = room.config.cluster.num_nodes
    yield assessed(
        "nodes of Ray",
        f"{cluster['nodes']}, {cluster['gpus']} GPUs, object store {gib(cluster['store_bytes'])}",
        is_good=cluster["nodes"] >= wanted,
        expected=f"{wanted} node(s)",
        remedy="the logs of the nodes' Ray say why they did not join",
        figures={"nodes": cluster["nodes"], "store_bytes": cluster["store_bytes"]},
    )
    for name in room.one_per_host():
        seconds, is_right = system.fetched(partial(_stored_by, room, name), STORED_BYTES)
        yield assessed(
            f"an object from {room.processes.hosts[name]}",
            rate(STORED_BYTES / seconds),
            is_good=is_right,
            expected=f"{STORED_BYTES >> 20} MiB arrive unchanged",
            remedy="see the raylet's log on that node",
            figures={"bytes_per_s": STORED_BYTES / seconds},
        )


def _stored_by(room: Room, name: str) -> list[Any]:
    found: list[Any] = room.ask((name,), system.store, STORED_BYTES)[name]
    return found


def disk_speed(room: Room) -> Iterator[Finding]:
    """Free space for the run's checkpoints, and a file of every node, all at once."""
    architecture = read_architecture(Path(room.config.model.path))
    yield disk_space(room)
    names = room.one_per_host()
    size = WRITTEN_BYTES if room.expected.has_gpus else WRITTEN_BYTES_HERE
    files = {name: system.file_of(room.output, name) for name in names}
    answers = {}
    try:
        calls = {name: (str(room.output), name, size) for name in names}
        answers = room.ask_each(system.write_and_read, calls)
        unseen = [room.processes.hosts[name] for name, path in files.items() if not path.is_file()]
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)
    broken = [room.processes.hosts[name] for name, answer in answers.items() if answer["wrote"] != answer["read"]]
    yield assessed(
        f"files of {len(names)} node(s)",
        f"not seen here: {', '.join(unseen)}"
        if unseen
        else f"changed: {', '.join(broken)}"
        if broken
        else "seen and unchanged",
        is_good=not unseen and not broken,
        expected="every node's file is seen here, unchanged",
        remedy="the run folder must be on a disk that all nodes share: --run-dir, for a preflight --output",
    )
    slowest = max(answer["write_s"] for answer in answers.values())
    yield write_rate(
        len(names) * size / slowest,
        size / max(answer["read_s"] for answer in answers.values()),
        checkpoint_bytes(room.config, architecture),
    )


def disk_space(room: Room) -> Finding:
    """Room for the checkpoints that are kept, as ``train`` checks it."""
    architecture = read_architecture(Path(room.config.model.path))
    one = checkpoint_bytes(room.config, architecture)
    try:
        check_disk_space(room.config, architecture, room.output, used_bytes=0)
    except ConfigError as error:
        return assessed(
            "room for checkpoints", str(error), is_good=False, expected="enough", remedy="see the line itself"
        )
    return assessed(
        "room for checkpoints", f"enough for those kept, {gib(one)} each", is_good=True, expected="enough", remedy=""
    )


def write_rate(write: float, read: float, checkpoint: int) -> Finding:
    """Bytes a second of all nodes together, and the seconds of a checkpoint at that rate.

    Args:
        write: bytes a second of all nodes together, through to the disk.
        read: bytes a second of the slowest node; perhaps out of its memory.
        checkpoint: bytes.
    """
    seconds = checkpoint / write
    return assessed(
        "disk under the run folder",
        f"writes {rate(write)}, reads {rate(read)}; a checkpoint of {gib(checkpoint)} in {seconds:.3g} s",
        is_good=seconds <= LONGEST_SAVE_S,
        expected=f"a checkpoint within {LONGEST_SAVE_S:.0f} s",
        remedy="put the run folder on the cluster's parallel file system, or raise --stop-before-s",
        figures={"write_bytes_per_s": write, "read_bytes_per_s": read, "checkpoint_s": seconds},
    )
