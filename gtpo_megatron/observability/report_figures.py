"""Which figures a report has, and what each says."""

from collections.abc import Sequence
from dataclasses import replace

from gtpo_megatron.observability.finite import finite
from gtpo_megatron.observability.report_accuracy import accuracies, best_of
from gtpo_megatron.observability.report_machine import stage_memory, stage_times
from gtpo_megatron.observability.report_traces import Curve, Figure, draw_curves, line
from gtpo_megatron.observability.report_weights import entropy_profiles
from gtpo_megatron.observability.run_folder import RunData

_GREEN, _RED, _ALARM = 2, 5, -1
"""Places in the palette: what is correct, what is incorrect, what must not be crossed."""
_CORRECT, _INCORRECT = Curve("", "correct", _GREEN, "dash"), Curve("", "incorrect", _RED, "dot")

_FROM_ZERO = {"yaxis": {"rangemode": "tozero"}}
_SHARE = {"yaxis": {"rangemode": "tozero", "tickformat": "~p"}}

_REWARD = Figure(
    key="reward",
    title="Reward",
    unit="mean over responses",
    caption="Outcome reward of the sampled responses, and the share of prompts with at least one correct response.",
    missing="No rewards were logged.",
    layout=_FROM_ZERO,
)
_BEST = Figure(
    key="best",
    title="Best 32 and best 16 responses",
    unit="mean reward",
    caption="Mean reward of the 32 and of the 16 responses of a step with the highest reward.",
    missing="The rewards of the best 32 and 16 responses were not logged (a step needs as many).",
    layout=_FROM_ZERO,
)
_ENTROPY = Figure(
    key="entropy",
    title="Policy entropy",
    unit="nats a token",
    caption="Mean entropy of the sampling distribution over response tokens, in all and by outcome.",
    missing="No entropies were logged.",
)
_LENGTH = Figure(
    key="length",
    title="Response length",
    unit="tokens",
    caption="Mean and longest response of each step.",
    missing="No response lengths were logged.",
    layout=_FROM_ZERO,
)
_GAP = Figure(
    key="gap",
    title="Sampler against trainer",
    unit="nats",
    caption="Difference between the log-probabilities that sampler and trainer give to the same sampled tokens, after "
    "each weight push.",
    missing="The log-prob gap between sampler and trainer was not measured.",
    layout={"yaxis": {"type": "log", "exponentformat": "power", "dtick": 1}},
)
_GROUPS = Figure(
    key="groups",
    title="Groups and cuts",
    unit="share",
    caption="Prompt groups with both right and wrong answers, the only ones that teach; one-sided groups, all right or "
    "all wrong; and responses cut at the length limit.",
    missing="Neither mixed groups nor cut responses were logged.",
    layout=_SHARE,
)
_SIGNS = Figure(
    key="signs",
    title="Sign flips",
    unit="share of tokens",
    caption="Tokens whose advantage has the sign that their outcome has not: of correct responses below zero, of "
    "incorrect ones above.",
    missing="No signs of advantages were logged.",
    layout=_SHARE,
)
_WEIGHTS = Figure(
    key="weights",
    title="Evenness of the entropy weights",
    unit="effective share of tokens",
    caption="(sum of x)² / (N · sum of x²) for the weights x that entropy gives to N tokens: 100% where all weigh the "
    "same.",
    missing="The algorithm weighs no tokens by entropy, or it was not logged.",
    layout=_SHARE,
)
_CLIP = Figure(
    key="clip",
    title="Clipped tokens",
    unit="share",
    caption="Response tokens whose ratio to the old policy left the clip interval. With one update a rollout the ratio "
    "is 1, and nothing is clipped.",
    missing="No clip fractions were logged.",
    layout=_SHARE,
)
_GRADIENT = Figure(
    key="gradient",
    title="Gradient norm",
    unit="before clipping",
    caption="Global norm of the gradient of the step's last update.",
    missing="No gradient norms were logged.",
    layout=_FROM_ZERO,
)


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """All figures, in reading order; one without traces is left out of the page with its sentence."""
    return [
        draw_curves(
            runs,
            _REWARD,
            [Curve("rollout/reward_mean", "mean"), Curve("rollout/reward_best_frac", "best of the group", 1, "dot")],
        ),
        *accuracies(runs),
        draw_curves(
            runs,
            _BEST,
            [
                Curve("rollout/reward_best_32_mean", "best 32"),
                Curve("rollout/reward_best_16_mean", "best 16", 1, "dot"),
            ],
        ),
        *best_of(runs),
        draw_curves(
            runs,
            _ENTROPY,
            [
                Curve("policy/entropy_nats", "all"),
                Curve("credit/entropy_correct_nats", "correct", _GREEN, "dash"),
                Curve("credit/entropy_wrong_nats", "incorrect", _RED, "dot"),
            ],
        ),
        draw_curves(
            runs,
            _LENGTH,
            [
                Curve("rollout/response_length_tokens", "mean"),
                Curve("rollout/response_length_max_tokens", "longest", 1, "dot", is_smoothed=False),
            ],
        ),
        _logprob_gap(runs),
        draw_curves(
            runs,
            _GROUPS,
            [
                Curve("rollout/groups_mixed_frac", "mixed groups"),
                Curve("credit/one_sided_groups_frac", "one-sided groups", 5, "dash"),
                Curve("rollout/truncated_frac", "cut responses", 1, "dot"),
            ],
        ),
        _not_of_zeros(
            draw_curves(
                runs,
                _SIGNS,
                [
                    Curve("credit/correct_tokens_negative_frac", "correct, below zero", _GREEN, "dash"),
                    Curve("credit/wrong_tokens_positive_frac", "incorrect, above zero", _RED, "dot"),
                ],
            )
        ),
        draw_curves(
            runs,
            _WEIGHTS,
            [
                replace(_CORRECT, metric="credit/effective_frac_correct"),
                replace(_INCORRECT, metric="credit/effective_frac_wrong"),
            ],
        ),
        _not_of_zeros(
            draw_curves(
                runs,
                _CLIP,
                [
                    Curve("policy/clip_frac", "all"),
                    Curve("policy/clip_frac_high", "above, positive advantage", _GREEN, "dash"),
                    Curve("policy/clip_frac_low", "below, negative advantage", _RED, "dot"),
                ],
            )
        ),
        draw_curves(runs, _GRADIENT, [Curve("optimizer/grad_norm", "gradient norm")]),
        entropy_profiles(runs),
        *stage_memory(runs),
        stage_times(runs),
    ]


def _logprob_gap(runs: Sequence[RunData]) -> Figure:
    figure = draw_curves(
        runs,
        _GAP,
        [
            Curve("sync/logprob_gap_max", "largest", is_smoothed=False),
            Curve("sync/logprob_gap_mean", "mean", 1, "dot", is_smoothed=False),
        ],
    )
    if not figure.traces:
        return figure
    last = max(run.num_steps_done for run in runs)
    limits = sorted(
        {limit for run in runs if (limit := finite(run.setting("weight_sync.logprob_gap_limit"))) is not None}
    )
    lines = [
        {
            **line([1, max(2, last)], [limit, limit], name=f"limit {limit:g}", color=_ALARM, dash="dash"),
            "hoverinfo": "skip",
        }
        for limit in limits
    ]
    return replace(figure, traces=(*figure.traces, *lines))


def _not_of_zeros(figure: Figure) -> Figure:
    """Shares that are all 0 are drawn at the foot of a small range; plotly's own choice would be 0 to 100%."""
    if any(any(trace["y"]) for trace in figure.traces):
        return figure
    return replace(figure, layout={"yaxis": {**_SHARE["yaxis"], "range": [0, 0.01]}})
