"""The frame that the page's script fills with sampled groups: what to choose, and where it is drawn."""

from gtpo_megatron.observability.report_samples import Samples

_VIEWS = (("entropy", "entropy"), ("shaped", "shaped reward"), ("advantage", "advantage"))

_HEATMAP_CAPTION = (
    "One row a response of the group, correct ones above; the stronger the colour, the more uncertain. Below: how many "
    "correct (d) and incorrect (h) responses reach each position; one without a verdict (?) counts in neither. GTPO "
    "compares a token's entropy with those in its column and of its own outcome."
)
_WEIGHTS_CAPTION = (
    "Weight of a token: its |advantage| over the mean of all tokens with the same outcome, on average over at least 5 "
    "occurrences in the sampled responses of this run; 1 is average."
)


def sample_section(sampled: Samples) -> str:
    """The section, as HTML, or a sentence where no run has sampled texts."""
    if sampled.is_empty:
        return (
            '<section class="responses"><h2>Sampled responses</h2>'
            '<p class="missing">No sampled responses were logged.</p></section>'
        )
    views = "".join(
        f'<label><input type="radio" name="view" value="{view}"{" checked" if view == "entropy" else ""}>'
        f"<span>{label}</span></label>"
        for view, label in _VIEWS
    )
    scales = "".join(
        f'<span class="scale scale-{view}"><b class="low"></b><i></i><b class="high"></b></span>' for view, _ in _VIEWS
    )
    return (
        '<section class="responses"><h2>Sampled responses</h2>'
        '<div class="switch">'
        '<label class="pick" id="pick-run"><span>Run</span><select></select></label>'
        '<label class="pick" id="pick-group"><span>Group</span><select></select></label>'
        '<span class="choices step"><button type="button" id="previous" aria-label="previous group">&lsaquo;</button>'
        '<button type="button" id="next" aria-label="next group">&rsaquo;</button></span>'
        f'<div class="choices" role="radiogroup" aria-label="Colour tokens by">{views}</div>{scales}</div>'
        '<div id="group"></div>'
        '<figure class="wide"><h2>Entropy by position and response <small>nats</small></h2>'
        '<div class="plot tall" id="plot-heatmap" role="img" aria-label="Entropy by position and response"></div>'
        f'<figcaption>{_HEATMAP_CAPTION}</figcaption><p class="about" id="heatmap-cut"></p></figure>'
        '<div class="figures">'
        "<figure><h2>Tokens with most weight <small>correct responses</small></h2>"
        '<div class="plot" id="plot-heaviest-correct" role="img" aria-label="Heaviest tokens, correct"></div>'
        '<p class="missing" hidden>No token of a correct response has a weight.</p></figure>'
        "<figure><h2>Tokens with most weight <small>incorrect responses</small></h2>"
        '<div class="plot" id="plot-heaviest-incorrect" role="img" aria-label="Heaviest tokens, incorrect"></div>'
        '<p class="missing" hidden>No token of an incorrect response has a weight.</p></figure>'
        f'</div><p class="note">{_WEIGHTS_CAPTION}</p></section>'
    )
