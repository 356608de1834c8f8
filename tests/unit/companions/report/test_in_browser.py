"""The report in a real browser: every figure drawn, nothing on the console, nothing wider than a phone."""

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape

import pytest

from gtpo_megatron.branches import Branch
from gtpo_megatron.companions.report.page import write_report
from gtpo_megatron.run_folder.rollout_log import RolloutLog
from tests.unit.companions.report.run_folders import make_run, response

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE_PX = 390

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")

FRAME = '<iframe src="report.html{at}" style="{size};border:0;position:absolute;top:0;left:0"></iframe>'
"""Each lies over the others: a browser spares itself work on what is out of sight."""

FRAMES = """<!doctype html>{frames}<script>
const factsOf = async (page) => {{{body}
  return facts;
}};
addEventListener("load", () => setTimeout(async () => {{
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) found.push(await factsOf(frame.contentDocument));
  const said = (facts) => Object.entries(facts).map(([key, value]) => key + "=" + value).join(" ");
  document.title = found.map(said).join(" | ");
}}, 4000));</script>"""

ALL_FACTS = """
  const style = (node) => page.defaultView.getComputedStyle(node);
  const folded = [...page.querySelectorAll("details.folded")];
  folded.forEach((each) => (each.open = true));
  await new Promise((done) => setTimeout(done, 500));
  const plots = [...page.querySelectorAll(".plot")];
  const facts = {
    width: page.documentElement.scrollWidth,
    plots: plots.length,
    drawn: plots.filter((p) => p.dataset.drawn && p.querySelector(".trace, .point, .hm image")).length,
    dark: style(page.body).backgroundColor === "rgb(20, 23, 27)",
  };
  if (folded.length) facts.folded = folded.length;
  const token = (index) => page.querySelectorAll(".tokens span")[index];
  if (token(1)) {
    const group = page.querySelector("#pick-group select");
    facts.group = group.value + "/" + group.options.length;
    const count = (kind) => page.querySelectorAll(`.pair .${kind} .response`).length;
    facts.texts = ["correct", "incorrect", "ungraded"].map(count).join("+");
    const heat = page.querySelector("#plot-heatmap").data;
    facts.rows = heat[0].y.join("").replaceAll(" ", "");
    facts.reach = heat[1].y[0] + "+" + heat[2].y[0];
    const text = (selector) => page.querySelector(selector).textContent.replace(/\\s+/g, "_");
    facts.first = text(".response .facts");
    facts.cut = text("#heatmap-cut");
    const seen = [];
    for (const view of ["entropy", "shaped_rewards", "advantages"]) {
      page.querySelector(`.choices input[value=${view}]`).click();
      seen.push(style(token(2)).backgroundImage + style(token(2)).backgroundColor);
    }
    facts.colourings = new Set(seen).size;
    token(1).click();
    facts.readout = page.querySelector("#readout").textContent.trim().replace(/\\s+/g, "_");
    page.querySelector("#next").click();
    await new Promise((done) => setTimeout(done, 500));
    facts.next = page.querySelector("#pick-group select").value;
    facts.prompt = page.querySelector(".prompt").textContent.match(/Compute (\\d+)/)[1];
  }
"""

READER = """
  const one = (selector) => page.querySelector(selector), all = (selector) => [...page.querySelectorAll(selector)];
  const later = (ms) => new Promise((done) => setTimeout(done, ms));
  const numbers = () => all(".response").map((each) => each.dataset.place).join("+") || "none";
  const change = (selector, value, event) => {
    one(selector).value = value;
    one(selector).dispatchEvent(new Event(event, { bubbles: true }));
  };
  const press = (key) => {
    const init = { key, bubbles: true, cancelable: true };
    page.activeElement.dispatchEvent(new page.defaultView.KeyboardEvent("keydown", init));
  };
  const words = (text) => text.trim().replace(/\\s+/g, "_");
  const facts = {};
"""


