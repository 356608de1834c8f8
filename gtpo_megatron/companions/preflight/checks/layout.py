"""The collectives of the layout, over the very groups that the trainer uses."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gtpo_megatron.companions.preflight.context import StepContext
from gtpo_megatron.companions.preflight.expectations import Expectations, gib, rate
from gtpo_megatron.companions.preflight.probes.collectives import AxisResult, measure_collectives
from gtpo_megatron.companions.preflight.result import CheckResult, assessed, bounded, not_here
from gtpo_megatron.companions.preflight.runner import Results
from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.architecture import Architecture

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


def collectives(context: StepContext) -> Results:
    """Results and rates over every group of every axis."""
    most = MOST_BYTES if context.has_gpus else MOST_BYTES_ON_CPU
    sizes = {axis: min(most, size) for axis, size in tensor_bytes(context.config, context.architecture).items()}
    ranks, hosts = context.processes.ranks, context.processes.hosts
    answers = context.ask(ranks, measure_collectives, context.config.parallel, sizes)
    for axis, option in AXES.items():
        of_axis = [one for name in ranks for one in answers[name] if one.axis == axis]
        if of_axis:
            yield of_one_axis(axis, of_axis, [hosts[name] for name in ranks], context.expected)
        else:
            yield not_here(f"collectives of {axis}", f"{option} is 1")


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


def of_one_axis(axis: str, results: Sequence[AxisResult], hosts: Sequence[str], expected: Expectations) -> CheckResult:
    """All groups of an axis: wrong ones, and the slowest against its link.

    Args:
        axis: name.
        results: every rank's.
        hosts: host of each rank.
        expected: rates of links.
    """
    groups: dict[tuple[int, ...], list[AxisResult]] = defaultdict(list)
    for one in results:
        groups[one.ranks].append(one)
    wrong = [ranks for ranks, found in groups.items() if not all(one.is_right for one in found)]
    # a collective has ended when its last rank has
    rates = {ranks: found[0].sent_bytes / max(one.seconds for one in found) for ranks, found in groups.items()}
    slowest = min(rates, key=lambda ranks: _share(ranks, rates, hosts, expected))
    least = expected.link_bytes(on_one_node=_on_one_node(slowest, hosts))
    first = results[0]
    what = f"{first.collective} over {axis}, {len(groups)} group(s) of {len(slowest)}"
    measured = (
        f"{rate(rates[slowest])} of {gib(first.num_bytes)} in ranks {_shown(slowest)}"
        f"{' (slowest)' if len(groups) > 1 else ''}"
    )
    figures = {"bytes_per_s": rates[slowest], "bytes": float(first.num_bytes)}
    if wrong:
        return assessed(
            what,
            f"wrong sums in ranks {', '.join(map(_shown, wrong))}",
            is_good=False,
            expected="exact integers",
            remedy="a GPU or a link corrupts data: see the check clocks, and exclude the node (sbatch --exclude)",
            figures=figures,
        )
    where = "NVLink" if _on_one_node(slowest, hosts) else "the network"
    return bounded(
        what,
        measured if least else f"{measured}, right",
        is_good=rates[slowest] >= (least or 0.0),
        expected=f"at least {rate(least or 0.0)} over {where}",
        remedy="NCCL_DEBUG=INFO (--env) says which transport NCCL took: NVLink (P2P) on a node, IB between nodes; "
        "NET/Socket means that it found no adapter: see docs/launching.md about NCCL_IB_HCA",
        unknown=None if least else f"no link's rate is known ({expected.why_no_rates})",
        figures=figures | ({"expected_bytes_per_s": least} if least else {}),
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
