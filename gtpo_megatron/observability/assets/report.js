"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const isCoarse = matchMedia("(pointer: coarse)").matches;
  const PALETTE_SIZE = 9;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (index) => css(index < 0 ? "--alarm" : `--c${index % PALETTE_SIZE}`);

  function traces(figure) {
    return figure.data.map((trace) => {
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
    const axis = { gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), tickcolor: css("--line"), automargin: true };
    const isBarOfRuns = figure.data.some((trace) => trace.type === "bar" && typeof trace.x[0] === "string");
    const named = new Set(figure.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name));
    const own = figure.layout;
    return {
      ...own,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--muted") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 12, t: 10, b: 8 },
      showlegend: named.size > 1,
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.03, yanchor: "bottom", font: { size: 12 }, itemwidth: 30, traceorder: "normal" },
      hovermode: isBarOfRuns ? "closest" : "x unified",
      hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 } },
      dragmode: isCoarse ? false : "zoom",
      xaxis: { ...axis, showgrid: false, ticks: "outside", ticklen: 4, fixedrange: isCoarse, ...(isBarOfRuns ? { type: "category" } : { title: { text: "step", standoff: 4 }, tickformat: ",d", rangemode: "tozero" }), ...own.xaxis },
      yaxis: { ...axis, fixedrange: isCoarse, ...own.yaxis },
    };
  }

  const options = { displayModeBar: false, responsive: true };
  const draw = (key) => Plotly.react(`plot-${key}`, traces(figures[key]), layout(figures[key]), options)
    .then((plot) => { plot.dataset.drawn = "yes"; });
  const drawAll = () => Object.keys(figures).reduce((before, key) => before.then(() => draw(key)), Promise.resolve());

  drawAll();
  scheme.addEventListener("change", drawAll);

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
  const tokenAt = (event) => event.target.closest ? event.target.closest("span[data-v]") : null;
  document.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse") show(tokenAt(event)); });
  document.addEventListener("click", (event) => show(tokenAt(event)));
})();
