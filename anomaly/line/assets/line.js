// The page for the line: newest part, counts, strip and chart; asks for news twice a second.
// What clients and people have written is only ever put in place as text.

import { clock, digits, language, number, offerLanguages, remembered, word } from "./words.js";
import { zoomable } from "./zoom.js";

const KEPT = 60; // parts in the strip and the chart
const HASTE = 600; // milliseconds in which a button still means the part before
const AGAIN = 500; // milliseconds until the page asks for news again
const VERDICTS = { good: "verdict_good", review: "verdict_review", reject: "verdict_reject" };

let parts = []; // the newest first
let chosen = null; // number of the part that is shown
let following = true; // whether the newest part is shown as it comes
let only = ""; // verdict that the strip is filtered to; empty for all
let model = ""; // name of the model whose parts are shown; empty for all
let photo = false; // whether the photograph is shown instead of the heatmap
let listed = ""; // the alarms that are shown, as JSON with their language
let news = null; // the service's number of news when parts were last read
let arrived = -HASTE; // when another part took the place of the one that was shown
let connected = false; // whether parts are shown as they come

const at = (id) => document.getElementById(id);
// The hash keeps another record's part of this number out of the browser's memory.
const pictureAddress = (part, kind) => `v1/parts/${part.id}/${kind}?of=${part.image_sha256.slice(0, 16)}`;
const kind = (part) => (part && part.status === "ok" && part.verdict) || "none";
const verdictText = (part) => word(part.status === "ok" ? VERDICTS[part.verdict] || "no_verdict" : "not_read");
const shown = () => parts.find((part) => part.id === chosen);
const zoom = zoomable(at("frame"), at("picture"));

// The part that newer ones don't replace: somebody has chosen it, writes about it or looks closely.
const held = () => (!following || at("note").value || at("type").value || zoom.isClose() ? shown() : undefined);

