"use strict";
(() => {
  const { data, byId, colour, visible, plain, words, causeColour, axis, layout, tokensAxis, share, some, element, draw, start } = trimtab;

  // ------------------------------------------------------------ plots

  function smooth(values) {
    const reach = Math.max(1, Math.round(values.length / 30));
    return values.map((value, i) => {
      const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter((v) => v !== null);
      return value === null || !near.length ? null : near.reduce((a, b) => a + b, 0) / near.length;
    });
  }

  /** Single steps as faint points, and their running mean as a line. */
  function noisy(x, y, name, shade, more) {
    if (!some(y)) return [];
    const few = y.length < 12;
    const line = { x, y: few ? y : smooth(y), name, mode: few ? "lines+markers" : "lines", line: { color: shade, width: 2 }, hovertemplate: "%{y:.4g}", ...more };
    const points = { x, y, mode: "markers", marker: { color: shade, size: 5, opacity: 0.45 }, showlegend: false, hoverinfo: "skip", ...more };
    return few ? [line] : [points, line];
  }

  const plots = {
    curve(d) {
      const { evals, train } = d;
      const traces = noisy(train.tokens_generated, train.accuracy, d.same ? "training accuracy (= reward)" : "training accuracy", colour("--c7"));
      if (!d.same) traces.push(...noisy(train.tokens_generated, train.reward, "reward", colour("--c1"), { yaxis: "y2" }));
      if (some(evals.accuracy)) {
        traces.push({
          x: evals.tokens_generated, y: evals.accuracy, name: "held-out accuracy", mode: "lines+markers",
          line: { color: colour("--c0"), width: 3 }, marker: { size: 8 }, text: evals.name.map(words),
          error_y: { type: "data", array: evals.accuracy_se.map((e) => e ?? 0), thickness: 1.2, width: 3, color: colour("--c0") },
          hovertemplate: "%{y:.1%} (%{text})",
        });
      }
      return [traces, layout({
        xaxis: tokensAxis(), yaxis: axis("accuracy", share),
        yaxis2: axis("reward", { tickmode: "auto", nticks: 6, overlaying: "y", side: "right", showgrid: false }),
      })];
    },
    histogram(d) {
      const middle = d.edges.slice(1).map((edge, i) => (edge + d.edges[i]) / 2);
      const ranges = d.edges.slice(1).map((edge, i) => (edge - d.edges[i] > 1 ? `${d.edges[i]} to ${edge - 1}` : `${d.edges[i]}`));
      const shades = d.parts.length > 1 ? ["--c7", "--c0"] : ["--c0"];
      const traces = d.parts.map((part, i) => ({
        type: "bar", x: middle, y: part.share, width: d.edges[1] - d.edges[0], name: `${plain(part.name)} (${part.count})`,
        marker: { color: colour(shades[i]), opacity: 0.62 }, customdata: ranges, hovertemplate: "%{y:.1%} with %{customdata} tokens",
      }));
      return [traces, layout({ barmode: "overlay", bargap: 0, xaxis: axis("response tokens"), yaxis: axis("share of responses", share) })];
    },
    lengths(d) {
      const traces = noisy(d.step, d["length/mean"], "mean length", colour("--c0"));
      if (some(d["length/limit"])) traces.push({ x: d.step, y: d["length/limit"], name: "limit", mode: "lines", line: { color: colour("--c1"), dash: "dot", shape: "hv", width: 2 }, hovertemplate: "%{y}" });
      if (some(d["rollouts/truncated_share"])) {
        traces.push({ x: d.step, y: d["rollouts/truncated_share"], name: "cut share", mode: "lines", line: { color: colour("--c7"), width: 1 }, yaxis: "y2", hovertemplate: "%{y:.1%}" });
      }
      return [traces, layout({ xaxis: axis("step"), yaxis: axis("tokens", { rangemode: "tozero" }), yaxis2: axis("", { ...share, range: [0, 1.02], dtick: 0.25, overlaying: "y", side: "right", showgrid: false }) })];
    },
    ledger(d) {
      const traces = Object.entries(d.series).map(([name, y]) => ({
        type: "bar", x: d.step, y, name: words(name), marker: { color: causeColour(name), line: { width: 0 } }, hovertemplate: "%{y:.4s}",
      }));
      return [traces, layout({ barmode: "relative", bargap: d.step.length > 150 ? 0 : 0.12, xaxis: axis("step"), yaxis: axis("tokens", { tickformat: "~s" }) })];
    },
    overlap(d) {
      const shades = d.parts.length > 1 ? ["--c7", "--c0"] : ["--c0"];
      const traces = d.parts.flatMap((part, i) => {
        const x = part.mean.map((_, position) => position + 1);
        const line = { color: colour(shades[i]), width: 2 };
        return [
          { x, y: part.mean, name: plain(part.name), mode: "lines", line, hovertemplate: "%{y:.3f}" },
          { x, y: part.count, mode: "lines", line: { ...line, width: 1 }, fill: "tozeroy", yaxis: "y2", showlegend: false, hovertemplate: "%{y} responses", name: plain(part.name) },
        ];
      });
      return [traces, layout({
        xaxis: axis("position in the response", { anchor: "y2" }),
        yaxis: axis("top-k overlap", { domain: [0.34, 1], range: [0, 1.03] }), yaxis2: axis("responses", { domain: [0, 0.24], nticks: 3 }),
      })];
    },
    effective(d) {
      const traces = noisy(d.step, d.mean, "effective length", colour("--c2"));
      const lengths = data.lengths;
      if (lengths) {
        traces.push(...noisy(lengths.step, lengths["length/mean"], "mean length", colour("--c0")));
        if (some(lengths["length/limit"])) traces.push({ x: lengths.step, y: lengths["length/limit"], name: "window limit", mode: "lines", line: { color: colour("--c1"), dash: "dot", shape: "hv", width: 2 }, hovertemplate: "%{y}" });
      }
      return [traces, layout({ xaxis: axis("step"), yaxis: axis("tokens", { rangemode: "tozero" }) })];
    },
    metric() {
      const name = byId("metric").value;
      const tokens = byId("axis").value === "tokens" ? data.metrics.series.tokens_generated : null;
      const traces = noisy(tokens || data.metrics.step, data.metrics.series[name], plain(name), colour("--c0"), { showlegend: false });
      return [traces, layout({ xaxis: tokens ? tokensAxis() : axis("step"), yaxis: axis(plain(name)) })];
    },
  };
  const sources = { metric: "metrics" };

  function fill(select, options) {
    for (const [value, text] of options) {
      const option = element("option", "", text);
      option.value = value;
      select.append(option);
    }
  }

  // ------------------------------------------------------------ responses

  const sourceNames = ["sampled", "forced", "reused", "environment", "foreign", "padding"];
  const quantities = {
    weight: { label: "token weight", low: 0, high: 1, hue: "--cool" },
    overlap: { label: "overlap with the teacher", low: 1, high: 0, hue: "--warm" },
    logprob: { label: "log-prob (surprise)", low: 0, high: -5, hue: "--warm" },
    entropy: { label: "entropy", low: 0, high: null, hue: "--warm" },
    advantage: { label: "advantage", low: null, high: null, hue: "--cool", other: "--warm" },
    none: { label: "none" },
  };
  const order = ["overlap", "weight", "entropy", "logprob", "advantage", "none"];

  const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : "–");

  /** The ends of the colour scale: fixed where the quantity has natural ones, else the largest value of the group. */
  function scaleOf(name, rollouts) {
    const known = quantities[name];
    if (known.high !== null) return known;
    const sizes = rollouts.flatMap((r) => r.values[name] || []).filter((v) => typeof v === "number").map(Math.abs).sort((a, b) => a - b);
    const high = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || 1 : 1;
    return { ...known, low: known.other ? -high : 0, high };
  }

  function shade(scale, value) {
    if (typeof value !== "number") return "";
    const part = scale.other ? value / scale.high : (value - scale.low) / (scale.high - scale.low);
    const strength = Math.min(1, Math.abs(scale.other ? part : Math.max(0, part))) * Number(colourCache.alpha);
    return `rgba(${part < 0 && scale.other ? colourCache[scale.other] : colourCache[scale.hue]}, ${strength.toFixed(3)})`;
  }
  const colourCache = {};

  function showScale(scale) {
    const box = byId("scale");
    box.replaceChildren();
    if (!scale.hue) return;
    const ramp = element("span", "ramp");
    ramp.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map((t) => shade(scale, scale.low + t * (scale.high - scale.low))).join(", ")})`;
    box.append(element("span", "", short(scale.low)), ramp, element("span", "", short(scale.high)));
  }

  function tokenText(piece) {
    return visible(piece).replace(/\n/g, "↵\n");
  }

  function tokenTitle(rollout, i) {
    const lines = [`token ${i < rollout.head ? i + 1 : i + 1 + rollout.gap}`];
    for (const [name, values] of Object.entries(rollout.values)) lines.push(`${quantities[name].label}: ${short(values[i])}`);
    if (rollout.source && rollout.source[i]) lines.push(`source: ${sourceNames[rollout.source[i]] || rollout.source[i]}`);
    if (rollout.masked && rollout.masked[i]) lines.push("masked out of the loss");
    return lines.join("\n");
  }

  function stopChip(rollout) {
    const part = rollout.stop_part;
    const limit = rollout.stop_limit === null ? "" : `, limit ${rollout.stop_limit}`;
    const after = ` after ${rollout.stop_index + 1}`;
    const wordings = {
      eos: "end",
      limit: `✂ limit ${rollout.stop_limit ?? ""}${part ? ` of ${part}` : ""}`,
      part: `✂ cut by ${part}${after}${limit}`,
      context: `✂ context full${after}`,
      abort: `✂ aborted${after}`,
    };
    const cut = rollout.stop_reason !== "eos";
    const text = wordings[rollout.stop_reason] || `✂ ${rollout.stop_reason}${after}`;
    return element("span", cut ? "stop cut" : "stop", visible(text));
  }

  function tokenRow(rollout, name, scale) {
    const box = element("div", "tokens");
    rollout.pieces.forEach((piece, i) => {
      if (rollout.gap && i === rollout.head) box.append(element("span", "gap", `… ${rollout.gap} more tokens …`));
      const span = element("span", "token", tokenText(piece || ""));
      if (rollout.source && rollout.source[i]) span.classList.add("brought");
      if (rollout.masked && rollout.masked[i]) span.classList.add("masked");
      if (rollout.values[name]) span.style.background = shade(scale, rollout.values[name][i]);
      span.title = tokenTitle(rollout, i);
      box.append(span);
    });
    box.append(stopChip(rollout));
    return box;
  }

  function verdictOf(rollout) {
    if (rollout.status !== "ok" && rollout.correct === null) return ["unknown", rollout.status || "not scored"];
    const name = rollout.correct === 1 ? "correct" : rollout.correct === 0 ? "wrong" : `score ${short(rollout.correct)}`;
    return [rollout.correct > 0 ? "right" : "wrong", rollout.status === "ok" ? name : `${name} (${rollout.status})`];
  }

  function sibling(rollout, name, scale) {
    const box = element("article", rollout.keep === false ? "sibling dropped" : "sibling");
    const heading = element("h3");
    const [className, verdict] = verdictOf(rollout);
    heading.append(element("span", "", `sample ${rollout.sample}`), element("span", className, verdict));
    const facts = [`${rollout.length} tokens`, `reward ${short(rollout.reward)}`, `advantage ${short(rollout.advantage)}`];
    box.append(heading, element("p", "fact", facts.join(" · ")));
    if (rollout.keep === false) {
      const by = rollout.dropped_by ? ` by ${rollout.dropped_by}` : "";
      box.append(element("p", "fact wrong", visible(`dropped${by}: ${String(rollout.dropped).replace(/_/g, " ")}`)));
    }
    box.append(tokenRow(rollout, name, scale));
    return box;
  }

  function showGroup() {
    const box = byId("examples");
    const group = data.examples[Number(byId("group").value)];
    if (!group) {
      box.replaceChildren(element("div", "empty", "No rollouts were written (output.rollouts)."));
      return;
    }
    for (const name of ["--warm", "--cool"]) colourCache[name] = colour(name);
    colourCache.alpha = colour("--alpha");
    const name = byId("quantity").value;
    const scale = scaleOf(name, group.rollouts);
    showScale(scale);
    const question = element("dl", "question");
    question.append(element("dt", "", "Prompt"), element("dd", "", visible(group.prompt)), element("dt", "", "Answer"), element("dd", "", visible(group.answer)));
    const siblings = element("div", "siblings");
    siblings.append(...group.rollouts.map((rollout) => sibling(rollout, name, scale)));
    box.replaceChildren(question, siblings);
    if (group.more) box.append(element("p", "hint", `${group.more} more siblings are in the rollout files.`));
  }

  // ------------------------------------------------------------ start

  const present = order.filter((name) => name === "none" || data.examples.some((g) => g.rollouts.some((r) => r.values[name])));
  fill(byId("group"), data.examples.map((group, i) => [i, visible(group.name)]));
  fill(byId("quantity"), present.map((name) => [name, quantities[name].label]));
  if (data.metrics) {
    fill(byId("metric"), Object.keys(data.metrics.series).map((name) => [name, visible(name)]));
    const first = ["reward", "accuracy"].find((name) => name in data.metrics.series);
    if (first) byId("metric").value = first;
  }
  for (const id of ["metric", "axis"]) byId(id).addEventListener("change", () => draw(document.querySelector("[data-plot=metric]")));
  for (const id of ["group", "quantity"]) byId(id).addEventListener("change", showGroup);
  start(plots, sources, showGroup);
})();
