"use strict";
/** What every page of Trimtab shares: its data, text made safe, light and dark, colours, axes, and drawing. */
const trimtab = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  // The same characters as in the page's words: they would hide or reorder their neighbours.
  const control = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]/gu;
  const visible = (text) => text.replace(control, (c) => `‹U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);

  // Plotly reads a little HTML in names and hover texts; names out of a run must stay text.
  const clip = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);
  const plain = (text) => clip(visible(String(text))).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const words = (text) => plain(text).replace(/_/g, " ");

  // ------------------------------------------------------------ light and dark

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const modes = ["system", "light", "dark"];
  let mode = "system";
  try { mode = modes.includes(localStorage.getItem("trimtab-theme")) ? localStorage.getItem("trimtab-theme") : mode; } catch { /* no storage for this page */ }

  function applyTheme() {
    root.toggleAttribute("data-dark", mode === "dark" || (mode === "system" && system.matches));
    byId("theme").textContent = `Theme: ${mode}`;
    paintCauses();
    drawAll();
    for (const redraw of redraws) redraw();
  }


  // ------------------------------------------------------------ colours of causes, the same in bar, table and plot

  const fixed = { trained: "--c2", sampled: "--c0", reused: "--c3", forced: "--c5", "held back": "--c7" };
  const warm = ["--c1", "--c4", "--c5", "--c6", "--c3", "--c0"];
  const reasons = [];
  function causeColour(cause) {
    if (fixed[cause]) return colour(fixed[cause]);
    if (!reasons.includes(cause)) reasons.push(cause);
    return colour(warm[reasons.indexOf(cause) % warm.length]);
  }
  function paintCauses() {
    for (const element of document.querySelectorAll("[data-cause]")) element.style.background = causeColour(element.dataset.cause);
  }

  // ------------------------------------------------------------ plots

  // Plotly offers to upload a chart by default; nothing of a run may leave the machine.
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtons: [["toImage", "resetScale2d"]] };
  const axis = (title, more) => ({
    title: { text: title, font: { size: 12.5 } }, gridcolor: colour("--grid"), zerolinecolor: colour("--line"),
    linecolor: colour("--line"), automargin: true, ...more,
  });
  const layout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--text") },
    margin: { l: 54, r: 16, t: 12, b: 44 }, hovermode: "x unified",
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--text") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--text") },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, ...more,
  });
  const tokensAxis = () => axis("generated tokens", { tickformat: "~s" });
  const share = { tickformat: ".0%", rangemode: "tozero" };

  const some = (values) => values.some((value) => value !== null);

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function draw(box) {
    const name = box.dataset.plot;
    const section = data[sources[name] || name];
    const [traces, drawn] = section ? plots[name](section) : [[], null];
    if (traces.length) {
      Plotly.react(box, traces, drawn, config);
      return;
    }
    box.classList.add("blank");
    box.replaceChildren(element("div", "empty", box.dataset.empty));
  }
  function drawAll() {
    for (const box of document.querySelectorAll("[data-plot]")) draw(box);
  }

  // ------------------------------------------------------------ start

  let plots = {};
  let sources = {};
  let redraws = [];

  /**
   * Draw the page, now and whenever the theme changes.
   * @param drawn plot name to a function from its data to [traces, layout]
   * @param from plot name to the name of its data, where they differ
   * @param more further functions to call after the plots
   */
  function start(drawn, from = {}, ...more) {
    [plots, sources, redraws] = [drawn, from, more];
    byId("theme").addEventListener("click", () => {
      mode = modes[(modes.indexOf(mode) + 1) % modes.length];
      try { localStorage.setItem("trimtab-theme", mode); } catch { /* no storage for this page */ }
      applyTheme();
    });
    system.addEventListener("change", applyTheme);
    applyTheme();
  }

  return { data, byId, colour, visible, plain, words, causeColour, axis, layout, tokensAxis, share, some, element, draw, start };
})();
