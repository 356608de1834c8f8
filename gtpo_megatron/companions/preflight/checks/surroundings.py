"""Network, Ray and disk: what lies between the nodes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gtpo_megatron.companions.preflight.context import PreflightContext
from gtpo_megatron.companions.preflight.expectations import gib, rate
from gtpo_megatron.companions.preflight.probes import system
from gtpo_megatron.companions.preflight.result import CheckResult, assessed, not_here, noted
from gtpo_megatron.companions.preflight.runner import Results
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.disk_space import check_disk_space, checkpoint_bytes

SENT_BYTES = 256 << 20
SENT_BYTES_HERE = 32 << 20
"""Over the loopback, which has nothing to prove but that it is there."""

WRITTEN_BYTES, WRITTEN_BYTES_HERE = 1 << 30, 64 << 20
STORED_BYTES = 32 << 20

LONGEST_SAVE_S = 600.0
"""A job is told 900 s before its time limit to save (``--stop-before-s``): a save may take two thirds of that."""


def reach(context: PreflightContext) -> Results:
    """Every other node calls the node of rank 0; on one machine another process does."""
    machines = context.processes
    first = machines.ranks[0]
    hosts = context.one_per_host
    callers = hosts[1:] or machines.engines[:1]
    size = SENT_BYTES if len(hosts) > 1 else SENT_BYTES_HERE
    is_ray = context.config.cluster.mode == "ray"
    address = context.ask((first,), system.address_in_ray)[first] if is_ray else "127.0.0.1"
    port = context.ask((first,), system.listen, address, size)[first]
    for name in callers:  # one after another, so that each has the link to itself
        answer = context.ask((name,), system.call, address, port, size)[name]
        yield reached(machines.hosts[name], machines.hosts[first], answer, size)
    yield adapters({machines.hosts[name]: found for name, found in context.ask(hosts, system.adapters).items()})


def reached(there: str, here: str, answer: Mapping[str, Any], size: int) -> CheckResult:
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


def adapters(hosts: Mapping[str, Mapping[str, str]]) -> CheckResult:
    """Ports of InfiniBand or RoCE that NCCL may use: active, the same on all nodes.

    One that is down on every node is meant to be, such as the second port of a card; NCCL passes it over.
    """
    what = "InfiniBand or RoCE"
    if not any(hosts.values()):
        return not_here(what, "no adapter in /sys/class/infiniband that NCCL_IB_HCA allows")
    inactive = [{port for port, state in ports.items() if "ACTIVE" not in state} for ports in hosts.values()]
    unused = set.intersection(*inactive)
    down_everywhere = f"down on all nodes: {', '.join(sorted(unused))}" if unused else ""
    used = {host: {port: state for port, state in ports.items() if port not in unused} for host, ports in hosts.items()}
    if not any(used.values()):
        return noted(what, down_everywhere, why="NCCL takes TCP in their place")
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
        "; ".join([*(down or sorted(on_nodes)), *([down_everywhere] if down_everywhere else [])]),
        is_good=not down and len(rates) == 1,
        expected="active, the same on all nodes",
        remedy="the network of these nodes is broken; NCCL_IB_HCA (--env) leaves out ports that are not to be used, "
        "--skip network this check",
    )


def ray(context: PreflightContext) -> Results:
    """Nodes that have joined, the object store, and an object through it."""
    if context.config.cluster.mode != "ray":
        yield not_here("Ray", "cluster.mode='local' has none")
        return
    cluster = system.cluster()
    wanted = context.config.cluster.num_nodes
    yield assessed(
        "nodes of Ray",
        f"{cluster['nodes']}, {cluster['gpus']} GPUs, object store {gib(cluster['store_bytes'])}",
        is_good=cluster["nodes"] >= wanted,
        expected=f"{wanted} node(s)",
        remedy="the logs of the nodes' Ray say why they did not join",
        figures={"nodes": cluster["nodes"], "store_bytes": cluster["store_bytes"]},
    )
    for name in context.one_per_host:
        seconds, is_right = system.fetched(partial(_stored_by, context, name), STORED_BYTES)
        yield assessed(
            f"an object from {context.processes.hosts[name]}",
            rate(STORED_BYTES / seconds),
            is_good=is_right,
            expected=f"{STORED_BYTES >> 20} MiB arrive unchanged",
            remedy="see the raylet's log on that node",
            figures={"bytes_per_s": STORED_BYTES / seconds},
        )


def _stored_by(context: PreflightContext, name: str) -> list[Any]:
    found: list[Any] = context.ask((name,), system.store, STORED_BYTES)[name]
    return found


def disk_speed(context: PreflightContext) -> Results:
    """Free space for the run's checkpoints, and a file of every node, all at once."""
    architecture = context.architecture
    yield disk_space(context)
    names = context.one_per_host
    size = WRITTEN_BYTES if context.has_gpus else WRITTEN_BYTES_HERE
    files = {name: system.file_of(context.output, name) for name in names}
    answers = {}
    try:
        calls = {name: (str(context.output), name, size) for name in names}
        answers = context.ask_each(system.write_and_read, calls)
        unseen = [context.processes.hosts[name] for name, path in files.items() if not path.is_file()]
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)
    broken = [context.processes.hosts[name] for name, answer in answers.items() if answer["wrote"] != answer["read"]]
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
        checkpoint_bytes(context.config, architecture),
    )


def disk_space(context: PreflightContext) -> CheckResult:
    """Room for the checkpoints that are kept, as ``train`` checks it."""
    architecture = context.architecture
    one = checkpoint_bytes(context.config, architecture)
    try:
        check_disk_space(context.config, architecture, context.output, used_bytes=0)
    except ConfigError as error:
        return assessed(
            "room for checkpoints", str(error), is_good=False, expected="enough", remedy="see the line itself"
        )
    return assessed(
        "room for checkpoints", f"enough for those kept, {gib(one)} each", is_good=True, expected="enough", remedy=""
    )


def write_rate(write: float, read: float, checkpoint: int) -> CheckResult:
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