// The service's answer; a body is posted. Throws the reason of a refusal.
async function json(path, body) {
  const headers = { "Content-Type": "application/json", "X-Requested-With": "line" }; // see server.py
  const response = await fetch(path, body && { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail || response.statusText);
  return answer;
}

function element(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  return node;
}

function svgElement(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Keeps a part among the newest ones, however old it is.
function keep(part) {
  if (parts.some(({ id }) => id === part.id)) return;
  parts = [...parts.slice(0, KEPT - 1), part].sort((a, b) => b.id - a.id);
}

async function refresh() {
  const wanted = new URLSearchParams({ limit: KEPT, verdict: only, model });
  const newest = (await json(`v1/parts?${wanted}`)).parts;
  if (wanted.get("verdict") !== only || wanted.get("model") !== model) return; // chosen meanwhile
  const before = held(), first = newest.length ? newest[0].id : null;
  parts = newest;
  if (before) keep(before);
  else if (chosen !== first) {
    if (chosen !== null) arrived = performance.now();
    chosen = first;
  }
  redraw();
  await counts();
  await alarms();
}

function redraw() {
  show();
  strip();
  chart();
}

async function counts() {
  const midnight = new Date();
  midnight.setHours(0, 0, 0, 0);
  const verdicts = await json(`v1/counts?${new URLSearchParams({ since: midnight.toISOString(), model })}`);
  const { good = 0, review = 0, reject = 0, "no verdict": unjudged, ...failed } = verdicts;
  const unread = Object.values(failed).reduce((sum, count) => sum + count, 0);
  const rows = [["verdict_good", good], ["verdict_review", review], ["verdict_reject", reject]];
  if (unjudged) rows.push(["no_verdict", unjudged]);
  if (unread) rows.push(["not_read", unread]);
  at("counts").replaceChildren(...rows.map(([key, count]) => {
    const row = element("div");
    row.append(element("dt", word(key)), element("dd", number(count)));
    return row;
  }));
}

async function alarms() {
  const { alarms } = await json("v1/alarms");
  const ready = !alarms.some(({ severity }) => severity === "error");
  if (connected) state(ready ? "live" : "not_ready", ready);
  const latest = JSON.stringify([language, alarms]);
  if (listed === latest) return; // else they would be read out again
  listed = latest;
  at("alarms").replaceChildren(...alarms.map((alarm) => element("li", word(alarm.kind, alarm), alarm.severity)));
}

function state(key, good) {
  at("state").textContent = word(key);
  at("state").className = good ? "soft live" : "soft";
}

function show() {
  const part = shown();
  const text = part ? verdictText(part).toLocaleUpperCase(language) : word("no_parts");
  const scored = part && part.image_score !== null, judged = scored && part.threshold;
  const score = scored && word("score", { score: digits(part.image_score) });
  at("verdict").className = kind(part);
  at("word").textContent = text;
  at("number").textContent = part ? `${clock(part.time)}\n#${part.id}` : "";
  at("reason").textContent = part ? part.reason : "";
  at("times").className = judged ? kind(part) : "none";
  at("ratio").textContent = judged ? number(part.image_score / part.threshold, 2) : "–";
  at("description").textContent = part ? [part.path, score].filter(Boolean).join(" · ") : "";
  at("model").textContent = part ? part.model : word("line");
  document.title = part ? `${text} · ${part.model}` : word("line");
  picture(part);
  feedback(part);
}

function picture(part) {
  const node = at("picture"), name = photo ? "photograph" : "heatmap";
  at("tools").hidden = !part;
  at("other").textContent = word(photo ? "heatmap" : "photograph");
  if (!part || !part.picture) return blank(part ? "no_picture" : "first_part");
  const address = pictureAddress(part, name);
  if (node.getAttribute("src") !== address) node.src = address;
  node.alt = word("picture_of", { picture: word(name), part: part.id });
  node.hidden = false;
  at("blank").hidden = true;
}

// Shows a text in place of the picture, which is asked for again with the next part, or by H.
function blank(key) {
  at("picture").removeAttribute("src");
  at("picture").hidden = true;
  at("blank").hidden = false;
  at("blank").textContent = word(key);
}

function switchPicture() {
  photo = !photo;
  picture(shown());
}

function feedback(part) {
  const judgement = part && part.feedback;
  for (const verdict of ["good", "defect"]) {
    at(verdict).disabled = !part || part.status !== "ok";
    at(verdict).classList.toggle("chosen", Boolean(judgement) && judgement.verdict === verdict);
  }
  at("answer").textContent = judgement ? judgementText(judgement) : "";
}

function judgementText({ verdict, defect_type, who, note }) {
  const type = defect_type && ` (${defect_type})`, by = who && ` ${word("by", { who })}`;
  return `${word(verdict === "good" ? "called_good" : "called_defect")}${type}${by}${note && `: ${note}`}`;
}

function strip() {
  at("strip").replaceChildren(...parts.map((part) => {
    const item = document.createElement("li");
    const button = element("button", "", kind(part));
    const small = element(part.picture ? "img" : "div", "", part.picture ? "" : "gap");
    const mark = part.feedback ? { good: " ✓", defect: " ✗" }[part.feedback.verdict] : "";
    button.dataset.part = part.id;
    button.classList.toggle("chosen", part.id === chosen);
    button.ariaLabel = word("part_label", { part: part.id, verdict: verdictText(part) });
    if (part.picture) {
      small.src = pictureAddress(part, "heatmap");
      small.alt = "";
      small.addEventListener("error", () => { part.picture = false; small.replaceWith(element("div", "", "gap")); });
    }
    button.append(small, element("span", `${verdictText(part)}${mark}`), element("span", clock(part.time), "soft"));
    button.addEventListener("click", () => choose(part.id, false));
    item.append(button);
    return item;
  }));
}

function chart() {
  const svg = at("chart");
  const { width, height } = svg.getBoundingClientRect();
  const scored = parts.filter((part) => part.image_score !== null).reverse();
  svg.setAttribute("viewBox", `0 0 ${width || 300} ${height || 120}`);
  svg.replaceChildren();
  if (!scored.length) return;
  const { threshold, review_threshold: review } = scored[scored.length - 1];
  // Each part by its own threshold: models and thresholds may change on the way.
  const level = (part) => (part.threshold ? part.image_score / part.threshold : part.image_score);
  const highest = 1.1 * Math.max(...scored.map(level)) || 1;
  const high = threshold ? Math.min(2.5, Math.max(1.4, highest)) : highest;
  const y = (value) => height - 10 - (Math.min(value, high) / high) * (height - 20);
  let left = 12;
  const line = (value, name, below) => {
    const text = svgElement("text", { x: 0, y: y(value) + below });
    text.textContent = word(VERDICTS[name]);
    svg.append(svgElement("line", { x1: 0, x2: width, y1: y(value), y2: y(value), class: `limit ${name}` }), text);
    left = Math.max(left, text.getComputedTextLength() + 12);
  };
  // Thresholds may lie close to each other: one label above its line, the other below.
  if (threshold) line(1, "reject", -5);
  if (threshold && review < 0.97 * threshold) line(review / threshold, "review", 18);
  const x = (index) => left + (KEPT - scored.length + index) * ((width - left - 12) / (KEPT - 1));
  svg.append(svgElement("polyline", { points: scored.map((part, index) => `${x(index)},${y(level(part))}`).join(" ") }));
  scored.forEach((part, index) => {
    const [radius, mark] = part.id === chosen ? [9, " chosen"] : [4.5, ""];
    const dot = svgElement("circle", { cx: x(index), cy: y(level(part)), r: radius, class: `${kind(part)}${mark}` });
    dot.addEventListener("click", () => choose(part.id, false));
    svg.append(dot);
  });
}

function choose(number, newest) {
  chosen = number;
  following = newest;
  zoom.reset();
  at("live").setAttribute("aria-pressed", String(newest));
  show();
  for (const button of at("strip").querySelectorAll("button")) {
    const is = Number(button.dataset.part) === number;
    button.classList.toggle("chosen", is);
    if (is) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  chart();
}

function move(by) {
  const next = parts[parts.findIndex(({ id }) => id === chosen) + by];
  if (next) choose(next.id, false);
}

// Chooses any part of the record, by its number.
async function jump() {
  const wanted = Number(at("jump").value);
  at("missing").textContent = "";
  if (!wanted) return;
  try {
    keep(await json(`v1/parts/${wanted}`));
    strip();
    choose(wanted, false);
    at("jump").value = "";
    at("jump").blur();
  } catch {
    at("missing").textContent = word("no_such_part", { part: wanted });
  }
}

async function judge(verdict) {
  const part = shown(), [note, who] = ["note", "who"].map((id) => at(id).value.trim());
  const type = verdict === "defect" ? at("type").value.trim() : "";
  if (!part || part.status !== "ok") return;
  try {
    if (performance.now() - arrived < HASTE) throw new Error(word("too_soon"));
    const judged = await json(`v1/parts/${part.id}/feedback`, { verdict, defect_type: type, note, who });
    parts = parts.map((other) => (other.id === judged.id ? judged : other));
    redraw();
    remembered("who", who);
    if (type && ![...at("types").options].some(({ value }) => value === type)) at("types").append(new Option(type));
    at("note").value = at("type").value = "";
  } catch (error) {
    at("answer").textContent = word("not_noted", { reason: error.message });
  }
}

async function follow() {
  try {
    const latest = (await json("v1/news")).news;
    const changed = !connected || latest !== news;
    connected = true;
    if (changed) await refresh();
    news = latest;
  } catch {
    await alarms().catch(lost); // the service may be there without a record
  }
  setTimeout(follow, AGAIN);
}

function lost() {
  connected = false;
  state("no_connection", false);
}

const KEYS = {
  ArrowLeft: () => move(-1),
  ArrowRight: () => move(1),
  Home: () => parts.length && choose(parts[0].id, true),
  r: () => at("filter").click(),
  g: () => judge("good"),
  d: () => judge("defect"),
  n: () => at("note").focus(),
  h: switchPicture,
  "+": () => zoom.by(1.5),
  "=": () => zoom.by(1.5), // the same key without shift
  "-": () => zoom.by(1 / 1.5),
  0: zoom.reset,
  "/": () => at("jump").focus(),
};
const BUTTONS = { good: "g", defect: "d", live: "Home", switch: "h", larger: "+", smaller: "-", whole: "0" };

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    at("jump").value = "";
    document.activeElement.blur();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (action) {
    event.preventDefault();
    action();
  }
});
for (const [id, key] of Object.entries(BUTTONS)) at(id).addEventListener("click", KEYS[key]);
at("filter").addEventListener("click", () => {
  only = only ? "" : "review";
  at("filter").setAttribute("aria-pressed", String(Boolean(only)));
  following = true;
  refresh().catch(lost);
});
at("models").addEventListener("change", () => {
  model = at("models").value;
  remembered("model", model);
  at("models").blur();
  following = true;
  refresh().catch(lost);
});
at("picture").addEventListener("error", () => blank(photo ? "no_photograph" : "no_picture"));
at("jump").addEventListener("change", jump);
addEventListener("resize", chart);
setInterval(() => { alarms().catch(() => {}); }, 5000); // a model may fail while no part comes
at("who").value = remembered("who");
offerLanguages(at("language"), () => refresh().catch(lost));
json("v1/models").then(({ models }) => {
  const names = models.map(({ name }) => name), last = remembered("model");
  at("models").append(...names.map((name) => new Option(name)));
  at("models").hidden = names.length < 2;
  at("models").value = model = names.length > 1 && names.includes(last) ? last : "";
}).catch(lost).finally(follow);
