"""The collectives of the layout, over the very groups that the trainer uses."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.preflight.expectations import Expectations, gib, rate
from gtpo_megatron.companions.preflight.finding import Finding, assessed, not_here, noted
from gtpo_megatron.companions.preflight.probes import trainer
from gtpo_megatron.companions.preflight.room import Room
from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.architecture import Architecture, read_architecture

MOST_BYTES, MOST_BYTES_ON_CPU = 256 << 20, 4 << 20
"""Of a rank's tensor: beyond it a collective only takes longer."""

AXES = {
    "tp": "parallel.tensor_parallel_size",
    "cp": "parallel.context_parallel_size",
    "dp": "data-parallel size times parallel.context_parallel_size",
    "pp": "parallel.pipeline_parallel_size",
    "ep": "parallel.expert_parallel_size",
    "etp": "parallel.expert_tensor_parallel_size",
}


def collectives(room: Room) -> Iterator[Finding]:
    """Results and rates over every group of every axis."""
    architecture = read_architecture(Path(room.config.model.path))
    most = MOST_BYTES if room.expected.has_gpus else MOST_BYTES_ON_CPU
    sizes = {axis: min(most, size) for axis, size in tensor_bytes(room.config, architecture).items()}
    machines = room.processes
    answers = room.ask(machines.ranks, trainer.measure_collectives, room.config.parallel, sizes)
    results = [dict(result) for name in machines.ranks for result in answers[name]]
    hosts = [machines.hosts[name] for name in machines.ranks]
    for axis, field in AXES.items():
        of_axis = [result for result in results if result["axis"] == axis]
        if not of_axis:
            yield not_here(f"collectives of {axis}", f"{field} is 1")
            continue
        yield axis_finding(axis, of_axis, hosts, room.expected)


def tensor_bytes(config: RunConfig, architecture: Architecture) -> dict[str, int]:
    """Bytes of what a rank hands to the collectives of each axis in a run: to an order of magnitude."""
    parallel = config.parallel
    itemsize = ELEMENT_BYTES[config.model.dtype]
    tokens = max(1, config.update.micro_batch_tokens // parallel.context_parallel_size)
    row = tokens * architecture.hidden_size * itemsize
    keys = tokens * (architecture.key_value_width + architecture.value_width) * itemsize
    experts = architecture.experts
    chosen = 1 if experts is None else experts.experts_per_token
    split = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    return {
        "tp": row,
        "cp": keys // parallel.tensor_parallel_size,
        "dp": MOST_BYTES,  # gradients come in buckets of this order
        "pp": row // split,
        "ep": row * chosen // split,
        "etp": row * chosen // split,
    }


def axis_finding(
    axis: str, results: Sequence[Mapping[str, Any]], hosts: Sequence[str], expected: Expectations
) -> Finding:
    """All groups of an axis: wrong ones, and the slowest against its link.

    Args:
        axis: name.
        results: of every rank, as ``AxisResult`` has them.
        hosts: by rank.
        expected: rates of links.
    """
    groups: dict[tuple[int, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        groups[tuple(result["ranks"])].append(result)
    wrong = [ranks for ranks, found in groups.items() if not all(result["is_right"] for result in found)]
    # a collective has ended when its last rank has
    rates = {
        ranks: found[0]["sent_bytes"] / max(result["seconds"] for result in found) for ranks, found in groups.items()
    }
    slowest = min(rates, key=lambda ranks: _share(ranks, rates, hosts, expected))
    least = expected.link_bytes(on_one_node=_on_one_node(slowest, hosts))
    first = results[0]
    what = f"{first['collective']} over {axis}, {len(groups)} group(s) of {len(slowest)}"
    measured = (
        f"{rate(rates[slowest])} of {gib(first['num_bytes'])} in ranks {_shown(slowest)}"
        f"{' (slowest)' if len(groups) > 1 else ''}"
    )
    figures = {"bytes_per_s": rates[slowest], "bytes": float(first["num_bytes"])}
    if wrong:
        return assessed(
            what,
            f"wrong sums in ranks {', '.join(map(_shown, wrong))}",
            is_good=False,
            expected="exact integers",
            remedy="a GPU or a link corrupts data: see the check clocks, and exclude the node (sbatch --exclude)",
            figures=figures,
        )
    if least is None:
        return noted(
            what, f"{measured}, right", why=f"no link's rate is known ({expected.why_no_rates})", figures=figures
        )
    where = "NVLink" if _on_one_node(slowest, hosts) else "the network"
    return assessed(
        what,
        measured,
        is_good=rates[slowest] >= least,
        expected=f"at least {rate(least)} over {where}",
        remedy="NCCL_DEBUG=INFO (--env) says which transport NCCL took: NVLink (P2P) on a node, IB between nodes; "
        "NET/Socket means that it found no adapter: see docs/launching.md about NCCL_IB_HCA",
        figures=figures | {"expected_bytes_per_s": least},
    )


def _share(
    ranks: tuple[int, ...], rates: Mapping[tuple[int, ...], float], hosts: Sequence[str], expected: Expectations
) -> float:
    link = expected.link_bytes(on_one_node=_on_one_node(ranks, hosts))
    return rates[ranks] / link if link else rates[ranks]


def _on_one_node(ranks: Sequence[int], hosts: Sequence[str]) -> bool:
    return len({hosts[rank] for rank in ranks}) == 1


def _shown(ranks: Sequence[int]) -> str:
    """``0-3``, or ``0, 4, 8``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
