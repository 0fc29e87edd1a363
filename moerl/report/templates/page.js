// Draws the figures, and leads from a step to its samples and from a sample to its tokens. All data is in the page.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const samples = JSON.parse(document.getElementById("samples").textContent);

const INK = "#1b1f24", GRID = "#e6eaee";
const TOUCH = matchMedia("(pointer: coarse)").matches; // a drag scrolls the page there
const FONT = getComputedStyle(document.body).fontFamily;

function axisStyle(axis) {
  return {
    gridcolor: GRID, zerolinecolor: GRID, linecolor: "#afb8c1", showline: true, ticks: "outside", tickcolor: "#afb8c1", ticklen: 4,
    automargin: true, separatethousands: true, ...axis,
    title: { ...axis.title, standoff: 8, font: { size: 12, color: "#57606a" } },
  };
}

function styled(layout) {
  const full = {
    font: { family: FONT, size: 12, color: INK }, margin: { l: 52, r: 12, t: 8, b: 42 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    hoverlabel: { font: { family: FONT } }, hovermode: "closest", bargap: 0.25, dragmode: TOUCH ? false : "zoom", ...layout,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, itemwidth: 30, ...layout.legend },
  };
  for (const name of Object.keys(full).filter((key) => /^[xy]axis\d*$/.test(key))) full[name] = axisStyle(full[name]);
  return full;
}

function draw(place) {
  const figure = figures[place.dataset.plot];
  const named = figure.data.filter((trace) => trace.name && trace.showlegend !== false);
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  return Plotly.newPlot(place, figure.data, styled({ showlegend: named.length > 1, ...figure.layout }), options).then(() => {
    if (figure.drill && samples) {
      place.classList.add("clickable");
      place.on("plotly_click", (event) => showNearest(event.points[0].x));
    }
  });
}

// ---- from a step to its samples to their tokens

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
};

const number = (value) => {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1).replace("e-0", "e-");
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(3)));
};

const share = (value) => (value === null || value === undefined ? "–" : `${Number((100 * value).toPrecision(3))} %`);

function row(cells, tag, left = 1) {
  return element("tr", {}, ...cells.map((cell, index) => element(tag, { class: index < left ? "left" : null }, cell)));
}

function showNearest(step) {
  const known = samples.steps.map((one) => one.step);
  const nearest = known.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
  showStep(nearest);
  document.getElementById("drill").scrollIntoView({ behavior: "smooth", block: "start" });
}

function showStep(step) {
  const found = samples.steps.find((one) => one.step === step);
  document.getElementById("drill-step").value = String(step);
  const table = document.getElementById("drill-samples");
  const head = ["prompt.sample", "begins", "reward", "version", "tokens", "tokens with flips", "mean |d|, natural", "mean |d|, replayed", "largest |d|"];
  const body = element("tbody");
  found.samples.forEach((sample) => {
    const cells = [
      element("button", { type: "button" }, `${sample.prompt}.${sample.sample}`), sample.tokens.slice(0, 12).join("").slice(0, 40),
      number(sample.reward), number(sample.version), number(sample.length), share(sample.flipped_share), number(sample.natural),
      number(sample.replay), number(sample.largest),
    ];
    const line = row(cells, "td", 2);
    line.addEventListener("click", () => showSample(sample, line));
    body.append(line);
  });
  table.replaceChildren(element("thead", {}, row(head, "th", 2)), body);
  document.getElementById("drill-sample").replaceChildren();
  if (found.samples.length) showSample(found.samples[0], body.firstChild);
}

// White, then ever more orange: the gap of a token, on a logarithmic scale from 0.01 to 1.
function shade(gap) {
  if (gap === null) return "transparent";
  const strength = Math.min(1, Math.max(0, (Math.log10(Math.max(Math.abs(gap), 1e-9)) + 2) / 2));
  return strength ? `rgba(213, 94, 0, ${(0.08 + 0.62 * strength).toFixed(2)})` : "transparent";
}

function underline(flips) {
  if (!flips) return "transparent";
  return flips > samples.layers.length / 2 ? "#08306b" : flips > 1 ? "#0072b2" : "#7fb2d9";
}

