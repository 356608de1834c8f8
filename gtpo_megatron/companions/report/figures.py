"""The figures of a report, with their captions."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gtpo_megatron.companions.report.run_data import RunData, measured_sets
from gtpo_megatron.companions.report.sampled_groups import MAX_PARTS
from gtpo_megatron.companions.report.traces import (
    ALARM,
    BLUE,
    GREY,
    ORANGE,
    VIOLET,
    Curve,
    Figure,
    draw_curves,
    line,
    rounded,
)
from gtpo_megatron.config.problems import HELDOUT
from gtpo_megatron.observability.measured_sets import mean_metric
from gtpo_megatron.run_folder.token_files import ExpertLoad

_PART = re.compile(r"reward/([a-z0-9_]+)_mean")
_FROM_ZERO = {"yaxis_rangemode": "tozero"}
_SHARE = {"yaxis_rangemode": "tozero", "yaxis_tickformat": "~p"}
_SMALL = _FROM_ZERO | {"yaxis_exponentformat": "power"}
_LOG = {"yaxis": {"type": "log", "exponentformat": "power", "dtick": 1}}

# fmt: off
_REWARD = Figure(
    "reward", "Reward", "mean over responses",
    "Outcome reward of the sampled responses, and the mean over groups of the best reward in each.",
    (Curve("rollout/reward_mean", "mean"),
     Curve("rollout/best_of_group_reward_mean", "best of the group", ORANGE, "dot")), _FROM_ZERO)
_LOSS = Figure(
    "loss", "Loss of the warm start", "nats per token",
    "Mean of the negative log-likelihood of the assistant's tokens: of each step's conversations before its update, "
    "and of those that are held out.",
    (Curve("sft/loss", "trained", GREY),
     Curve("sft/heldout_loss", "held out", BLUE, is_smoothed=False)))
_OF_OUTCOME = (
    Figure(
        "best", "Best 32 and best 16 responses", "mean reward",
        "Mean reward of the 32 and of the 16 responses of a step with the highest reward.",
        (Curve("rollout/reward_best_32_mean", "best 32"),
         Curve("rollout/reward_best_16_mean", "best 16", ORANGE, "dot")), _FROM_ZERO),
    Figure(
        "groups", "Groups and cuts", "share",
        "Prompt groups whose rewards differ, the only ones that teach; groups all correct or all "
        "incorrect; and responses cut at the length limit. Groups that teach, of all that were sampled, dropped ones "
        "included.",
        (Curve("rollout/groups_mixed_frac", "mixed groups"),
         Curve("rollout/groups_taught_frac", "groups that teach", VIOLET, "dash"),
         Curve("credit/one_sided_groups_frac", "one-sided groups", ORANGE, "dash"),
         Curve("rollout/truncated_frac", "cut responses", GREY, "dot")), _SHARE),
)
_GAP_99 = Curve("sync/logprob_gap_p99", "99%", ORANGE, "dot", is_smoothed=False)
_OF_POLICY = (
    Figure(
        "entropy", "Policy entropy", "nats per token",
        "Mean entropy of the sampling distribution over response tokens, in all and by outcome.",
        (Curve("policy/entropy_nats", "all", GREY),
         Curve("credit/entropy_correct_nats", "correct", BLUE, "dash"),
         Curve("credit/entropy_incorrect_nats", "incorrect", ORANGE, "dot"))),
    Figure(
        "length", "Response length", "tokens", "Mean and longest response of each step.",
        (Curve("rollout/response_length_tokens", "mean"),
         Curve("rollout/response_length_max_tokens", "longest", GREY, "dot", is_smoothed=False)), _FROM_ZERO),
    Figure(
        "ratio", "Importance ratio", "mean over tokens",
        "Ratio of the current to the old policy during the updates, and of the trainer's to the sampler's probability "
        "of the same tokens. 1 where both agree; with one update per rollout the first is 1.",
        (Curve("policy/ratio_mean", "current to old"),
         Curve("off_policy/ratio_mean", "trainer to sampler", ORANGE, "dot"))),
    Figure(
        "divergence", "KL divergence", "nats per token",
        "How far the updates of a rollout moved the policy, and KL(sampler, trainer) of the sampled tokens.",
        (Curve("policy/kl_old_nats", "of the updates"),
         Curve("off_policy/kl_nats", "sampler to trainer", ORANGE, "dot")), _SMALL),
    Figure(
        "clip", "Clipped tokens", "share",
        "Response tokens whose ratio to the old policy left the clip interval. With one update per rollout the ratio "
        "is 1, and nothing is clipped.",
        (Curve("policy/clip_frac", "all", GREY),
         Curve("policy/clip_frac_high", "above, positive advantage", BLUE, "dash"),
         Curve("policy/clip_frac_low", "below, negative advantage", ORANGE, "dot")), _SHARE),
    Figure(
        "rate", "Learning rate", "", "Learning rate of the step's last update.",
        (Curve("optimizer/learning_rate", "learning rate", is_smoothed=False),), _SMALL),
    Figure(
        "gradient", "Gradient norm", "before clipping", "Global norm of the gradient of the step's last update.",
        (Curve("optimizer/grad_norm", "gradient norm"),), _FROM_ZERO),
    Figure(
        "gap", "Sampler against trainer", "nats",
        "Difference between the log-probabilities that sampler and trainer give to the same sampled tokens, after each "
        "weight push: the largest, and what 99% of the tokens stay within; and the bound, at the last step, "
        "beyond which few tokens may be.",
        (Curve("sync/logprob_gap_max", "largest", is_smoothed=False),
         _GAP_99), _LOG),
)
_OF_OPTIMIZER = ("rate", "gradient")
"""Of these, what a warm start has too."""
_OF_CREDIT = (
    Figure(
        "signs", "Sign flips", "share of tokens",
        "Tokens whose advantage has not the sign of their outcome: of correct responses below zero, of incorrect ones "
        "above.",
        (Curve("credit/correct_tokens_negative_frac", "correct, below zero", BLUE, "dash"),
         Curve("credit/incorrect_tokens_positive_frac", "incorrect, above zero", ORANGE, "dot")), _SHARE),
    Figure(
        "weights", "Evenness of the entropy weights", "effective share of tokens",
        "(sum of x)² / (N · sum of x²) for the weights x that entropy gives to N tokens: 100% if all weigh the same.",
        (Curve("credit/effective_frac_correct", "correct", BLUE, "dash"),
         Curve("credit/effective_frac_incorrect", "incorrect", ORANGE, "dot")), _SHARE),
)
_OF_MACHINE = (
    Figure(
        "throughput", "Throughput", "tokens per second",
        "Response tokens of a step by the seconds that it took; prompt and response tokens that the trainer scored, "
        "and that its updates used, by their own seconds.",
        (Curve("throughput/tokens_per_s", "whole step", GREY),
         Curve("throughput/score_tokens_per_s", "scoring", BLUE, "dash"),
         Curve("throughput/update_tokens_per_s", "updates", ORANGE, "dot")), _FROM_ZERO),
    Figure(
        "time", "Time of a step", "seconds",
        "A whole step, its rollout and its updates; if sampling is ahead, what the trainer waited for responses.",
        (Curve("timing/step_s", "whole step", GREY),
         Curve("timing/rollout_s", "rollout", BLUE, "dash"),
         Curve("timing/update_s", "update", ORANGE, "dot"),
         Curve("timing/rollout_wait_s", "waiting for responses", VIOLET, "dashdot")), _FROM_ZERO),
    Figure(
        "memory", "Memory", "GiB",
        "Most that the driver's processes held, and most that torch's allocator held on the fullest GPU during forward "
        "and backward. What grows from step to step ends in a crash.",
        (Curve("memory/peak_gib", "processes", is_smoothed=False),
         Curve("memory/actor_forward_backward_gpu_peak_gib", "GPU", ORANGE, "dot", is_smoothed=False)), _FROM_ZERO),
)
_REFERENCE = Figure(
    "reference", "Divergence from the reference policy", "nats per token",
    "Mean k3 estimate of the KL divergence of the policy from its reference, over response tokens.",
    (Curve("policy/kl_ref_nats", "k3"),), _FROM_ZERO)
_TEACHER = Figure(
    "teacher", "Divergence from the teacher", "nats per token",
    "Mean k1 estimate of the KL divergence of the policy from its teacher, over response tokens.",
    (Curve("policy/kl_teacher_nats", "k1"),), _FROM_ZERO)
# fmt: on


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """All figures, section by section; one that no run has measured has no traces and says so in ``folded``.

    Some runs have no experts, no reference or no teacher: their figures are omitted then. Warm starts have a loss in
    the place of rewards and credit.
    """
    of_sets = [_accuracy(runs, label) for label in measured_sets(runs) or [HELDOUT]]
    sections = {
        "Outcome": [_REWARD, *_parts(runs), *of_sets, *_OF_OUTCOME],
        "Policy": list(_OF_POLICY),
        "Credit": list(_OF_CREDIT),
        "Machine": list(_OF_MACHINE),
    }
    if all(run.is_warm_start for run in runs):
        shared = [figure for figure in _OF_POLICY if figure.key in _OF_OPTIMIZER]
        sections = {"Outcome": [_LOSS], "Policy": shared, "Machine": list(_OF_MACHINE)}
    elif any(run.is_warm_start for run in runs):
        sections["Outcome"].append(_LOSS)
    for other in (_REFERENCE, _TEACHER):
        if any(run.values(other.curves[0].metric) for run in runs):
            sections["Policy"].append(other)
    drawn = [draw_curves(runs, replace(each, section=name)) for name, own in sections.items() for each in own]
    drawn += [replace(figure, section="Experts") for figure in expert_figures(runs)]
    return [_with_limits(runs, figure) for figure in drawn]


def _parts(runs: Sequence[RunData]) -> list[Figure]:
    """The figure of the parts of the reward; none if no run's reward has parts."""
    names = dict.fromkeys(
        found[1] for run in runs for row in run.metrics[-1:] for name in row if (found := _PART.fullmatch(name))
    )
    if not names:
        return []
    colours, dashes = (BLUE, ORANGE, VIOLET, GREY), ("solid", "dash", "dot", "dashdot")
    curves = tuple(
        Curve(f"reward/{name}_mean", name.replace("_", " "), colours[index % 4], dashes[index % 4])
        for index, name in enumerate(sorted(names)[:MAX_PARTS])
    )
    caption = "What the reward is made of, as its function says: the mean of each part over the responses that have it."
    return [Figure("reward-parts", "Parts of the reward", "mean over responses", caption, curves, _FROM_ZERO)]


