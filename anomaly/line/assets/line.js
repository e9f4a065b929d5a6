// The page for the line: newest part, counts, strip and chart; asks for news twice a second.
// What clients and people have written is only ever put in place as text.

import { language, number, offerLanguages, remembered, word } from "./words.js";
import { zoomable } from "./zoom.js";

const KEPT = 60;
const HASTE = 600; // milliseconds in which a button still means the part before
const AGAIN = 500; // milliseconds until the page asks for news again
const VERDICTS = { good: "verdict_good", review: "verdict_review", reject: "verdict_reject" };

let parts = []; // the newest first
let chosen = null; // number of the part that is shown
let following = true; // whether that is always the newest one
let only = ""; // verdict that the strip is filtered to
let model = ""; // that is looked at; empty for all
let photo = false; // whether the photograph is shown instead of the heatmap
let close = false; // whether the picture is zoomed into
let listed = ""; // the alarms that are shown
let seen = null; // the service's number of news that is shown
let arrived = -HASTE; // when another part was put in place of the one that was shown
let connected = false; // whether parts are shown as they come
let drafted = false; // something is typed that wasn't sent

const at = (id) => document.getElementById(id);
const digits = (value) => value.toLocaleString(language, { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
const person = () => at("who").value.trim();
// The hash keeps another record's part of this number out of the browser's memory.
const pictureAddress = (part, kind) => `v1/parts/${part.id}/${kind}?of=${part.image_sha256.slice(0, 16)}`;
const kind = (part) => (part.status === "ok" ? part.verdict || "none" : "none");
const verdictText = (part) => word(part.status === "ok" ? VERDICTS[part.verdict] || "no_verdict" : "not_read");
const shown = () => parts.find((part) => part.id === chosen);
const clock = (part) => new Date(part.time).toLocaleTimeString(language, { hourCycle: "h23" });
const zoom = zoomable(at("frame"), at("picture"), (larger) => { close = larger; });

// The part that isn't left for newer ones: somebody has chosen it, writes about it or looks closely.
const held = () => (following && !drafted && !close ? undefined : shown());

// The service's answer; a body is posted. Throws the reason of a refusal.
async function json(path, body) {
  const headers = { "Content-Type": "application/json", "X-Requested-With": "line" }; // see server.py
  const posted = body && { method: "POST", headers, body: JSON.stringify(body) };
  const response = await fetch(path, posted);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail || response.statusText);
  return answer;
}

function svgElement(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Keeps a part among the newest ones, however old it is.
function keep(part) {
  if (parts.some((one) => one.id === part.id)) return;
  parts.length = Math.min(parts.length, KEPT - 1);
  parts.push(part);
  parts.sort((a, b) => b.id - a.id);
}

async function refresh() {
  const wanted = new URLSearchParams({ limit: KEPT, verdict: only, model });
  const newest = (await json(`v1/parts?${wanted}`)).parts;
  if (wanted.get("verdict") !== only || wanted.get("model") !== model) return;
  const before = held();
  parts = newest;
  const first = parts.length ? parts[0].id : null;
  if (before) keep(before);
  else if (chosen !== first) {
    if (chosen !== null) arrived = performance.now();
    chosen = first;
  }
  redraw();
  await counts();
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
  const rows = Object.entries(VERDICTS).map(([name, key]) => [word(key), verdicts[name] || 0]);
  const unread = Object.entries(verdicts).filter(([name]) => !(name in VERDICTS) && name !== "no verdict");
  if (verdicts["no verdict"]) rows.push([word("no_verdict"), verdicts["no verdict"]]);
  if (unread.length) rows.push([word("not_read"), unread.reduce((sum, [, count]) => sum + count, 0)]);
  at("counts").replaceChildren(...rows.map(([name, count]) => {
    const row = document.createElement("div");
    row.append(element("dt", name), element("dd", number(count)));
    return row;
  }));
  await alarms();
}

async function alarms() {
  const { alarms } = await json("v1/alarms");
  const ready = !alarms.some(({ severity }) => severity === "error");
  if (connected) state(ready ? "live" : "not_ready", ready);
  if (listed === JSON.stringify(alarms)) return; // else it would be read out again
  listed = JSON.stringify(alarms);
  at("alarms").replaceChildren(...alarms.map((alarm) => element("li", word(alarm.kind, alarm), alarm.severity)));
}

function state(key, good) {
  at("state").textContent = word(key);
  at("state").className = good ? "soft live" : "soft";
}

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function show() {
  const part = shown();
  const text = part ? verdictText(part).toLocaleUpperCase(language) : word("no_parts");
  at("verdict").className = part ? kind(part) : "none";
  at("word").textContent = text;
  at("number").textContent = part ? `${clock(part)}\n#${part.id}` : "";
  at("reason").textContent = part ? part.reason : "";
  const times = part && part.threshold && part.image_score !== null;
  at("times").className = times ? kind(part) : "none";
  at("ratio").textContent = times ? number(part.image_score / part.threshold, 2) : "–";
  at("description").textContent = part ? description(part) : "";
  at("model").textContent = part ? part.model : word("line");
  document.title = part ? `${text} · ${part.model}` : word("line");
  picture(part);
  feedback(part);
}

function description(part) {
  const texts = [part.path];
  if (part.image_score !== null) texts.push(word("score", { score: digits(part.image_score) }));
  return texts.filter(Boolean).join(" · ");
}

function picture(part) {
  const node = at("picture"), blank = at("blank"), now = photo ? "photograph" : "heatmap";
  node.hidden = !part || !part.picture;
  blank.hidden = !node.hidden;
  at("tools").hidden = !part;
  blank.textContent = word(part ? "no_picture" : "first_part");
  at("other").textContent = word(photo ? "heatmap" : "photograph");
  if (!node.hidden) {
    const address = pictureAddress(part, now);
    if (node.getAttribute("src") !== address) node.src = address;
    node.alt = word("picture_of", { picture: word(now), part: part.id });
  } else {
    node.removeAttribute("src");
  }
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
  if (judgement) {
    const who = judgement.who ? ` ${word("by", { who: judgement.who })}` : "";
    const type = judgement.defect_type ? ` (${judgement.defect_type})` : "";
    const note = judgement.note ? `: ${judgement.note}` : "";
    at("answer").textContent = `${word(judgement.verdict === "good" ? "called_good" : "called_defect")}${type}${who}${note}`;
  } else {
    at("answer").textContent = "";
  }
}

function strip() {
  at("strip").replaceChildren(...parts.map((part) => {
    const item = document.createElement("li");
    const button = element("button", "", kind(part));
    button.dataset.part = part.id;
    button.classList.toggle("chosen", part.id === chosen);
    button.ariaLabel = word("part_label", { part: part.id, verdict: verdictText(part) });
    if (part.picture) {
      const small = document.createElement("img");
      small.src = pictureAddress(part, "heatmap");
      small.alt = "";
      small.addEventListener("error", () => { part.picture = false; small.replaceWith(element("div", "", "gap")); });
      button.append(small);
    } else {
      button.append(element("div", "", "gap"));
    }
    const mark = part.feedback ? { good: " ✓", defect: " ✗" }[part.feedback.verdict] : "";
    button.append(element("span", `${verdictText(part)}${mark}`), element("span", clock(part), "soft"));
    button.addEventListener("click", () => choose(part.id, false));
    item.append(button);
    return item;
  }));
}

function chart() {
  const svg = at("chart");
  const { width, height } = svg.getBoundingClientRect();
  const scored = parts.filter((part) => part.image_score !== null).reverse();
  const limits = scored.length ? scored[scored.length - 1] : null;
  svg.setAttribute("viewBox", `0 0 ${width || 300} ${height || 120}`);
  svg.replaceChildren();
  if (!limits) return;
  // Each part by its own threshold: models and thresholds may change on the way.
  const level = (part) => (part.threshold ? part.image_score / part.threshold : part.image_score);
  const highest = 1.1 * Math.max(...scored.map(level)) || 1;
  const high = limits.threshold ? Math.min(2.5, Math.max(1.4, highest)) : highest;
  const y = (value) => height - 10 - (Math.min(value, high) / high) * (height - 20);
  let left = 12;
  const line = (value, name, below) => {
    const text = svgElement("text", { x: 0, y: y(value) + below });
    text.textContent = word(VERDICTS[name]);
    svg.append(svgElement("line", { x1: 0, x2: width, y1: y(value), y2: y(value), class: `limit ${name}` }), text);
    left = Math.max(left, text.getComputedTextLength() + 12);
  };
  if (limits.threshold) {
    // Thresholds may lie close to each other: one label above its line, the other below.
    line(1, "reject", -5);
    if (limits.review_threshold < 0.97 * limits.threshold) line(limits.review_threshold / limits.threshold, "review", 18);
  }
  const x = (index) => left + (KEPT - scored.length + index) * ((width - left - 12) / (KEPT - 1));
  svg.append(svgElement("polyline", { points: scored.map((part, index) => `${x(index)},${y(level(part))}`).join(" ") }));
  scored.forEach((part, index) => {
    const dot = svgElement("circle", { cx: x(index), cy: y(level(part)), r: part.id === chosen ? 9 : 4.5, class: kind(part) });
    dot.classList.toggle("chosen", part.id === chosen);
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
  const place = parts.findIndex((part) => part.id === chosen);
  const next = parts[Math.min(Math.max(place + by, 0), parts.length - 1)];
  if (next) choose(next.id, false);
}

// Any part of the record, by its number.
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

async function say(verdict) {
  const part = shown();
  if (!part || part.status !== "ok") return;
  if (performance.now() - arrived < HASTE) {
    at("answer").textContent = word("too_soon");
    return;
  }
  const body = {
    verdict,
    defect_type: verdict === "defect" ? at("type").value.trim() : "",
    note: at("note").value.trim(),
    who: person(),
  };
  try {
    const judged = await json(`v1/parts/${part.id}/feedback`, body);
    parts = parts.map((one) => (one.id === judged.id ? judged : one));
    remember(body);
    redraw();
    at("note").value = at("type").value = "";
    drafted = false;
  } catch (error) {
    at("answer").textContent = word("not_noted", { reason: error.message });
  }
}

function remember(body) {
  remembered("who", body.who);
  const known = [...at("types").options].map((option) => option.value);
  if (body.defect_type && !known.includes(body.defect_type)) {
    const option = document.createElement("option");
    option.value = body.defect_type;
    at("types").append(option);
  }
}

async function follow() {
  try {
    const { news } = await json("v1/news");
    const changed = !connected || news !== seen;
    connected = true;
    if (changed) await refresh();
    seen = news;
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
  g: () => say("good"),
  d: () => say("defect"),
  n: () => at("note").focus(),
  h: switchPicture,
  "+": () => zoom.by(1.5),
  "=": () => zoom.by(1.5), // the same key without shift
  "-": () => zoom.by(1 / 1.5),
  0: zoom.reset,
  "/": () => at("jump").focus(),
};

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
for (const name of ["note", "type"]) {
  at(name).addEventListener("input", () => { drafted = Boolean(at("note").value || at("type").value); });
}
at("good").addEventListener("click", () => say("good"));
at("defect").addEventListener("click", () => say("defect"));
at("live").addEventListener("click", KEYS.Home);
at("filter").addEventListener("click", () => {
  only = only ? "" : "review";
  at("filter").setAttribute("aria-pressed", String(Boolean(only)));
  following = true;
  refresh().catch(lost);
});
at("picture").addEventListener("error", () => {
  at("picture").removeAttribute("src"); // it is tried again with the next part, or H
  at("picture").hidden = true;
  at("blank").hidden = false;
  at("blank").textContent = word(photo ? "no_photograph" : "no_picture");
});
for (const [id, action] of Object.entries({ switch: switchPicture, larger: KEYS["+"], smaller: KEYS["-"], whole: zoom.reset })) {
  at(id).addEventListener("click", action);
}
at("jump").addEventListener("change", jump);
at("models").addEventListener("change", () => {
  model = at("models").value;
  remembered("model", model);
  following = true;
  at("models").blur();
  refresh().catch(lost);
});
addEventListener("resize", chart);
setInterval(() => { alarms().catch(() => {}); }, 5000); // a model may fail while no part comes
at("who").value = remembered("who");
offerLanguages(at("language"), () => {
  listed = "";
  refresh().catch(lost);
});
json("v1/models").then(({ models }) => {
  const names = models.map(({ name }) => name), last = remembered("model");
  at("models").append(...names.map((name) => new Option(name)));
  at("models").hidden = names.length < 2;
  at("models").value = model = names.length > 1 && names.includes(last) ? last : "";
}).catch(lost).finally(follow);