function showSample(sample, line) {
  for (const other of line.parentNode.children) other.classList.toggle("chosen", other === line);
  const detail = element("div", { class: "detail", id: "drill-token" });
  const text = element("div", { class: "tokens" });
  sample.tokens.forEach((token, index) => {
    const shown = element("button", { type: "button", class: `token${sample.response[index] ? "" : " prompt"}`, title: tokenLine(sample, index) },
      token.replaceAll("\n", "↵\n") || "∅");
    shown.style.background = shade(sample.gap[index]);
    shown.style.borderBottomColor = underline(sample.flips[index]);
    shown.addEventListener("click", () => showToken(sample, index, shown, detail));
    text.append(shown);
  });
  if (sample.before) text.prepend(`${number(sample.before)} tokens before … `);
  if (sample.after) text.append(` … and ${number(sample.after)} tokens after`);
  document.getElementById("drill-sample").replaceChildren(key(), text, detail);
}

function key() {
  const boxed = (style, words) => {
    const box = element("i");
    Object.assign(box.style, style);
    return element("span", {}, box, words);
  };
  return element("p", { class: "key" },
    boxed({ background: shade(0.02) }, "|d| 0.02"), boxed({ background: shade(0.1) }, "0.1"), boxed({ background: shade(1) }, "1 or more nats"),
    boxed({ borderBottom: "3px solid #7fb2d9" }, "one layer flips"), boxed({ borderBottom: "3px solid #0072b2" }, "several"),
    boxed({ borderBottom: "3px solid #08306b" }, "more than half"), element("span", {}, "pale text: prompt"));
}

function tokenLine(sample, index) {
  const gap = sample.gap[index] === null ? "" : `, d ${number(sample.gap[index])}`;
  return `position ${sample.positions[index]}${gap}, ${sample.flips[index] ?? "unknown"} flipped layers in the row before it`;
}

function showToken(sample, index, shown, detail) {
  for (const other of shown.parentNode.children) other.classList.toggle("chosen", other === shown);
  const facts = [
    ["position", number(sample.positions[index])], ["engine logprob", number(sample.engine[index])],
    ["d natural", number(sample.gap[index])], ["d replayed", number(sample.replayed[index])],
    ["layers that flip in the row before it", flippedLayers(sample, index)],
  ];
  const list = element("dl", { class: "facts" }, ...facts.map(([label, value]) =>
    element("div", {}, element("dt", {}, label), element("dd", {}, value))));
  detail.replaceChildren(element("h3", {}, `Token ${JSON.stringify(sample.tokens[index])}`), list);
}

function flippedLayers(sample, index) {
  const layers = sample.layers[index], margins = sample.margins[index];
  if (!layers) return "not recorded";
  if (!layers.length) return "none";
  const named = layers.map((layer, i) => (margins ? `${layer} (margin ${number(margins[i])})` : String(layer))).join(", ");
  return sample.flips[index] > layers.length ? `${named} … (${sample.flips[index]} in all)` : named;
}

function startDrill() {
  const select = document.getElementById("drill-step");
  if (!samples || !select) return;
  select.append(...samples.steps.map((one) => element("option", { value: String(one.step) }, String(one.step))));
  select.addEventListener("change", () => showStep(Number(select.value)));
  showStep(samples.steps[samples.steps.length - 1].step);
}

// Figures near the window first, then the others one by one, so that the page can be read meanwhile; all of them before it is printed.
const waiting = new Set(document.querySelectorAll(".plot"));
const all = [...waiting];

function drawOnce(place) {
  if (!waiting.delete(place)) return;
  draw(place);
  if (!waiting.size) document.body.dataset.drawn = String(all.length);
}

function drawNext() {
  const [place] = waiting;
  if (!place) return;
  drawOnce(place);
  setTimeout(drawNext, 20);
}

startDrill();
const near = new IntersectionObserver((seen) => seen.filter((one) => one.isIntersecting).forEach((one) => drawOnce(one.target)), { rootMargin: "400px" });
all.forEach((place) => near.observe(place));
setTimeout(drawNext, 200);
window.addEventListener("beforeprint", () => all.forEach(drawOnce));
