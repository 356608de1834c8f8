"""Figures of a mixture of experts: how even the loads are over steps, and the load of every expert of every layer."""

from collections.abc import Sequence
from typing import Any

from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.companions.report.traces import ORANGE, Curve, Figure, draw_curves, rounded
from gtpo_megatron.run_folder.token_files import ExpertLoad

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
