// What the reader may change, and what follows from it.
const state = { review: 0, reject: 0, outcome: "all", type: "", words: [], direction: -1, verdicts: [] };

function ownLimits() {
  const { review, reject } = data.thresholds;
  const highest = reject === null ? scale.high : reject;
  return { review: review === null ? highest : review, reject: highest };
}

// Both thresholds as they were when the reader took hold of one of them; null when none is held.
let held = null;

function hold(side) {
  if (held?.side !== side) held = { side, review: state.review, reject: state.reject };
}

// Move the threshold that is held. The other one gives way, as review never lies above reject, and
// comes back where it was: half a typed number, or a drag there and back, leaves it as it is.
function moveLimit(side, value) {
  hold(side);
  const review = side === "review" ? value : Math.min(held.review, value);
  const reject = side === "reject" ? value : Math.max(held.reject, value);
  setLimits({ review, reject });
}

function setLimits(limits) {
  Object.assign(state, limits);
  update();
}

function update() {
  state.verdicts = images.map((image) => verdictOf(image, state));
  const counts = countVerdicts(state.verdicts, state);
  showLimits(state);
  showInputs();
  showOutcomes(counts);
  showTypes(counts);
  showVerdicts(state.verdicts);
  moveCurvePoints(counts);
  showFilters();
  applyFilters();
}

function showInputs() {
  for (const side of ["review", "reject"]) {
    const slider = byId(side), number = byId(`${side}-number`);
    if (document.activeElement !== slider || Number(slider.value) !== state[side]) slider.value = state[side];
    slider.setAttribute("aria-valuetext", `${scale.text(state[side])} ${data.unit}`);
    if (document.activeElement !== number) number.value = String(Number(state[side].toPrecision(6)));
  }
  const [low, high] = [state.review, state.reject].map((value) => Number(value.toPrecision(6)));
  const command = data.command
    ? `${data.command} --threshold ${high}${low < high ? ` --review-threshold ${low}` : ""}`
    : `detector = detector.calibrate(threshold=${high}${low < high ? `, review_threshold=${low}` : ""})`;
  if (byId("command").value !== command) byId("copied").textContent = "";
  byId("command").value = command;
  const own = ownLimits();
  const moved = state.review !== own.review || state.reject !== own.reject;
  byId("reset").disabled = !moved;
  byId("take").classList.toggle("gone", !moved);
}

function showFilters() {
  const numbers = { all: images.length };
  images.forEach((image, i) => {
    const outcome = outcomeOf(image, state.verdicts[i]);
    numbers[outcome] = (numbers[outcome] || 0) + 1;
  });
  for (const chip of byId("outcome-filter").children) {
    const { outcome } = chip.dataset;
    chip.textContent = `${OUTCOMES.find(([key]) => key === outcome)[1]} ${numbers[outcome] || 0}`;
    chip.setAttribute("aria-pressed", String(state.outcome === outcome));
  }
}

function applyFilters() {
  const shown = filterTiles((i) =>
    (state.outcome === "all" || outcomeOf(images[i], state.verdicts[i]) === state.outcome) &&
    (state.type === "" || images[i].type === state.type) &&
    state.words.every((word) => searched[i].includes(word)));
  const text = shown ? `${shown} of ${images.length} images` : images.length ? "No image is like that." : "No image was scored.";
  const refused = data.refused.count ? [" · ", element("a", { href: "#refused" }, `${data.refused.count} not scored`)] : [];
  byId("shown").replaceChildren(text, data.left_out ? `. ${data.left_out}` : "", ...refused);
}

// What is looked for: names, as they are shown, and types.
const searched = images.map(({ name, type }) => `${visible(name)} ${visible(type)}`.toLowerCase());

