"""All checks, in the order in which they are made."""

from gtpo_megatron.companions.preflight.checks import kernels, layout, machines, sizes, step, surroundings
from gtpo_megatron.companions.preflight.context import PreflightContext
from gtpo_megatron.companions.preflight.result import assessed
from gtpo_megatron.companions.preflight.runner import PreflightCheck, Results
from gtpo_megatron.orchestration.loop.inputs import turn_warning
from gtpo_megatron.train import check_inputs

MACHINES, LAYOUT, STEP = "machines", "layout of the ranks", "one step"


SICK_GPU = "nvidia-smi on that node; a device that hangs or raises here would do so in the run: leave its node out"

NO_MEMORY = (
    "if memory is short: smaller --update.micro-batch-tokens, --model.recompute full, or a layout of gtpo-megatron plan"
)


def inputs(context: PreflightContext) -> Results:
    """Model folder, data sets, reward function and loggers, as ``train`` checks them.

    Returns:
        ``RunInputs``.
    """
    found = check_inputs(context.config, asks_network=True)
    yield assessed(
        "model, data, rewards",
        f"{len(found.train)} problems, {len(found.heldout)} held-out sets",
        is_good=True,
        expected="readable and consistent",
        remedy="",
    )
    warning = turn_warning(context.config, found.tokenizer)
    yield assessed(
        "end of a turn",
        warning or "the chat template ends a turn with a stop token",
        is_good=not warning,
        expected="what the template ends a turn with ends a response",
        remedy="declare it in generation_config.json, or set rollout.sampling.stop_token_ids",
    )
    return found


def _start(_context: PreflightContext) -> Results:
    """The start is measured where it happens."""
    yield from ()


def _end(_context: PreflightContext) -> Results:
    """Reached only where everything ended in good order."""
    yield assessed("ranks, engines and rewards", "ended in good order", is_good=True, expected="no error", remedy="")


CHECKS: tuple[PreflightCheck, ...] = (
    PreflightCheck(
        "inputs",
        MACHINES,
        "model, data, rewards",
        inputs,
        remedy="change what the line names; gtpo-megatron config RECIPE checks the same in seconds",
    ),
    PreflightCheck("versions", MACHINES, "software", machines.versions),
    PreflightCheck("hosts", MACHINES, "GPUs, memory, shared memory", machines.hosts),
    PreflightCheck("clocks", MACHINES, "clocks and stragglers", machines.clocks, remedy=SICK_GPU),
    PreflightCheck(
        "kernels",
        MACHINES,
        "output layer against float64",
        kernels.output_kernels,
        needs=("inputs",),
        remedy=SICK_GPU,
    ),
    PreflightCheck(
        "layer",
        MACHINES,
        "a layer against transformers",
        kernels.layer,
        needs=("inputs",),
        remedy="Megatron or Transformer Engine cannot build this layer here: install the tested versions",
    ),
    PreflightCheck(
        "network",
        MACHINES,
        "nodes reach each other",
        surroundings.reach,
        remedy="no firewall may stand between the nodes; --network-interface names the network that they share",
    ),
    PreflightCheck("ray", MACHINES, "Ray and its object store", surroundings.ray),
    PreflightCheck(
        "disk",
        MACHINES,
        "the disk under the run folder",
        surroundings.disk_speed,
        needs=("inputs",),
        remedy="every node must be able to write there: --run-dir, for a preflight --output",
    ),
    PreflightCheck(
        "start",
        LAYOUT,
        "ranks, engines and rewards",
        _start,
        needs=("inputs",),
        remedy="log.txt has the lines of the process that is named; where a disk is slow, a larger --seconds and "
        "--cluster.start-deadline-s",
    ),
    PreflightCheck(
        "collectives",
        LAYOUT,
        "collectives over the groups of the layout",
        layout.collectives,
        needs=("start",),
        remedy="NCCL_DEBUG=INFO (--env) says which ranks could not connect, and over what; docs/launching.md, Network",
    ),
    PreflightCheck(
        "push",
        STEP,
        "a verified push",
        step.push,
        needs=("start",),
        remedy="no run can go on after this; docs/weight_push.md says what each transport needs",
    ),
    PreflightCheck(
        "generate",
        STEP,
        "generation",
        step.generate,
        needs=("inputs", "push"),
        remedy="see the engine's lines in log.txt; if memory is short, lower --rollout.kv-cache-mib",
    ),
    PreflightCheck("rewards", STEP, "rewards", step.rewards, needs=("generate",)),
    PreflightCheck("logprobs", STEP, "log-probs of both sides", step.logprobs, needs=("generate",)),
    PreflightCheck("update", STEP, "an update", step.update, needs=("rewards", "logprobs"), remedy=NO_MEMORY),
    PreflightCheck("new-weights", STEP, "log-probs of both sides after an update", step.new_weights, needs=("update",)),
    PreflightCheck(
        "lengths",
        STEP,
        "scoring and updates at full length",
        sizes.lengths,
        needs=("generate",),
        remedy=NO_MEMORY,
    ),
    PreflightCheck("sleep", STEP, "sleep and wake", sizes.sleep, needs=("push",)),
    PreflightCheck(
        "checkpoint",
        STEP,
        "a checkpoint",
        sizes.checkpoint,
        needs=("start",),
        remedy="see the check disk; docs/checkpoints.md says what is written, and by whom",
    ),
    PreflightCheck("transports", STEP, "the other transports", sizes.transports, needs=("push",)),
    PreflightCheck("memory", STEP, "memory by phase", sizes.memory, needs=("generate", "lengths")),
    PreflightCheck("step-time", STEP, "seconds of a step", sizes.step_time, needs=("generate", "lengths", "push")),
    PreflightCheck("end", STEP, "the end of the processes", _end, needs=("start",)),
)

BEFORE_MODELS = tuple(check.name for check in CHECKS if check.group == MACHINES and check.name != "inputs")
"""On processes that hold nothing yet, with the GPUs' memory free."""

WITH_MODELS = tuple(check.name for check in CHECKS if check.group != MACHINES and check.name not in ("start", "end"))
