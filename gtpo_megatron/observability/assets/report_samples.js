"use strict";
/* The sampled groups: tokens coloured by what the algorithm saw of them, and the heatmap of a group's entropies.
   All texts of a model enter the page as textContent, never as HTML. */
const sampledGroups = (() => {
  /** By name, step and id: places in the lists change while a run goes on. Without a group the most telling one is shown. */
  const chosen = { run: null, group: null };
  let runs = [];

  const byId = (id) => document.getElementById(id);
  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => String(Number(value.toPrecision(3)));
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  const level = (value, scale) => (scale > 0 ? Math.max(-1, Math.min(1, value / scale)).toFixed(2) : "0");
  /** In the order of the heatmap's rows, with the mark of a row. */
  const KINDS = { correct: "✓", incorrect: "✗", unjudged: "?" };
  const count = (group, kind) => group.responses.filter((each) => each.kind === kind).length;

  function write(made, text) {
    if (!text) made.append(element("u", "", "∅"));
    text.split("\n").forEach((part, index) => {
      if (index) made.append(element("u", "", "↵"), "\n");
      made.append(part);
    });
    return made;
  }

  function token(text, entropy, shaped, advantage, scales) {
    const made = element("span");
    made.style.cssText = `--e:${level(entropy, scales.entropy)};--s:${level(shaped, scales.shaped)};--a:${level(advantage, scales.advantage)}`;
    made.dataset.v = `${short(entropy)} ${short(shaped)} ${short(advantage)}`;
    return write(made, text);
  }

  /** The tokens in order; those that the policy did not write have no numbers. */
  function tokensOf(data, scales) {
    const foreign = new Set(data.foreign);
    let own = -1;
    return data.tokens.map((text, i) => {
      if (foreign.has(i)) return write(element("i", "foreign"), text);
      own += 1;
      return token(text, data.entropy[own], data.shaped[own], data.advantage[own], scales);
    });
  }

  function response(data, scales) {
    const made = element("div", "response");
    const facts = element("p", "facts");
    facts.append(element("b", "", data.kind === "unjudged" ? "no verdict" : data.kind), ` ${data.length.toLocaleString("en")} tokens`);
    if (data.length) {
      facts.append(` · mean entropy ${data.mean_entropy.toFixed(3)} nats · mean advantage ${signed(data.mean_advantage)}`);
    }
    const total = data.total ?? data.length;
    if (total > data.length) facts.append(` · ${(total - data.length).toLocaleString("en")} more by others, in italics: read, not learned from`);
    if (data.truncated) facts.append(" · cut at the length limit");
    const tokens = element("p", "tokens");
    tokens.append(...tokensOf(data, scales));
    made.append(facts, tokens);
    const more = total - data.tokens.length;
    if (more > 0) made.append(element("p", "facts", `… and ${more.toLocaleString("en")} more tokens.`));
    return made;
  }

  function drawTokens(run, group) {
    const prompt = element("p", "prompt", group.prompt);
    if (group.answer) prompt.append(element("span", "answer", `\nanswer: ${group.answer}`));
    const pair = element("div", "pair");
    for (const kind of Object.keys(KINDS)) {
      const shown = group.responses.filter((each) => each.tokens && each.kind === kind);
      if (!shown.length) continue;
      const column = element("div", kind);
      shown.forEach((each) => column.append(response(each, run.scales)));
      pair.append(column);
    }
    const made = element("div", "group");
    made.append(prompt, pair);
    byId("group").replaceChildren(made);
  }

  function drawScales(scales) {
    for (const [view, scale] of Object.entries(scales)) {
      const isEntropy = view === "entropy";
      document.querySelector(`.scale-${view} .low`).textContent = isEntropy ? "0" : `−${short(scale)}`;
      document.querySelector(`.scale-${view} .high`).textContent = isEntropy ? `${short(scale)} nats` : `+${short(scale)}`;
    }
  }

  /** Correct responses first, each kind by length: columns thin out from left to right. */
  function inOrder(group) {
    const place = (response) => Object.keys(KINDS).indexOf(response.kind);
    return [...group.responses].sort((a, b) => place(a) - place(b) || b.length - a.length);
  }

  /** What the heatmap leaves out of responses that are longer than the page can hold. */
  function cutNote(group) {
    const cut = group.responses.filter((each) => each.entropy.length < each.length);
    if (!cut.length) return "";
    const shown = Math.max(...cut.map((each) => each.entropy.length)).toLocaleString("en");
    const longest = Math.max(...cut.map((each) => each.length)).toLocaleString("en");
    return `The first ${shown} positions of up to ${longest}: ${cut.length} of ${group.responses.length} responses are longer than is drawn.`;
  }

  function heatmap(run, group) {
    const rows = inOrder(group);
    const width = Math.max(1, ...rows.map((row) => row.entropy.length));
    const positions = Array.from({ length: width }, (_, i) => i + 1);
    const counted = { correct: 0, incorrect: 0, unjudged: 0 };
    const labels = rows.map((row) => `${KINDS[row.kind]} ${++counted[row.kind]}`);
    const reaching = (kind) => positions.map((t) => rows.filter((row) => row.kind === kind && row.length >= t).length);
    const steps = (name, y, color) => ({
      type: "scatter", mode: "lines", name, x: positions, y, yaxis: "y2", meta: { color }, line: { width: 2, shape: "hvh" }, hovertemplate: `%{y} ${name}<extra></extra>`,
    });
    const traces = [
      {
        type: "heatmap", x: positions, y: labels, z: rows.map((row) => positions.map((_, i) => row.entropy[i] ?? null)), zmin: 0, zmax: run.scales.entropy || 1,
        meta: { scale: "heat" }, showscale: false, xgap: width > 150 ? 0 : 0.5, ygap: 1, hoverongaps: false,
        hovertemplate: "%{z:.3~g} nats at position %{x}, %{y}<extra></extra>",
      },
      steps("d, correct", reaching("correct"), 2), steps("h, incorrect", reaching("incorrect"), 5),
    ];
    const axis = { zeroline: false };
    const layout = {
      hovermode: "closest",
      xaxis: { ...axis, title: { text: "position", standoff: 4 }, anchor: "y2", range: [0.5, width + 0.5] },
      yaxis: { ...axis, autorange: "reversed", domain: [0.3, 1], showgrid: false, type: "category", dtick: rows.length > 24 ? undefined : 1 },
      yaxis2: { ...axis, domain: [0, 0.22], range: [-0.2, rows.length + 0.4], nticks: 4 },
    };
    return { data: traces, layout, height: Math.min(640, 170 + 18 * rows.length) };
  }

  const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";

  function heaviest(run, kind) {
    const tokens = [...run.heaviest[kind]].reverse();
    return {
      data: [{
        type: "bar", orientation: "h", x: tokens.map((each) => each.weight), y: tokens.map((_, i) => i),
        name: kind, meta: { color: kind === "correct" ? 2 : 5 }, customdata: tokens.map((each) => [each.count, each.entropy]),
        hovertemplate: "weight %{x:.2f}, seen %{customdata[0]} times, mean entropy %{customdata[1]:.3~g} nats<extra></extra>",
      }],
      layout: {
        hovermode: "closest", bargap: 0.25, xaxis: { title: { text: "weight", standoff: 4 }, rangemode: "tozero", tickformat: ".2~f" },
        yaxis: { showgrid: false, tickvals: tokens.map((_, i) => i), ticktext: tokens.map((each) => escapeForPlotly(visible(each.token))) },
      },
    };
  }

  /** Plotly reads a little HTML in labels; a token must stay text. */
  const escapeForPlotly = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function fill(select, labels, index) {
    select.replaceChildren(...labels.map((label, i) => {
      const option = element("option", "", label);
      option.value = i;
      option.selected = i === index;
      return option;
    }));
  }

  /** What chat templates put around a question says nothing in a list of them. */
  const CHAT_MARKS = /<\|[^|>]*\|>(system|user|assistant)?/g;

  function label(group) {
    const unjudged = count(group, "unjudged") ? `, ${count(group, "unjudged")} without a verdict` : "";
    const prompt = group.prompt.replace(CHAT_MARKS, " ").replace(/\s+/g, " ").trim();
    return `step ${group.step} · ${count(group, "correct")} of ${group.responses.length} correct${unjudged} · ${prompt.slice(0, 60)}`;
  }

  /** The last group with both outcomes says most. */
  function mostTelling(groups) {
    const isMixed = (group) => count(group, "correct") > 0 && count(group, "incorrect") > 0;
    const index = groups.findLastIndex(isMixed);
    return index < 0 ? groups.length - 1 : index;
  }

  const shownRun = () => runs.find((run) => run.name === chosen.run) ?? runs[0];

  /** Place of the chosen group, or of one of the nearest step where it is no longer sent. */
  function shownIndex({ name, groups }) {
    if (!chosen.group || name !== chosen.run) return mostTelling(groups);
    const { step, id } = chosen.group;
    const same = groups.findIndex((group) => group.step === step && group.id === id);
    if (same >= 0) return same;
    const distances = groups.map((group) => Math.abs(group.step - step));
    return distances.indexOf(Math.min(...distances));
  }

  function choose(run, { step, id }) {
    Object.assign(chosen, { run: run.name, group: { step, id } });
  }

  /** From now on the group on display stays, as if the reader had chosen it. */
  function hold() {
    if (!runs.length) return;
    const run = shownRun();
    choose(run, run.groups[shownIndex(run)]);
  }

  let draw = null;

  async function show() {
    const run = shownRun();
    const index = shownIndex(run);
    chosen.run ??= run.name;
    fill(byId("pick-run").querySelector("select"), runs.map((each) => each.name), runs.indexOf(run));
    byId("pick-run").hidden = runs.length < 2;
    fill(byId("pick-group").querySelector("select"), run.groups.map(label), index);
    byId("previous").disabled = index <= 0;
    byId("next").disabled = index >= run.groups.length - 1;
    drawScales(run.scales);
    const group = run.groups[index];
    byId("group").replaceChildren();
    if (group) {
      drawTokens(run, group);
      byId("heatmap-cut").textContent = cutNote(group);
      const figure = heatmap(run, group);
      byId("plot-heatmap").style.height = `${figure.height}px`;
      await draw("heatmap", figure);
    }
    for (const kind of ["correct", "incorrect"]) {
      const plot = byId(`plot-heaviest-${kind}`);
      const isEmpty = !run.heaviest[kind].length;
      plot.hidden = isEmpty;
      plot.nextElementSibling.hidden = !isEmpty;
      if (!isEmpty) await draw(`heaviest-${kind}`, heaviest(run, kind));
    }
  }

  function move(by) {
    const run = shownRun();
    choose(run, run.groups[Math.max(0, Math.min(run.groups.length - 1, shownIndex(run) + by))]);
    return show();
  }

  function listen() {
    byId("pick-run").querySelector("select").onchange = (event) => {
      Object.assign(chosen, { run: runs[event.target.value].name, group: null });
      show();
    };
    byId("pick-group").querySelector("select").onchange = (event) => {
      const run = shownRun();
      choose(run, run.groups[event.target.value]);
      show();
    };
    byId("previous").onclick = () => move(-1);
    byId("next").onclick = () => move(1);
  }

  /** Shows the groups of the runs that have any; `drawFigure(key, figure)` draws a plot. */
  function render(all, drawFigure) {
    runs = all.filter((run) => run.groups.length);
    draw = drawFigure;
    if (!runs.length) return Promise.resolve();
    listen();
    return show();
  }

  return { render, hold };
})();