def browse(folder, *, width=0, flags=(), reader="", at=""):
    """Opens the report in a frame; returns what the frame says of it, and console messages.

    Args:
        folder: that of ``report.html``.
        width: of the frame in pixels.
        flags: of the browser.
        reader: JavaScript that does what a reader does, and fills ``facts``; empty: all facts of a page.
        at: fragment of the address.
    """
    [facts], console = browse_all(folder, [(width, at)], flags=flags, reader=reader)
    return facts, console


def browse_all(folder, frames, *, flags=(), reader=""):
    """The same for several frames of one page, each a width and a fragment."""
    sizes = "width:1280px;height:900px" if reader else "width:{width}px;height:30000px"
    html = "".join(FRAME.format(at=at, size=sizes.format(width=width)) for width, at in frames)
    page = FRAMES.format(frames=html, body=READER + reader if reader else ALL_FACTS)
    (folder / "frame.html").write_text(page)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        "--enable-logging=stderr", "--virtual-time-budget=12000", f"--user-data-dir={folder / 'profile'}", *flags,
        "--dump-dom", f"file://{folder}/frame.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    said = unescape(title.group(1)).split(" | ") if title else [""] * len(frames)
    facts = [dict(fact.split("=", 1) for fact in one.split()) for one in said]
    return facts, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_one_run_on_a_phone(tmp_path):
    write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert facts == {
        "width": str(PHONE_PX),
        "plots": "18",
        "folded": "11",
        "drawn": "18",
        "dark": "false",
        "group": "0/2",  # the one with both outcomes
        "texts": "2+2+0",
        "rows": "✓1✓3✓5✓7✓9✗2✗4✗6✗8✗10",
        "reach": "5+5",
        "first": "✓_correct_response_1_·_3_tokens_·_reward_1_·_mean_entropy_0.500_nats_·_mean_advantage_+0.750",
        "cut": "",
        "colourings": "3",
        "readout": '"answer:\\n"_entropy_1_nats_shaped_reward_1.1_advantage_2',
        "next": "1",
        "prompt": "1",
    }


