"use strict";
/* Draws a page's figures, over the axis that the reader chooses, and its sampled groups. `report.render()` draws what #data holds now. */
const report = (() => {
  const byId = (id) => document.getElementById(id);
  const isTouched = matchMedia("(pointer: coarse)").matches;
  const [MINUTE_S, HOUR_S, LONG_H] = [60, 3600, 2];

  let figures = {}, axes = { names: {}, runs: [] };
  let axis = "step";

  // -------------------------------------------------------------------------------------------------------------------- axes

  /** The value of the chosen axis after a step of a run, between two known steps in proportion. */
  function after(step, table) {
    const { steps } = table, sums = table[axis];
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    if (steps[low] <= step || low === 0) return sums[low];
    return sums[low - 1] + ((step - steps[low - 1]) / (steps[low] - steps[low - 1])) * (sums[low] - sums[low - 1]);
  }

  /** A figure over steps, over the chosen axis; one of anything else as it is. */
  function overAxis({ data, layout }) {
    if (axis === "step" || !data.some((trace) => trace.meta !== undefined)) return { data, layout };
    const longest = Math.max(...axes.runs.map((table) => table[axis].at(-1)));
    const [unit, name] = axis !== "time" ? [1, axes.names[axis]] : longest > LONG_H * HOUR_S ? [HOUR_S, "hours"] : [MINUTE_S, "minutes"];
    const moved = data.map((trace) => ({ ...trace, x: trace.meta === undefined ? [] : trace.x.map((step) => after(step, axes.runs[trace.meta]) / unit) }));
    const places = moved.flatMap((trace) => trace.x);
    const ends = places.reduce(([least, most], x) => [Math.min(least, x), Math.max(most, x)], [Infinity, -Infinity]);
    for (const trace of moved) if (trace.meta === undefined) trace.x = ends; // a limit
    const format = { title: { ...layout.xaxis.title, text: name }, tickformat: axis === "time" ? "~g" : "~s", dtick: undefined };
    return { data: moved, layout: { ...layout, xaxis: { ...layout.xaxis, ...format } } };
  }

  // ----------------------------------------------------------------------------------------------------------------- figures

  async function draw(key, { data, layout }) {
    const free = Object.entries(layout).filter(([name]) => /^[xy]axis/.test(name)).map(([name, own]) => [name, { ...own, fixedrange: isTouched }]);
    const plot = byId(`plot-${key}`);
    await Plotly.react(plot, data, { ...layout, ...Object.fromEntries(free), dragmode: isTouched ? false : "zoom" }, { displayModeBar: false, responsive: true });
    plot.dataset.drawn = "yes";
  }

  const isOpen = (key) => byId(`plot-${key}`) && !byId(`plot-${key}`).closest("details:not([open])");

  /** Those that are folded have no width yet; they are drawn when they are opened. */
  async function drawFigures() {
    for (const [key, figure] of Object.entries(figures)) if (isOpen(key)) await draw(key, overAxis(figure));
  }
  document.addEventListener("toggle", ({ target }) => {
    const key = target.querySelector?.(".plot")?.id.replace("plot-", "");
    if (target.open && key in figures) draw(key, overAxis(figures[key]));
  }, true);
  document.addEventListener("change", ({ target }) => {
    if (target.name !== "axis") return;
    axis = target.value;
    drawFigures();
  });

  const groups = sampledGroups(draw);

  async function render() {
    const data = JSON.parse(byId("data").textContent);
    figures = data.figures;
    axes = data.axes ?? { names: {}, runs: [] };
    if (!(axis in axes.names)) axis = "step";
    for (const choice of document.querySelectorAll("input[name=axis]")) choice.checked = choice.value === axis;
    await drawFigures();
    await groups.render(data);
    document.body.dataset.drawn = "yes";
  }

  return { render, hold: groups.hold, isDrawn: render() };
})();
