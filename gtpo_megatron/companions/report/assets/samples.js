"use strict";
/* The sampled group that the reader chooses: its responses in the order asked for, their tokens, coloured, and the heat map of its entropies.
   All texts of a model enter the page as textContent, never as HTML. `draw` draws a plotly figure into the plot of a key. */
const sampledGroups = (draw) => {
  const byId = (id) => document.getElementById(id);
  const element = (tag, name, text) => Object.assign(document.createElement(tag), { className: name, textContent: text ?? "" });
  const short = (value) => String(Number(value.toPrecision(3)));
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  const number = (value) => value.toLocaleString("en");
  const level = (value, scale) => (scale > 0 ? Math.max(-1, Math.min(1, value / scale)).toFixed(2) : "0");
  /** In the order of the heat map's rows, with the mark of a row. */
  const KINDS = { correct: "✓", incorrect: "✗", ungraded: "?" };
  /** Responses of a kind that a group opens with. */
  const NUM_FIRST = 2;
  /** Tokens of others that are shown unfolded. */
  const NUM_OPEN = 24;
  /** As in traces.py. */
  const BLUE = "#3f83d6", ORANGE = "#d06a1e", GRID = "rgba(128,136,146,0.25)";
  const HEAT = [[0, "rgba(150,90,200,0.08)"], [1, "rgb(150,90,200)"]];

  /** The runs that have groups, the texts of tokens, and what the reader chose, by name, step and id: places in the lists change while a run goes on. */
  let runs = [], words = [];
  let chosen = {};
  let order = "sampled", query = "", isAll = false;

  // ----------------------------------------------------------------------------------------------------------------- packing

  const codes = (text) => new Uint16Array(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);
  /** As in packed.py: the sign, five bits for the power of ten, three digits. */
  function unpack(code) {
    const exponent = ((code >> 10) & 31) - 24;
    const magnitude = exponent < 0 ? (code & 1023) / 10 ** -exponent : (code & 1023) * 10 ** exponent;
    return code >> 15 ? -magnitude : magnitude;
  }

  const VIEWS = ["entropy", "shaped_rewards", "advantages"];
  /** A response with its numbers and the texts of its tokens; made once. */
  const read = new WeakMap();
  function opened(response) {
    if (!read.has(response)) {
      const values = Object.fromEntries(VIEWS.map((view) => [view, Array.from(codes(response[view]), unpack)]));
      const tokens = Array.from(codes(response.tokens), (index) => words[index]);
      read.set(response, { ...values, tokens, text: tokens.join("") });
    }
    return read.get(response);
  }

  // ------------------------------------------------------------------------------------------------------------------ search

  /** First and last-plus-one character of every match in a text. */
  function matches(text) {
    const found = [];
    if (!query) return found;
    const [where, what] = [text.toLowerCase(), query.toLowerCase()];
    for (let at = where.indexOf(what); at >= 0; at = where.indexOf(what, at + what.length)) found.push([at, at + what.length]);
    return found;
  }

  const isFound = (response) => matches(opened(response).text).length > 0;
  const isPrompt = (group) => matches(`${group.prompt}\n${group.answer}`).length > 0;
  /** The responses that the search leaves: all of a group whose prompt has the text. */
  const left = (group) => (!query || isPrompt(group) ? group.responses : group.responses.filter(isFound));

  function inOrder(responses) {
    if (order === "sampled") return responses;
    const key = order.replace("-", ""), sign = order.startsWith("-") ? 1 : -1;
    return [...responses].sort((a, b) => sign * (a[key] - b[key]));
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
  function tokensOf(response, scales) {
    const data = opened(response);
    const foreign = new Set(response.foreign), hits = matches(data.text);
    let own = -1, at = 0;
    return data.tokens.map((text, i) => {
      const [start, end] = [at, (at += text.length)];
      const hit = hits.some(([first, last]) => first < end && last > start) ? "hit" : "";
      const made = element(foreign.has(i) ? "i" : "span", hit);
      made.setAttribute("role", "option");
      if (foreign.has(i)) {
        made.classList.add("foreign");
        made.setAttribute("aria-disabled", "true");
        return write(made, text);
      }
      own += 1;
      const values = VIEWS.map((view) => data[view][own]);
      made.style.cssText = `--e:${level(values[0], scales.entropy)};--s:${level(values[1], scales.shaped_rewards)};--a:${level(values[2], scales.advantages)}`;
      made.dataset.v = values.map(short).join(" ");
      made.tabIndex = own ? -1 : 0;
      return write(made, text);
    });
  }

  /** What the reader has unfolded, by run, group, response and turn; it stays so when the page is drawn anew. */
  const unfolded = new Set();
  /** What a branch follows, in words: it begins anew, or goes on after a turn, or is another answer to what that has read. */
  function followed(after, turns) {
    if (after < 0) return "a new sequence";
    const owns = turns.filter((one) => !one.isForeign);
    const last = owns.findIndex((one) => one.end === after) + 1;
    return last ? `after turn ${last}` : `another answer in place of turn ${owns.findIndex((one) => one.begin === after) + 1}`;
  }

  /** A conversation: the policy's turns, and between them what others said, folded where it is long and the search finds nothing in it.
      One that branches has its turns numbered, and each branch stands further in than what it follows. */
  function turnsOf(response, scales, name) {
    const turns = [], branches = new Map(response.branches);
    let depth = 0;
    tokensOf(response, scales).forEach((token, at) => {
      const isForeign = token.classList.contains("foreign"), after = branches.get(at);
      if (after !== undefined || turns.at(-1)?.isForeign !== isForeign) {
        const from = turns.find((one) => one.begin < after && after <= one.end);
        if (after !== undefined) depth = after > 0 && from ? from.depth + 1 : 0;
        turns.push({ isForeign, depth, begin: at, tokens: [], label: after === undefined ? "" : followed(after, turns) });
      }
      turns.at(-1).tokens.push(token);
      turns.at(-1).end = at + 1;
    });
    let place = 0;
    return turns.flatMap((turn, at) => {
      const drawn = [drawnTurn(turn, `${name}.${at}`)];
      place += !turn.isForeign;
      if (branches.size && !turn.isForeign) drawn.unshift(element("div", "label", `turn ${place}`));
      if (turn.label) drawn.unshift(element("div", "branch", turn.label));
      for (const one of drawn) one.style.marginLeft = `${20 * turn.depth}px`;
      return drawn;
    });
  }

  function drawnTurn({ isForeign, tokens }, key) {
    const made = element("div", isForeign ? "others" : "turn");
    made.append(...tokens);
    if (!isForeign || tokens.length <= NUM_OPEN) return made;
    const folded = element("details", "others"), text = made.textContent.replace(/[\s↵]+/g, " ").trim();
    const summary = element("summary", "", `${number(tokens.length)} tokens by others: ${text.length > 60 ? `${text.slice(0, 60)}…` : text}`);
    folded.open = unfolded.has(key) || tokens.some((token) => token.classList.contains("hit"));
    summary.onclick = () => (folded.open ? unfolded.delete(key) : unfolded.add(key)); // before it changes
    folded.append(summary, ...tokens);
    return folded;
  }

  /** What the reward said: each test with its status, then all else; a text that was cut is shown as it is. */
  function toldOf(info) {
    try {
      const { tests = [], ...rest } = JSON.parse(info);
      const statuses = tests.map((status, i) => `${i + 1} ${status === "passed" ? "✓" : `✗ ${status}`}`);
      const others = Object.entries(rest).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
      return [...(statuses.length ? [`tests: ${statuses.join(" · ")}`] : []), ...others].join("\n");
    } catch {
      return info;
    }
  }

  function response(data, place, group, run) {
    const made = element("div", "response");
    made.dataset.place = place;
    const facts = element("p", "facts");
    const title = data.kind === "ungraded" ? "? no verdict" : `${KINDS[data.kind]} ${data.kind}`;
    facts.append(element("b", "", title), " ", linkTo(run, group, place, `response ${place}`), ` · ${number(data.length)} tokens`);
    if (data.kind !== "ungraded") facts.append(` · reward ${data.reward}`);
    for (const [name, part] of Object.entries(data.parts)) facts.append(` · ${name} ${part}`);
    if (data.length) facts.append(` · mean entropy ${data.mean_entropy.toFixed(3)} nats · mean advantage ${signed(data.mean_advantage)}`);
    if (data.num_tokens > data.length) facts.append(` · ${number(data.num_tokens - data.length)} more by others, in italics: read, not learned from`);
    if (data.truncated) facts.append(" · cut at the length limit");
    const tokens = element("div", "tokens");
    tokens.setAttribute("role", "listbox");
    tokens.setAttribute("aria-orientation", "horizontal");
    tokens.setAttribute("aria-label", `tokens of response ${place}, ${data.kind}: arrow keys move over them`);
    tokens.append(...turnsOf(data, run.scales, `${run.name}.${group.step}.${group.group_id}.${place}`));
    made.append(facts, tokens);
    if (data.info) made.append(element("p", "facts info", toldOf(data.info)));
    const more = data.num_tokens - opened(data).tokens.length;
    if (more > 0) made.append(element("p", "facts", `… and ${number(more)} more tokens.`));
    return made;
  }

  function drawTokens(run, group) {
    const prompt = element("p", "prompt", group.prompt);
    if (group.answer) prompt.append(element("span", "answer", `\nanswer: ${group.answer}`));
    const pair = element("div", "pair");
    const ordered = inOrder(left(group));
    let isMore = false;
    for (const kind of Object.keys(KINDS)) {
      const ofKind = ordered.filter((each) => each.kind === kind);
      const shown = ofKind.filter((each, i) => isAll || i < NUM_FIRST || group.responses.indexOf(each) + 1 === chosen.response);
      isMore ||= shown.length < ofKind.length;
      const column = element("div", kind);
      column.append(...shown.map((each) => response(each, group.responses.indexOf(each) + 1, group, run)));
      if (shown.length) pair.append(column);
    }
    byId("group").replaceChildren(...missing(group), prompt, pair);
    byId("all").textContent = isAll ? `first ${NUM_FIRST} of each kind` : `all ${ordered.length} responses`;
    byId("all").setAttribute("aria-pressed", isAll);
    byId("all").parentElement.hidden = !isAll && !isMore;
    for (const [view, scale] of Object.entries(run.scales)) {
      const isEntropy = view === "entropy";
      document.querySelector(`.scale-${view} .low`).textContent = isEntropy ? "0" : `−${short(scale)}`;
      document.querySelector(`.scale-${view} .high`).textContent = isEntropy ? `${short(scale)} nats` : `+${short(scale)}`;
    }
  }

  const readout = byId("readout");
  let pointedAt = null;
  function saidOf(token) {
    const [entropy, shaped, advantage] = token.dataset.v.split(" ");
    const text = JSON.stringify(token.textContent.replace("↵", ""));
    return `${text}   entropy ${entropy} nats   shaped reward ${shaped}   advantage ${advantage}`;
  }

  function point(target) {
    pointedAt?.classList.remove("chosen");
    pointedAt = target?.closest?.("span[data-v]");
    readout.hidden = !pointedAt;
    if (!pointedAt) return;
    pointedAt.classList.add("chosen");
    readout.textContent = saidOf(pointedAt);
  }
  document.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse") point(event.target); });
  document.addEventListener("click", (event) => point(event.target));
  document.addEventListener("focusin", (event) => {
    const token = event.target.closest?.("span[data-v]");
    token?.setAttribute("aria-label", saidOf(token));
    point(token);
  });

  /** The token on the line above or below that lies nearest; the same one where there is no line. */
  function onNextLine(tokens, place, direction) {
    const from = tokens[place].getBoundingClientRect();
    let best = tokens[place], distance = Infinity, line = null;
    for (let i = place + direction; tokens[i]; i += direction) {
      const box = tokens[i].getClientRects()[0] ?? from;
      if (Math.abs(box.top - from.top) < 2) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) >= 2) break;
      if (Math.abs(box.left - from.left) < distance) [best, distance] = [tokens[i], Math.abs(box.left - from.left)];
    }
    return best;
  }

  document.addEventListener("keydown", (event) => {
    const token = event.target.closest?.("span[data-v]");
    if (!token || event.altKey || event.ctrlKey || event.metaKey) return;
    const tokens = [...token.closest(".tokens").querySelectorAll("span[data-v]")];
    const place = tokens.indexOf(token);
    const next = {
      ArrowRight: () => tokens[place + 1], ArrowLeft: () => tokens[place - 1], Home: () => tokens[0], End: () => tokens.at(-1),
      ArrowDown: () => onNextLine(tokens, place, 1), ArrowUp: () => onNextLine(tokens, place, -1),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const target = next() ?? token;
    token.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  });

  // ---------------------------------------------------------------------------------------------------------------- heat map

  /** Correct responses first, each kind by length: columns thin out from left to right. */
  function heatmap(run, group) {
    const place = (each) => Object.keys(KINDS).indexOf(each.kind);
    const rows = [...group.responses].sort((a, b) => place(a) - place(b) || b.length - a.length);
    const entropies = rows.map((row) => opened(row).entropy);
    const width = Math.max(1, ...entropies.map((row) => row.length));
    const positions = Array.from({ length: width }, (_, i) => i + 1);
    const reach = (name, kind, color, dash) => ({
      type: "scatter", mode: "lines", name, x: positions, y: positions.map((t) => rows.filter((row) => row.kind === kind && row.length >= t).length),
      yaxis: "y2", line: { width: 2, shape: "hvh", color, dash }, hovertemplate: `%{y} ${name}<extra></extra>`,
    });
    const data = [
      {
        type: "heatmap", x: positions, y: rows.map((row) => `${KINDS[row.kind]} ${group.responses.indexOf(row) + 1}`), z: entropies.map((row) => positions.map((_, i) => row[i] ?? null)),
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
      yaxis2: { ...axis, domain: [0, 0.22], range: [-0.2, rows.length + 0.4], nticks: 4 },
    };
    byId("plot-heatmap").style.height = `${Math.min(640, 170 + 18 * rows.length)}px`;
    const cut = rows.filter((row, i) => entropies[i].length < row.length);
    const longest = Math.max(...cut.map((row) => row.length));
    byId("heatmap-cut").textContent = cut.length
      ? `The first ${number(width)} positions of up to ${number(longest)}: ${cut.length} of ${rows.length} responses are longer than is drawn.` : "";
    return { data, layout };
  }

  // ------------------------------------------------------------------------------------------------------------------ choice

  const count = (group, kind) => group.responses.filter((each) => each.kind === kind).length;

  /** What chat templates put around a question says nothing in a list of them. */
  const CHAT_MARKS = /<\|[^|>]*\|>(system|user|assistant)?/g;
  function label(group) {
    const ungraded = count(group, "ungraded") ? `, ${count(group, "ungraded")} without a verdict` : "";
    const prompt = group.prompt.replace(CHAT_MARKS, " ").replace(/\s+/g, " ").trim();
    return `step ${group.step} · ${count(group, "correct")} of ${group.responses.length} correct${ungraded} · ${prompt.slice(0, 60)}`;
  }

  /** The chosen run, its groups that the search leaves, and the place among them of the chosen group, or of one of the nearest step if it is gone; if none was chosen, of the last with both outcomes. */
  function current() {
    const run = runs.find((each) => each.name === chosen.run) ?? runs[0];
    const groups = run.groups.filter((group) => left(group).length);
    if (run.name !== chosen.run || chosen.step === undefined) {
      const last = groups.findLastIndex((group) => count(group, "correct") && count(group, "incorrect"));
      return [run, groups, last < 0 ? groups.length - 1 : last];
    }
    const same = groups.findIndex((group) => group.step === chosen.step && group.group_id === chosen.id);
    const distances = groups.map((group) => Math.abs(group.step - chosen.step));
    return [run, groups, same < 0 ? distances.indexOf(Math.min(...distances)) : same];
  }

  function choose(run, group) {
    chosen = { run: run.name, step: group?.step, id: group?.group_id };
    return show();
  }

  /** A sentence if a link led to a group or response that is not here. */
  function missing(group) {
    const { linked, response: place } = chosen;
    if (!linked) return [];
    const isHere = group.step === chosen.step && group.group_id === chosen.id;
    if (isHere && (place === undefined || group.responses[place - 1])) return [];
    return [element("p", "missing", `The link's ${isHere ? `response ${place}` : `group ${chosen.id} of step ${chosen.step}`} is not on this page; this is the nearest that is.`)];
  }

  function linkTo(run, group, place, text) {
    const made = element("a", "", text);
    made.href = `#sample=${group.step}.${group.group_id}${place ? `.${place}` : ""}${runs.length > 1 ? `&run=${encodeURIComponent(run.name)}` : ""}`;
    return made;
  }

  /** Chooses what the page's address names, such as #sample=12.340.3: step, group, number of the response. */
  function follow() {
    const found = /^#sample=(\d+)\.(-?\d+)(?:\.(\d+))?(?:&run=(.*))?$/.exec(location.hash);
    if (!found || !runs.length) return false;
    const [, step, id, place, name] = found;
    let run = runs[0];
    try { run = runs.find((each) => each.name === decodeURIComponent(name)) ?? run; } catch { /* a broken escape names no run */ }
    chosen = { run: run.name, step: Number(step), id: Number(id), response: place ? Number(place) : undefined, linked: true };
    query = byId("search").querySelector("input").value = "";
    return true;
  }

  /** Whether the address names a sample. */
  async function showLinked() {
    if (!follow()) return false;
    await show();
    const target = document.querySelector(`.response[data-place="${chosen.response}"]`) ?? byId("group");
    for (const one of document.querySelectorAll(".linked")) one.classList.remove("linked");
    target.classList.add("linked");
    target.scrollIntoView({ block: "start" });
    return true;
  }
  addEventListener("hashchange", showLinked);

  function fill(select, labels, place) {
    select.replaceChildren(...labels.map((text, i) => new Option(text, i, false, i === place)));
  }

  function told(groups, run) {
    if (!query) return "";
    const responses = groups.reduce((sum, group) => sum + left(group).length, 0);
    return groups.length ? `${responses} responses in ${groups.length} of ${run.groups.length} groups` : `not found in ${run.groups.length} groups`;
  }

  function show() {
    const [run, groups, place] = current();
    chosen.run ??= run.name;
    const [ofRun, ofGroup, ofOrder] = ["run", "group", "order"].map((name) => document.querySelector(`#pick-${name} select`));
    fill(ofRun, runs.map((each) => each.name), runs.indexOf(run));
    fill(ofGroup, groups.map(label), place);
    ofRun.parentElement.hidden = runs.length < 2;
    ofRun.onchange = () => choose(runs[ofRun.value]);
    ofGroup.onchange = () => choose(run, groups[ofGroup.value]);
    ofOrder.onchange = () => { order = ofOrder.value; show(); };
    byId("search").oninput = (event) => { query = event.target.value; show(); };
    byId("all").onclick = () => { isAll = !isAll; show(); };
    for (const [id, other] of [["previous", place - 1], ["next", place + 1]]) {
      byId(id).disabled = !groups[other];
      byId(id).onclick = () => choose(run, groups[other]);
    }
    byId("found").textContent = told(groups, run);
    if (!groups.length) {
      byId("all").parentElement.hidden = true;
      return byId("group").replaceChildren(element("p", "missing", "No prompt or response that is shown has this text."));
    }
    drawTokens(run, groups[place]);
    return draw("heatmap", heatmap(run, groups[place]));
  }

  /** Whoever has scrolled to the texts reads one, which stays; further up the newest is as welcome as the newest curve. */
  function hold() {
    const texts = byId("group")?.getBoundingClientRect();
    if (!texts?.height || texts.top > innerHeight || texts.bottom < 0) return;
    const [run, groups, place] = current();
    if (groups.length) chosen = { ...chosen, run: run.name, step: groups[place].step, id: groups[place].group_id };
  }

  /** Shows what `data` holds now; the first time, what the page's address names. */
  let isFirst = true;
  async function render(data) {
    words = data.words ?? [];
    runs = data.runs.filter((run) => run.groups.length);
    if (!runs.length) return;
    const isShown = isFirst && (await showLinked());
    isFirst = false;
    if (!isShown) await show();
  }

  return { render, hold };
};