def _accuracy(runs: Sequence[RunData], label: str) -> Figure:
    samples = {value if isinstance(value := run.setting("evaluation.samples"), int) else "k" for run in runs}
    interval = (f"eval/{label}_interval_low", f"eval/{label}_interval_high")
    return Figure(
        HELDOUT if label == HELDOUT else f"accuracy-{label}",
        "Held-out accuracy" if label == HELDOUT else f"Accuracy on {label}",
        f"mean@{samples.pop() if len(samples) == 1 else 'k'}",
        "Share of correct answers, with 95% intervals over problems.",
        (Curve(mean_metric(label), "mean@k", is_smoothed=False, interval=interval),),
        {"yaxis_tickformat": ".0%", "xaxis_rangemode": "normal"},  # leaves room for the interval at step 0
    )


def _with_limits(runs: Sequence[RunData], figure: Figure) -> Figure:
    """Adds the runs' bounds to the figure of the log-prob gap; returns other figures unchanged.

    In the colour of the 99%; with several runs, of a bound that all share, in red.
    """
    if figure.key != "gap" or not figure.traces:
        return figure
    last = max(2, *(run.num_steps_done for run in runs))
    limits = {index: own[-1] for index, run in enumerate(runs) if (own := run.values("sync/logprob_gap_bound"))}
    colors = {
        limit: _GAP_99.color if len(runs) == 1 else index if list(limits.values()).count(limit) == 1 else ALARM
        for index, limit in limits.items()
    }
    lines = [
        line(
            [(1, limit), (last, limit)],
            name=f"bound, {limit:.2g}",
            color=color,
            dash="dash",
            mode="lines",
            hoverinfo="skip",
        )
        for limit, color in sorted(colors.items())
    ]
    return replace(figure, traces=(*figure.traces, *lines))