function startControls() {
  for (const side of ["review", "reject"]) {
    const slider = byId(side), number = byId(`${side}-number`);
    for (const input of [slider, number]) {
      input.min = scale.low;
      input.max = scale.high;
      input.step = scale.step;
    }
    number.removeAttribute("min");
    number.removeAttribute("max");
    number.step = "any";
    slider.addEventListener("input", () => moveLimit(side, Number(slider.value)));
    number.addEventListener("input", () => {
      if (number.value !== "" && Number.isFinite(Number(number.value))) moveLimit(side, Number(number.value));
    });
    // With any step allowed, a browser's own arrows would move by 1.
    number.addEventListener("keydown", (event) => {
      const up = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!up || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      moveLimit(side, Number((state[side] + up * scale.step).toPrecision(6)));
      number.value = String(state[side]);
    });
    for (const input of [slider, number]) {
      input.addEventListener("focus", () => hold(side));
      input.addEventListener("blur", () => { held = null; showInputs(); });
    }
  }
  byId("reset").addEventListener("click", () => { held = null; setLimits(ownLimits()); });
  for (const [outcome] of OUTCOMES) {
    const chip = element("button", { class: "chip", type: "button" });
    chip.dataset.outcome = outcome;
    chip.addEventListener("click", () => { state.outcome = outcome; update(); });
    byId("outcome-filter").append(chip);
  }
  const types = byId("type-filter");
  types.append(element("option", { value: "" }, "all"));
  data.types.forEach((type) => {
    const option = element("option", {}, visible(type));
    option.value = type;
    types.append(option);
  });
  types.addEventListener("change", () => { state.type = types.value; applyFilters(); });
  byId("search").addEventListener("input", (event) => {
    state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    applyFilters();
  });
  byId("order").addEventListener("change", (event) => { layTiles(Number(event.target.value)); applyFilters(); });
  const opacity = byId("opacity");
  const setOpacity = () => document.documentElement.style.setProperty("--heat", opacity.value / 100);
  opacity.value = Math.round(100 * data.colours.opacity);
  opacity.addEventListener("input", setOpacity);
  setOpacity();
  const outline = byId("outline");
  const setOutline = () => {
    document.body.classList.toggle("no-outline", !outline.checked);
    byId("viewer-outline").setAttribute("aria-pressed", String(outline.checked));
  };
  outline.addEventListener("change", setOutline);
  setOutline();
  byId("copy").addEventListener("click", copyCommand);
  grid.addEventListener("keydown", moveByKey);
  grid.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) view(Number(item.dataset.index));
  });
}

async function copyCommand() {
  const field = byId("command");
  field.select();
  let done = false;
  try {
    await navigator.clipboard.writeText(field.value);
    done = true;
  } catch {
    done = document.execCommand("copy"); // pages from disk have no clipboard in some browsers
  }
  byId("copied").textContent = done ? "Copied." : "Press Ctrl+C to copy.";
}

function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]:not(.gone)")];
  const open = (tab) => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
      byId(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
    tab.focus();
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) open(tabs[(i + step + tabs.length) % tabs.length]);
    });
  });
}

const sentence = (line) => visible(`${line[0].toUpperCase()}${line.slice(1)}.`);

const CONFIDENCE = "Under it: where the figure lies for parts still to come, with at least 95 % confidence.";
const VAGUE = "For parts still to come the figure may be anything from 0 to 1: these images are too few to say more with 95 % confidence.";

function showHead() {
  byId("name").textContent = visible(data.name);
  byId("subtitle").textContent = visible(data.subtitle);
  byId("provenance").replaceChildren(...data.provenance.flatMap(([name, value], i) =>
    [i ? " · " : "", name ? `${name} ` : "", element("bdi", {}, visible(value))]));
  byId("figures").replaceChildren(...data.figures.map(({ label, key, value, interval, reason }) => {
    const shown = element("dd", {}, value === null ? "–" : value.toFixed?.(4) ?? value);
    if (interval && value !== null) {
      const [low, high] = interval;
      const vague = high - low > 0.995;
      shown.append(element("small", {}, vague ? "too few images" : `95 %: ${low.toFixed(3)} – ${high.toFixed(3)}`));
      shown.title = vague ? VAGUE : CONFIDENCE;
    }
    if (reason) shown.title = reason;
    const name = term(key, label, "head");
    if (interval && value !== null) name[1]?.append(` ${shown.title}`);
    return element("div", {}, element("dt", {}, ...name), shown);
  }));
  const [found, ...rest] = data.thresholds.lines;
  byId("origin").replaceChildren(found
    ? element("details", {}, element("summary", {}, sentence(found)), ...rest.map((line) => element("p", {}, sentence(line))))
    : "The model has no threshold. The sliders start where nothing is rejected, and each heatmap is scaled to its own highest value.");
}

