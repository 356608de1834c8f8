"use strict";
/* Draws a page's figures and the sampled group that the reader chooses: its tokens, coloured, and the heat map of its entropies.
   All texts of a model enter the page as textContent, never as HTML. `report.render()` draws what #data holds now. */
const report = (() => {
  const byId = (id) => document.getElementById(id);
  const element = (tag, name, text) => Object.assign(document.createElement(tag), { className: name, textContent: text ?? "" });
  const short = (value) => String(Number(value.toPrecision(3)));
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  const level = (value, scale) => (scale > 0 ? Math.max(-1, Math.min(1, value / scale)).toFixed(2) : "0");
  /** In the order of the heat map's rows, with the mark of a row. */
  const KINDS = { correct: "✓", incorrect: "✗", unjudged: "?" };
  /** As in report_traces.py. */
  const BLUE = "#3f83d6", ORANGE = "#d06a1e", GRID = "rgba(128,136,146,0.25)";
  const HEAT = [[0, "rgba(150,90,200,0.08)"], [1, "rgb(150,90,200)"]];
  const isTouched = matchMedia("(pointer: coarse)").matches;

  /** The runs that have groups, and what the reader chose, by name, step and id: places in the lists change while a run goes on. */
  let runs = [];
  let chosen = {};

  async function draw(key, { data, layout }) {
    const axes = { xaxis: { ...layout.xaxis, fixedrange: isTouched }, yaxis: { ...layout.yaxis, fixedrange: isTouched } };
    const plot = byId(`plot-${key}`);
    await Plotly.react(plot, data, { ...layout, ...axes, dragmode: isTouched ? false : "zoom" }, { displayModeBar: false, responsive: true });
    plot.dataset.drawn = "yes";
  }

  // ------------------------------------------------------------------------------------------------------------------ tokens

  function write(made, text) {
    if (!text) made.append(element("u", "", "∅"));
    text.split("\n").forEach((part, index) => {
      if (index) made.append(element("u", "", "↵"), "\n");
      made.append(part);
    });
    return made;
  }

  /** The tokens in order; those that the policy did not write have no numbers. */
  function tokensOf(data, scales) {
    const foreign = new Set(data.foreign);
    let own = -1;
    return data.tokens.map((text, i) => {
      if (foreign.has(i)) return write(element("i", "foreign"), text);
      own += 1;
      const values = [data.entropy[own], data.shaped_rewards[own], data.advantages[own]];
      const made = element("span", "");
      made.style.cssText = `--e:${level(values[0], scales.entropy)};--s:${level(values[1], scales.shaped_rewards)};--a:${level(values[2], scales.advantages)}`;
      made.dataset.v = values.map(short).join(" ");
      return write(made, text);
    });
  }

  /** What the reward said: each test with its verdict, then all else; a text that was cut is shown as it is. */
  function toldOf(info) {
    try {
      const { tests = [], ...rest } = JSON.parse(info);
      const verdicts = tests.map((verdict, i) => `${i + 1} ${verdict === "passed" ? "✓" : `✗ ${verdict}`}`);
      const others = Object.entries(rest).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
      return [...(verdicts.length ? [`tests: ${verdicts.join(" · ")}`] : []), ...others].join("\n");
    } catch {
      return info;
    }
  }

  function response(data, scales) {
    const made = element("div", "response");
    const facts = element("p", "facts");
    const number = (value) => value.toLocaleString("en");
    facts.append(element("b", "", data.kind === "unjudged" ? "? no verdict" : `${KINDS[data.kind]} ${data.kind}`), ` ${number(data.length)} tokens`);
    if (data.kind !== "unjudged") facts.append(` · reward ${data.reward}`);
    for (const [name, part] of Object.entries(data.parts)) facts.append(` · ${name} ${part}`);
    if (data.length) facts.append(` · mean entropy ${data.mean_entropy.toFixed(3)} nats · mean advantage ${signed(data.mean_advantage)}`);
    if (data.num_tokens > data.length) facts.append(` · ${number(data.num_tokens - data.length)} more by others, in italics: read, not learned from`);
    if (data.truncated) facts.append(" · cut at the length limit");
    const tokens = element("p", "tokens");
    tokens.append(...tokensOf(data, scales));
    made.append(facts, tokens);
    if (data.info) made.append(element("p", "facts info", toldOf(data.info)));
    const more = data.num_tokens - data.tokens.length;
    if (more > 0) made.append(element("p", "facts", `… and ${number(more)} more tokens.`));
    return made;
  }

  function drawTokens(run, group) {
    const prompt = element("p", "prompt", group.prompt);
    if (group.answer) prompt.append(element("span", "answer", `\nanswer: ${group.answer}`));
    const pair = element("div", "pair");
    for (const kind of Object.keys(KINDS)) {
      const shown = group.responses.filter((each) => each.tokens && each.kind === kind);
      const column = element("div", kind);
      column.append(...shown.map((each) => response(each, run.scales)));
      if (shown.length) pair.append(column);
    }
    byId("group").replaceChildren(prompt, pair);
    for (const [view, scale] of Object.entries(run.scales)) {
      const isEntropy = view === "entropy";
      document.querySelector(`.scale-${view} .low`).textContent = isEntropy ? "0" : `−${short(scale)}`;
      document.querySelector(`.scale-${view} .high`).textContent = isEntropy ? `${short(scale)} nats` : `+${short(scale)}`;
    }
  }

  const readout = byId("readout");
  let pointedAt = null;
  function point(event) {
    pointedAt?.classList.remove("chosen");
    pointedAt = event.target.closest?.("span[data-v]");
    readout.hidden = !pointedAt;
    if (!pointedAt) return;
    pointedAt.classList.add("chosen");
    const [entropy, shaped, advantage] = pointedAt.dataset.v.split(" ");
    const text = JSON.stringify(pointedAt.textContent.replace("↵", ""));
    readout.textContent = `${text}   entropy ${entropy} nats   shaped reward ${shaped}   advantage ${advantage}`;
  }
  document.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse") point(event); });
  document.addEventListener("click", point);

  // ---------------------------------------------------------------------------------------------------------------- heat map

  /** Correct responses first, each kind by length: columns thin out from left to right. */
  function heatmap(run, group) {
    const place = (each) => Object.keys(KINDS).indexOf(each.kind);
    const rows = [...group.responses].sort((a, b) => place(a) - place(b) || b.length - a.length);
    const width = Math.max(1, ...rows.map((row) => row.entropy.length));
    const positions = Array.from({ length: width }, (_, i) => i + 1);
    const counted = { correct: 0, incorrect: 0, unjudged: 0 };
    const reach = (name, kind, color, dash) => ({
      type: "scatter", mode: "lines", name, x: positions, y: positions.map((t) => rows.filter((row) => row.kind === kind && row.length >= t).length),
      yaxis: "y2", line: { width: 2, shape: "hvh", color, dash }, hovertemplate: `%{y} ${name}<extra></extra>`,
    });
    const data = [
      {
        type: "heatmap", x: positions, y: rows.map((row) => `${KINDS[row.kind]} ${++counted[row.kind]}`), z: rows.map((row) => positions.map((_, i) => row.entropy[i] ?? null)),
        zmin: 0, zmax: run.scales.entropy || 1, colorscale: HEAT, showscale: false, xgap: width > 150 ? 0 : 0.5, ygap: 1, hoverongaps: false,
        hovertemplate: "%{z:.3~g} nats at position %{x}, %{y}<extra></extra>",
      },
      reach("d, correct", "correct", BLUE, "solid"), reach("h, incorrect", "incorrect", ORANGE, "dot"),
    ];
    const axis = { zeroline: false, automargin: true, gridcolor: GRID };
    const layout = {
      hovermode: "closest", paper_bgcolor: "transparent", plot_bgcolor: "transparent", margin: { l: 8, r: 12, t: 10, b: 8 },
      legend: { orientation: "h", x: 0, y: 1.03, yanchor: "bottom" },
      xaxis: { ...axis, showgrid: false, ticks: "outside", title: { text: "position", standoff: 4 }, anchor: "y2", range: [0.5, width + 0.5] },
      yaxis: { ...axis, showgrid: false, autorange: "reversed", domain: [0.3, 1], type: "category", dtick: rows.length > 24 ? undefined : 1 },
      yaxis2: { ...axis, domain: [0, 0.22], range: [-0.2, rows.length + 0.4], nticks: 4, fixedrange: isTouched },
    };
    byId("plot-heatmap").style.height = `${Math.min(640, 170 + 18 * rows.length)}px`;
    const cut = rows.filter((row) => row.entropy.length < row.length);
    const [shown, longest] = [width, Math.max(...cut.map((row) => row.length))].map((value) => value.toLocaleString("en"));
    byId("heatmap-cut").textContent = cut.length
      ? `The first ${shown} positions of up to ${longest}: ${cut.length} of ${rows.length} responses are longer than is drawn.` : "";
    return { data, layout };
  }

  // ------------------------------------------------------------------------------------------------------------------ choice

  const count = (group, kind) => group.responses.filter((each) => each.kind === kind).length;

  /** What chat templates put around a question says nothing in a list of them. */
  const CHAT_MARKS = /<\|[^|>]*\|>(system|user|assistant)?/g;
  function label(group) {
    const unjudged = count(group, "unjudged") ? `, ${count(group, "unjudged")} without a verdict` : "";
    const prompt = group.prompt.replace(CHAT_MARKS, " ").replace(/\s+/g, " ").trim();
    return `step ${group.step} · ${count(group, "correct")} of ${group.responses.length} correct${unjudged} · ${prompt.slice(0, 60)}`;
  }

  /** The chosen run and the place of the chosen group, or of one of the nearest step if it is gone; if none was chosen, of the last with both outcomes. */
  function current() {
    const run = runs.find((each) => each.name === chosen.run) ?? runs[0];
    const { groups } = run;
    if (run.name !== chosen.run || chosen.step === undefined) {
      const last = groups.findLastIndex((group) => count(group, "correct") && count(group, "incorrect"));
      return [run, last < 0 ? groups.length - 1 : last];
    }
    const same = groups.findIndex((group) => group.step === chosen.step && group.group_id === chosen.id);
    const distances = groups.map((group) => Math.abs(group.step - chosen.step));
    return [run, same < 0 ? distances.indexOf(Math.min(...distances)) : same];
  }

  function choose(run, place) {
    const group = run.groups[place];
    chosen = { run: run.name, step: group?.step, id: group?.group_id };
    return show();
  }

  function fill(select, labels, place) {
    select.replaceChildren(...labels.map((text, i) => new Option(text, i, false, i === place)));
  }

  function show() {
    const [run, place] = current();
    chosen.run ??= run.name;
    const [ofRun, ofGroup] = ["run", "group"].map((name) => document.querySelector(`#pick-${name} select`));
    fill(ofRun, runs.map((each) => each.name), runs.indexOf(run));
    fill(ofGroup, run.groups.map(label), place);
    ofRun.parentElement.hidden = runs.length < 2;
    ofRun.onchange = () => choose(runs[ofRun.value]);
    ofGroup.onchange = () => choose(run, ofGroup.value);
    for (const [id, other] of [["previous", place - 1], ["next", place + 1]]) {
      byId(id).disabled = !run.groups[other];
      byId(id).onclick = () => choose(run, other);
    }
    drawTokens(run, run.groups[place]);
    return draw("heatmap", heatmap(run, run.groups[place]));
  }

  /** Whoever has scrolled to the texts reads one, which stays; further up the newest is as welcome as the newest curve. */
  function hold() {
    const texts = byId("group")?.getBoundingClientRect();
    if (!texts?.height || texts.top > innerHeight || texts.bottom < 0) return;
    const [run, place] = current();
    chosen = { run: run.name, step: run.groups[place].step, id: run.groups[place].group_id };
  }

  async function render() {
    const data = JSON.parse(byId("data").textContent);
    runs = data.runs.filter((run) => run.groups.length);
    for (const [key, figure] of Object.entries(data.figures)) await draw(key, figure);
    if (runs.length) await show();
    document.body.dataset.drawn = "yes";
  }

  return { render, hold, isDrawn: render() };
})();