@pytest.mark.slow
def test_whole_responses_are_summed_up_and_those_without_a_verdict_stand_apart(tmp_path):
    long = replace(
        response(0, 1.0, tokens=("a ", "b ", "c ") * 500),
        token_entropy=[0.0] * 1024 + [1.0] * 476,
        advantages=[1.0] * 1024 + [-1.0] * 476,
    )
    failed = replace(response(0, 0.0), reward_failed=True)
    run = make_run(tmp_path / "run", num_steps=2, responses=False)
    RolloutLog(run, groups_per_step=1).write(2, [failed, response(0, 0.0), long, failed, failed])
    write_report([run], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert {name: facts[name] for name in ("width", "texts", "rows", "reach", "first", "cut")} == {
        "width": str(PHONE_PX),
        "texts": "1+1+2",
        "rows": "✓3✗2?1?4?5",
        "reach": "1+1",
        "first": "✓_correct_response_3_·_1,500_tokens_·_reward_1_·_mean_entropy_0.317_nats_·_mean_advantage_+0.365",
        "cut": "The_first_1,024_positions_of_up_to_1,500:_1_of_5_responses_are_longer_than_is_drawn.",
    }


@pytest.mark.slow
def test_two_runs_in_the_dark(tmp_path):
    runs = [make_run(tmp_path / "gtpo"), make_run(tmp_path / "grpo_with_a_rather_long_name_of_a_run_folder")]
    write_report(runs, tmp_path / "report.html")
    widths = (PHONE_PX, 1280)
    found, console = browse_all(tmp_path, [(width, "") for width in widths], flags=["--force-dark-mode"])
    assert console == []
    for width, facts in zip(widths, found, strict=True):
        assert {name: facts[name] for name in ("width", "plots", "drawn", "dark")} == {
            "width": str(width), "plots": "18", "drawn": "18", "dark": "true",
        }  # fmt: skip


@pytest.mark.slow
def test_a_run_that_has_nothing_yet(tmp_path):
    (tmp_path / "run").mkdir()
    write_report([tmp_path / "run"], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert facts == {"width": str(PHONE_PX), "plots": "0", "drawn": "0", "dark": "false"}


CONVERSATION = """
  facts.turns = all(".response[data-place='1'] .tokens > *").map((each) => each.className).join("+");
  const folded = one(".response details.others");
  facts.folded = words(folded.querySelector("summary").textContent) + "," + folded.open;
  one(".response[data-place='1'] .turn span").focus();
  press("End");
  facts.last = words(one("#readout").textContent);
  change("#search input", "result 25", "input");
  facts.found = one(".response details.others").open;
  change("#search input", "", "input");
  facts.after = one(".response details.others").open;
  one(".response details.others summary").click();
  await later(100);
  change("#pick-order select", "-length", "change");
  facts.kept = one(".response details.others").open;
"""


@pytest.mark.slow
def test_others_words_stand_between_the_turns(tmp_path):
    said = ["tool says 4\n"], [f"result {number} " for number in range(26)]
    tokens = ("call ", *said[0], "call again ", *said[1], "so 4")
    own = [token in ("call ", "call again ", "so 4") for token in tokens]
    mixed = replace(
        response(0, 1.0, tokens=tokens),
        token_entropy=[1.0 * mine for mine in own],
        shaped_rewards=[1.1 * mine for mine in own],
        advantages=[0.5 * mine for mine in own],
        foreign_spans=[(1, 2), (3, 29)],
    )
    run = make_run(tmp_path / "run", num_steps=2, responses=False)
    RolloutLog(run, groups_per_step=1).write(2, [mixed, response(0, 0.0)])
    write_report([run], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert facts["width"] == str(PHONE_PX)
    assert facts["first"] == (
        "✓_correct_response_1_·_3_tokens_·_reward_1_·_mean_entropy_1.000_nats_·_mean_advantage_+0.500"
        "_·_27_more_by_others,_in_italics:_read,_not_learned_from"
    )
    facts, console = browse(tmp_path, reader=CONVERSATION)
    assert console == []
    beginning = " ".join(said[1])[:60].replace("  ", " ")
    assert facts.pop("folded").startswith("26_tokens_by_others:_" + beginning[:40].replace(" ", "_"))
    assert facts == {
        "turns": "turn+others+turn+others+turn",
        "last": '"so_4"_entropy_1_nats_shaped_reward_1.1_advantage_0.5',
        "found": "true",
        "after": "false",
        "kept": "true",
    }


TREE = """
  facts.tree = all(".response[data-place='1'] .tokens > *")
    .map((each) => words(each.textContent) + "@" + parseInt(each.style.marginLeft)).join("|");
"""


@pytest.mark.slow
def test_an_episode_that_branches_is_drawn_as_a_tree(tmp_path):
    """Turn 2 in the place of 1; a sub-agent's 3; 4 after 1, and 5 after 4 without anything between."""
    tokens = ("a", "b", "sub", "?", "c", "and?", "d", "e", "f")
    own = [token in "abcdef" for token in tokens]
    mixed = replace(
        response(0, 1.0, tokens=tokens),
        **{name: [1.0 * mine for mine in own] for name in ("token_entropy", "shaped_rewards", "advantages")},
        foreign_spans=[(2, 4), (5, 6)],
        branches=(Branch(1, 0), Branch(2, -1), Branch(5, 1), Branch(7, 6)),
    )
    run = make_run(tmp_path / "run", num_steps=2, responses=False)
    RolloutLog(run, groups_per_step=1).write(2, [mixed, response(0, 0.0)])
    write_report([run], tmp_path / "report.html")
    facts, console = browse(tmp_path, reader=TREE)
    assert console == []
    assert facts["tree"].split("|") == [
        *("turn_1@0", "a@0"),
        *("another_answer_in_place_of_turn_1@0", "turn_2@0", "b@0"),
        *("a_new_sequence@0", "sub?@0", "turn_3@0", "c@0"),
        *("after_turn_1@20", "and?@20", "turn_4@20", "d@20"),
        *("another_answer_in_place_of_turn_4@40", "turn_5@40", "ef@40"),
    ]


AXES = """
  const rounded = (x) => +x.toFixed(3);
  const ends = (key) => one(`#plot-${key}`).data.map(({ x }) => `${rounded(x[0])}..${rounded(x.at(-1))}`);
  const shown = () => ends("reward")[1] + "," + ends("heldout")[0] + "," + ends("gap").at(-1);
  facts.step = shown();
  for (const axis of ["time", "sampled", "trained"]) {
    one(`input[name=axis][value=${axis}]`).click();
    await later(700);
    facts[axis] = shown() + "," + words(one("#plot-reward .xtitle").textContent);
  }
  one("#folded-entropy summary").click();
  await later(500);
  facts.opened = ends("entropy")[0];
"""


@pytest.mark.slow
def test_curves_are_drawn_over_the_axis_that_is_chosen(tmp_path):
    """40 steps of 6.5 s, 16,250 and 13,000 tokens, an evaluation of 5 s at either end; limits from end to end."""
    write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    facts, console = browse(tmp_path, reader=AXES)
    assert console == []
    assert facts == {
        "step": "1..40,0..40,1..40",
        "time": "0.192..4.5,0.083..4.5,0.192..4.5,minutes",
        "sampled": "16250..650000,0..650000,16250..650000,sampled_tokens",
        "trained": "13000..520000,0..520000,13000..520000,trained_tokens",
        "opened": "13000..520000",
    }


SAMPLES = """
  facts.first = numbers();
  one("#all").click();
  facts.all = numbers();
  for (const order of ["-reward", "length", "-length", "mean_entropy"]) {
    change("#pick-order select", order, "change");
    facts[order] = numbers();
  }
  change("#pick-order select", "sampled", "change");
  change("#search input", "SEVEN", "input");
  facts.found = numbers() + "," + words(one("#found").textContent) + "," + one("#pick-group select").options.length;
  facts.hits = all(".hit").map((each) => each.textContent).join("").replace(/\\s/g, "_");
  change("#search input", "<img src=y onerror=alert(2)>", "input");
  facts.none = numbers() + "," + words(one("#group").textContent);
  change("#search input", "compute 1 &", "input");
  facts.prompt = numbers() + "," + words(one("#found").textContent);
"""


@pytest.mark.slow
def test_all_responses_of_a_group_are_reached_sorted_and_searched(tmp_path):
    run = make_run(tmp_path / "run", num_steps=2, responses=False)
    rows = [response(0, 0.1 * place, tokens=("a ",) * (3 * (place + 1))) for place in range(4)]
    rows = [replace(row, token_entropy=[place % 3 + 1.0] * len(row.tokens)) for place, row in enumerate(rows)]
    rows.append(response(0, 1.0, tokens=("The ", "answer:\n", "seven")))
    RolloutLog(run, groups_per_step=2).write(2, [*rows, response(1, 0.0), response(1, 1.0)])
    write_report([run], tmp_path / "report.html")
    facts, console = browse(tmp_path, reader=SAMPLES, at="#sample=2.0")
    assert console == []
    assert facts == {
        "first": "5+1+2",
        "all": "5+1+2+3+4",
        "-reward": "5+1+2+3+4",
        "length": "5+4+3+2+1",
        "-length": "5+1+2+3+4",
        "mean_entropy": "5+3+2+1+4",
        "found": "5,1_responses_in_1_of_2_groups,1",
        "hits": "seven",
        "none": "none,No_prompt_or_response_that_is_shown_has_this_text.",
        "prompt": "2+1,2_responses_in_1_of_2_groups",
    }


KEYS = """
  const at = () => words(one("#readout").hidden ? "hidden" : one("#readout").textContent.split("entropy")[0]);
  const stops = all(".tokens span").filter((each) => each.tabIndex === 0).length;
  facts.stops = stops + "/" + all(".response").length;
  one(".tokens span").focus();
  facts.focus = at();
  const [right, left] = ["ArrowRight", "ArrowLeft"];
  for (const key of [right, right, right, "Home", "End", left, "ArrowUp", "ArrowDown", "x"]) {
    press(key);
    facts[key] = at();
  }
  facts.label = words(page.activeElement.getAttribute("aria-label"));
  facts.stop = all(".tokens span").indexOf(page.activeElement) + "," + page.activeElement.tabIndex;
  facts.list = words(one(".tokens").getAttribute("aria-label")) + "," + one(".tokens").getAttribute("role");
  page.activeElement.blur();
  one("#search input").focus();
  facts.away = at();
"""


@pytest.mark.slow
def test_arrow_keys_move_over_the_tokens_and_show_what_pointing_shows(tmp_path):
    write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    facts, console = browse(tmp_path, reader=KEYS)
    assert console == []
    attack = '"</script><img_src=x_onerror=alert(1)>"'
    assert facts == {
        "stops": "4/4",  # one stop of the tabulator a response
        "focus": '"The_"',
        "ArrowRight": attack,  # and no further
        "Home": '"The_"',
        "End": attack,
        "ArrowLeft": '"answer:\\n"',
        "ArrowUp": '"answer:\\n"',
        "ArrowDown": attack,
        "x": attack,
        "label": f"{attack}_entropy_0.5_nats_shaped_reward_1.05_advantage_-0.25",
        "stop": "2,0",
        "list": "tokens_of_response_1,_correct:_arrow_keys_move_over_them,listbox",
        "away": "hidden",
    }


LEADS = {
    "#sample=2.7.5&run=b%20%3Cb%3E": {"group": "step_2", "run": "b_<b>", "numbers": "1+2+5", "linked": "5"},
    "#sample=1.7&run=b%20%3Cb%3E": {"group": "step_1", "run": "b_<b>", "linked": "group", "note": "none"},
    "#sample=2.7.5": {"run": "a", "linked": "5"},
    "#sample=9.9.9": {"group": "step_2", "run": "a", "linked": "group",
                      "note": "The_link's_group_9_of_step_9_is_not_on_this_page;_this_is_the_nearest_that_is."},
    "#sample=2.7.50": {"note": "The_link's_response_50_is_not_on_this_page;_this_is_the_nearest_that_is."},
    "#sample=2.7.5&run=%": {"run": "a"},
}  # fmt: skip
"""What a reader sees, by the fragment of the link: of the first as the page opens, of the others one after another."""
LINKS = f"""
  for (const [place, at] of {list(LEADS)}.entries()) {{
    if (place) {{
      page.defaultView.location.hash = at;
      await later(200);
    }}
    const selected = (name) => one(`#pick-${{name}} select`).selectedOptions[0].textContent.replace(" ", "_");
    facts[`${{place}}.group`] = selected("group").slice(0, 6);
    facts[`${{place}}.run`] = selected("run");
    facts[`${{place}}.numbers`] = numbers();
    facts[`${{place}}.linked`] = all(".linked").map((each) => each.dataset.place ?? each.id).join();
    facts[`${{place}}.note`] = words(one("#group .missing")?.textContent ?? "none");
    facts[`${{place}}.link`] = all(".response a").at(-1).getAttribute("href");
  }}
"""


def two_runs(folder):
    runs = [make_run(folder / name, num_steps=2, responses=False) for name in ("a", "b <b>")]
    for run in runs:
        for step in (1, 2):
            RolloutLog(run, groups_per_step=1).write(step, [response(7, 1.0)] * 5)
    write_report(runs, folder / "report.html")


@pytest.mark.slow
def test_links_lead_to_samples(tmp_path):
    two_runs(tmp_path)
    facts, console = browse(tmp_path, reader=LINKS, at=next(iter(LEADS)))
    assert console == []
    for place, (at, expected) in enumerate(LEADS.items()):
        found = {name: facts[f"{place}.{name}"] for name in ("group", "run", "numbers", "linked", "note", "link")}
        assert found | expected == found, at
        name = "b%20%3Cb%3E" if found["run"] != "a" else "a"
        assert found["link"].endswith(f"&run={name}"), at


@pytest.mark.slow
def test_what_is_no_link_leads_nowhere(tmp_path):
    two_runs(tmp_path)
    reader = """
      facts.linked = all(".linked").length;
      facts.note = words(one("#group .missing")?.textContent ?? "none");
    """
    facts, console = browse(tmp_path, reader=reader, at="#sample=x<img src=z>")
    assert console == []
    assert facts == {"linked": "0", "note": "none"}