function showWeaknesses() {
  const weaknesses = data.weaknesses || [];
  byId("weaknesses").hidden = !weaknesses.length;
  byId("weaknesses").querySelector("ol").replaceChildren(...weaknesses.map(({ finding, remedy, command }) =>
    element("li", {}, element("b", {}, visible(finding)), ` ${visible(remedy)}`,
      ...(command ? [element("code", {}, visible(command))] : []))));
}

// What the thresholds promise beside what these images show; it stays when a threshold is moved.
function showPromise() {
  const { head, rows, line } = data.promise;
  if (!rows.length) return;
  const table = element("table", { class: "types" }, element("caption", { class: "soft" }, "The model's own thresholds"),
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", {}, text))))));
  byId("promise").replaceChildren(table, line ? element("p", { class: "odd" }, line) : "");
}

function showColours() {
  const bar = byId("colour-bar");
  const limit = data.thresholds.pixel;
  const gradient = drawing("linearGradient", { id: "heat-colours" });
  data.colours.stops.forEach(([r, g, b, a], i, all) => gradient.append(drawing("stop", {
    offset: i / (all.length - 1), "stop-color": `rgb(${r},${g},${b})`, "stop-opacity": a,
  })));
  const svg = drawing("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": "Colours of the heatmap" },
    drawing("defs", {}, gradient), drawing("rect", { width: 100, height: 10, fill: "url(#heat-colours)" }));
  const labels = element("div");
  const value = (times) => scale.text(times * limit);
  const marks = limit === null ? [[0, "0"], [1, "highest of its image"]] : [[0, "0"], [1, `per-pixel threshold ${value(1)}`], [2, value(2)]];
  for (const [times, text] of marks) {
    const tick = element("span", times === 2 ? { class: "end" } : {}, text);
    tick.style.left = `${50 * times}%`;
    labels.append(tick);
  }
  const { review_pixel: faint } = data.thresholds;
  byId("review-key").classList.toggle("gone", faint === null || faint >= limit);
  if (faint !== null) byId("review-key").title = `from ${scale.text(faint)} on`;
  bar.title = `anomaly map, ${data.unit}`;
  bar.replaceChildren(svg, labels);
}

function showFacts() {
  const cards = data.facts.map(({ title, rows }) => element("section", { class: "fact card" }, element("h2", {}, title),
    element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, visible(name)), element("dd", {}, visible(value))]))));
  byId("facts").replaceChildren(...cards);
  if (!data.refused.count) return;
  const { rows, count } = data.refused;
  const lines = rows.map(({ name, status, reason }) => element("li", { class: "small" }, element("b", {}, visible(name)), ` – ${status ? `${status}: ` : ""}${visible(reason)}`));
  if (count > rows.length) lines.push(element("li", { class: "small soft" }, `… and ${count - rows.length} more, all in results.csv`));
  byId("refused").replaceChildren(element("section", { class: "refused card" }, element("h2", {}, `Not scored: ${count}`), element("ul", {}, ...lines)));
}

function start() {
  const other = data.labelled ? ".unlabelled" : ".labelled";
  for (const node of document.querySelectorAll(other)) node.classList.add("gone");
  showHead();
  showWeaknesses();
  showPromise();
  showColours();
  showFacts();
  drawHistogram();
  drawCurves();
  showTypeFigures();
  layTiles(state.direction);
  startControls();
  startTabs();
  startViewer();
  Object.assign(state, ownLimits());
  if (images.length) reach(order[0]);
  update();
  for (const { item } of tiles) nearby.observe(item);
  new ResizeObserver(() => { drawHistogram(); showLimits(state); }).observe(histogram.svg);
}

start();