# fmt: off
_OVER_STEPS = (
    Figure(
        "expert-peak", "Fullest expert", "largest load over mean",
        "Tokens of the fullest expert by the mean over experts, in the layer in which that is most. 1 is even.",
        (Curve("experts/load_max_over_mean", "fullest expert"),), {"yaxis_rangemode": "tozero"}),
    Figure(
        "expert-evenness", "Evenness of the experts", "share",
        "Entropy of the experts' loads as a share of what even loads have, mean over layers; and experts that got no "
        "token at all.",
        (Curve("experts/load_entropy_frac", "entropy of the load"),
         Curve("experts/dead_frac", "experts without a token", ORANGE, "dot")),
        {"yaxis_rangemode": "tozero", "yaxis_tickformat": "~p"}),
)
# fmt: on


def expert_figures(runs: Sequence[RunData]) -> list[Figure]:
    """The figures of the runs whose model has experts; none if no run's has."""
    over_steps = [draw_curves(runs, figure) for figure in _OVER_STEPS]
    maps = [_map(run.name, run.expert_load, index) for index, run in enumerate(runs) if run.expert_load is not None]
    return [figure for figure in over_steps if figure.traces] + maps


def _map(name: str, load: ExpertLoad, index: int) -> Figure:
    import plotly.graph_objects as go  # a second of imports, which no other command should wait for

    experts = list(range(len(load.tokens[0])))
    ratios = [rounded([count * len(row) / max(sum(row), 1) for count in row]) for row in load.tokens]
    heatmap = go.Heatmap(
        x=experts,
        y=[str(layer) for layer in load.layers],
        z=ratios,
        zmin=0,
        colorscale="Cividis",
        colorbar={"title": {"text": "over mean"}, "thickness": 12},
        hovertemplate="layer %{y}, expert %{x}: %{z:.3~g} times the mean<extra></extra>",
        showlegend=False,
    )
    layout: dict[str, Any] = {
        "hovermode": "closest",
        "xaxis_title_text": "expert",
        "yaxis": {"title": {"text": "layer"}, "type": "category", "automargin": True},
    }
    return Figure(
        f"expert-map-{index}",
        "Load of every expert",
        "over the mean of its layer",
        f"Tokens that each expert got at step {load.step} of {name}, by the mean of its layer: 0 is an expert that got "
        f"none, 1 an even share.",
        layout=layout,
        traces=(heatmap,),
    )
