"use strict";
/* Draws the figures and keeps them in the reader's colours; `report.render(data)` draws anew, `report.isDrawn` is the promise of the
   first time, and `report.first` what it draws. */
const report = (() => {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const isCoarse = matchMedia("(pointer: coarse)").matches;
  const PALETTE_SIZE = 9;
  let shown = null;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (index) => css(index < 0 ? "--alarm" : `--c${index % PALETTE_SIZE}`);

  function traces(figure) {
    return figure.data.map((trace) => {
      if (trace.meta.scale) return { ...trace, colorscale: [[0, css("--cold")], [1, css("--heat")]] };
      const own = color(trace.meta.color);
      const drawn = { ...trace };
      if (trace.type === "bar") drawn.marker = { ...trace.marker, color: own };
      if (trace.line) drawn.line = { ...trace.line, color: own };
      if (trace.type === "scatter") drawn.marker = { size: 6, ...trace.marker, color: own };
      if (trace.error_y) drawn.error_y = { ...trace.error_y, color: own };
      return drawn;
    });
  }

  function layout(figure) {
    const axis = { gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), tickcolor: css("--line"), automargin: true, fixedrange: isCoarse };
    const isOfNames = figure.data.some((trace) => trace.type === "bar" && typeof trace.x[0] === "string");
    const named = new Set(figure.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name));
    const own = figure.layout;
    const steps = isOfNames ? { type: "category" } : { title: { text: "step", standoff: 4 }, tickformat: ",d", rangemode: "tozero" };
    return {
      hovermode: isOfNames ? "closest" : "x unified",
      ...own,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--muted") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 12, t: 10, b: 8 },
      showlegend: named.size > 1,
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.03, yanchor: "bottom", font: { size: 12 }, itemwidth: 30, traceorder: "normal" },
      hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 } },
      dragmode: isCoarse ? false : "zoom",
      xaxis: { ...axis, showgrid: false, ticks: "outside", ticklen: 4, ...steps, ...own.xaxis },
      yaxis: { ...axis, ...own.yaxis },
      ...(own.yaxis2 ? { yaxis2: { ...axis, ...own.yaxis2 } } : {}),
    };
  }

  const options = { displayModeBar: false, responsive: true };
  const draw = (key, figure) => Plotly.react(`plot-${key}`, traces(figure), layout(figure), options)
    .then((plot) => { plot.dataset.drawn = "yes"; });

  async function render(data) {
    shown = data;
    for (const [key, figure] of Object.entries(data.figures)) await draw(key, figure);
    await sampledGroups.render(data.runs, draw);
    document.body.dataset.drawn = "yes";
  }

  const readout = document.getElementById("readout");
  let chosen = null;
  function show(token) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = token;
    readout.hidden = !token;
    if (!token) return;
    token.classList.add("chosen");
    const [entropy, shaped, advantage] = token.dataset.v.split(" ");
    readout.textContent = `${JSON.stringify(token.textContent.replace("↵", ""))}   entropy ${entropy} nats   shaped reward ${shaped}   advantage ${advantage}`;
  }
  const tokenAt = (event) => (event.target.closest ? event.target.closest("span[data-v]") : null);
  document.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse") show(tokenAt(event)); });
  document.addEventListener("click", (event) => show(tokenAt(event)));

  scheme.addEventListener("change", () => render(shown));
  const first = JSON.parse(document.getElementById("data").textContent);
  return { render, first, isDrawn: render(first) };
})();
