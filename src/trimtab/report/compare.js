"use strict";
(() => {
  const { colour, plain, words, causeColour, axis, layout, tokensAxis, share, some, start } = trimtab;
  const shades = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
  const dashes = ["solid", "dash", "dot", "dashdot"]; // tell lines apart when the colours come round again

  // Intervals of a few seeds can reach past what an accuracy can be, and would squeeze the curves.
  const possible = (values) => values.map((value) => (value === null ? null : Math.min(1, Math.max(0, value))));

  function band(one, i) {
    const name = plain(one.name);
    const line = { color: colour(shades[i % shades.length]), dash: dashes[Math.floor(i / shades.length) % dashes.length] };
    const shared = { legendgroup: String(i), hoverinfo: "skip", showlegend: false, mode: "lines" };
    const traces = one.runs.map((run) => ({ ...shared, x: run.tokens_generated, y: run.accuracy, line: { ...line, width: 1 }, opacity: 0.35 }));
    if (some(one.low)) {
      traces.push({ ...shared, x: one.tokens, y: possible(one.high), line: { width: 0 } });
      traces.push({ ...shared, x: one.tokens, y: possible(one.low), line: { width: 0 }, fill: "tonexty", fillcolor: `${line.color}33` });
    }
    traces.push({ x: one.tokens, y: one.mean, name, legendgroup: String(i), mode: "lines", line: { ...line, width: 3 }, hovertemplate: "%{y:.1%}" });
    return traces;
  }

  const plots = {
    curves: (d) => [d.flatMap(band), layout({ xaxis: tokensAxis(), yaxis: axis("held-out accuracy", { tickformat: ".0%" }) })],
    waste(d) {
      const names = d.names.map(plain);
      const traces = Object.entries(d.series).map(([cause, x]) => ({
        type: "bar", orientation: "h", y: names, x, name: words(cause), marker: { color: causeColour(cause) }, hovertemplate: "%{x:.1%}",
      }));
      return [traces, layout({ barmode: "stack", hovermode: "closest", xaxis: axis("share of tokens", share), yaxis: axis("", { type: "category", autorange: "reversed" }) })];
    },
  };
  start(plots);
})();
