// The page for the line: newest part, counts, strip and chart, live by server-sent events.
// What clients and people have written is only ever put in place as text.

import { language, number, offerLanguages, word } from "./words.js";

const KEPT = 60;
const HASTE = 600; // milliseconds in which a button still means the part before
const AGAIN = 2000; // milliseconds until the page asks again to follow, where it was refused
const KEPT_AS = "known missed defect"; // in a note that the service adds
const VERDICTS = { good: "verdict_good", review: "verdict_review", reject: "verdict_reject" };
const at = (id) => document.getElementById(id);

let parts = []; // the newest first
let chosen = null; // number of the part that is shown
let following = true; // whether that is always the newest one
let only = ""; // verdict that the strip is filtered to
let arrived = -HASTE; // when another part was put in place of the one that was shown
let connected = false; // whether parts are shown as they come
let drafted = false; // something is typed that wasn't sent

const kind = (part) => (part.status === "ok" ? part.verdict || "none" : "none");
const verdictText = (part) => word(part.status === "ok" ? VERDICTS[part.verdict] || "no_verdict" : "not_read");
const shown = () => parts.find((part) => part.id === chosen);
const digits = (value) => value.toLocaleString(language, { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
// The hash keeps another record's part of this number out of the browser's memory.
const heatmap = (part) => `/v1/parts/${part.id}/heatmap?of=${part.image_sha256.slice(0, 16)}`;
const clock = (part) => new Date(part.time).toLocaleTimeString(language);

// The part that isn't left for newer ones: somebody has chosen it, or writes about it.
const held = () => (following && !drafted ? undefined : shown());

// Keeps a part among the newest ones, however old it is.
function keep(part) {
  if (parts.some((one) => one.id === part.id)) return;
  parts.length = Math.min(parts.length, KEPT - 1);
  parts.push(part);
  parts.sort((a, b) => b.id - a.id);
}

async function json(path, options) {
  const answer = await fetch(path, options);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail || answer.statusText);
  return body;
}

async function refresh() {
  const wanted = only;
  const found = (await json(`/v1/parts?limit=${KEPT}&verdict=${wanted}`)).parts;
  if (wanted !== only) return;
  const before = held();
  parts = found;
  if (before) keep(before);
  else chosen = parts.length ? parts[0].id : null;
  show();
  strip();
  chart();
  await counts();
}

async function counts() {
  const midnight = new Date();
  midnight.setHours(0, 0, 0, 0);
  const since = midnight.toISOString().replace("Z", "+00:00");
  const found = await json(`/v1/counts?since=${encodeURIComponent(since)}`);
  const rows = Object.entries(VERDICTS).map(([name, key]) => [word(key), found[name] || 0]);
  const unread = Object.entries(found).filter(([name]) => !(name in VERDICTS) && name !== "no verdict");
  if (found["no verdict"]) rows.push([word("no_verdict"), found["no verdict"]]);
  if (unread.length) rows.push([word("not_read"), unread.reduce((sum, [, count]) => sum + count, 0)]);
  at("counts").replaceChildren(...rows.map(([name, count]) => {
    const row = document.createElement("div");
    row.append(element("dt", name), element("dd", number(count)));
    return row;
  }));
  await alarms();
}

async function alarms() {
  const health = await (await fetch("/v2/health/ready")).json();
  const [drift, { models }] = await Promise.all([json("/v1/drift"), json("/v1/models")]);
  const drifted = Object.keys(drift).filter((name) => drift[name].alarm);
  const said = [health.reason, health.record].filter(Boolean);
  said.push(...Object.entries(health.scene).map(([name, what]) => word("alarm_scene", { model: name, reason: what })));
  said.push(...drifted.map((model) => word("alarm_drift", { model })));
  said.push(...Object.entries(drift).filter(([, { flagged }]) => flagged).map(([name, { flagged }]) => `${name}: ${flagged}`));
  said.push(...models.filter((model) => model.reason).map((model) => model.refused
    ? word("alarm_refused", { model: model.name, reason: model.reason })
    : `${model.name}: ${model.reason}`));
  at("alarm").hidden = !said.length;
  at("alarm").textContent = said.join(" · ");
  if (connected) state(health.ready ? "live" : "not_ready", health.ready);
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
  at("said").textContent = part ? description(part) : "";
  at("model").textContent = part ? part.model : word("line");
  document.title = part ? `${text} · ${part.model}` : word("line");
  picture(part);
  feedback(part);
}

function description(part) {
  const said = [part.path];
  if (part.image_score !== null) {
    const score = digits(part.image_score);
    said.push(part.threshold
      ? word("score_of_reject", { score, times: number(part.image_score / part.threshold, 2) })
      : word("score", { score }));
  }
  if (part.decided_by) said.push(word("decided_by", { rule: part.decided_by }));
  return said.filter(Boolean).join(" · ");
}

function picture(part) {
  const image = at("picture"), blank = at("blank");
  image.hidden = !part || !part.picture;
  blank.hidden = !image.hidden;
  blank.textContent = word(part ? "no_picture" : "first_part");
  if (!image.hidden) {
    const address = heatmap(part);
    if (image.getAttribute("src") !== address) image.src = address;
    image.alt = word("heatmap_of", { part: part.id });
  } else {
    image.removeAttribute("src");
  }
}

function feedback(part) {
  const said = part && part.feedback;
  const defect = said && said.verdict === "defect" && part.verdict === "good";
  at("missed").hidden = !defect || said.note.includes(KEPT_AS);
  for (const verdict of ["good", "defect"]) {
    at(verdict).disabled = !part || part.status !== "ok";
    at(verdict).classList.toggle("chosen", Boolean(said) && said.verdict === verdict);
  }
  if (said) {
    const who = said.who ? ` ${word("by", { who: said.who })}` : "";
    const type = said.defect_type ? ` (${said.defect_type})` : "";
    const note = said.note ? `: ${said.note}` : "";
    at("answer").textContent = `${word(said.verdict === "good" ? "called_good" : "called_defect")}${type}${who}${note}`;
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
      const image = document.createElement("img");
      image.src = heatmap(part);
      image.alt = "";
      image.addEventListener("error", () => { part.picture = false; image.replaceWith(element("div", "", "gap")); });
      button.append(image);
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
  at("scale").textContent = limits && limits.threshold ? word("scale") : "";
  if (!limits) return;
  // Each part by its own threshold: models and thresholds may change on the way.
  const high = limits.threshold ? 2.5 : Math.max(...scored.map((part) => part.image_score)) || 1;
  const value = (part) => Math.min(part.threshold ? part.image_score / part.threshold : part.image_score, high);
  const y = (level) => height - 8 - (level / high) * (height - 16);
  const x = (index) => 8 + (KEPT - scored.length + index) * ((width - 40) / (KEPT - 1));
  const line = (level, name, below) => {
    svg.append(shape("line", { x1: 0, x2: width, y1: y(level), y2: y(level), class: `limit ${name}` }));
    const text = shape("text", { x: width - 2, y: y(level) + below, "text-anchor": "end" });
    text.textContent = word(VERDICTS[name]);
    svg.append(text);
  };
  if (limits.threshold) {
    // Thresholds may lie close to each other: one label above its line, the other below.
    line(1, "reject", -3);
    if (limits.review_threshold < 0.97 * limits.threshold) line(limits.review_threshold / limits.threshold, "review", 12);
  }
  scored.forEach((part, index) => {
    const dot = shape("circle", { cx: x(index), cy: y(value(part)), r: part.id === chosen ? 5.5 : 3.5, class: kind(part) });
    dot.classList.toggle("chosen", part.id === chosen);
    dot.addEventListener("click", () => choose(part.id, false));
    svg.append(dot);
  });
}

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function choose(number, newest) {
  chosen = number;
  following = newest;
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
    who: at("who").value.trim(),
  };
  try {
    const headers = { "Content-Type": "application/json" };
    const changed = await json(`/v1/parts/${part.id}/feedback`, { method: "POST", headers, body: JSON.stringify(body) });
    remember(body);
    take(changed);
    at("note").value = at("type").value = "";
    drafted = false;
  } catch (error) {
    at("answer").textContent = word("not_noted", { reason: error.message });
  }
}

async function keepMissed() {
  const part = shown();
  if (!part || at("missed").hidden) return;
  try {
    const who = encodeURIComponent(at("who").value.trim());
    take(await json(`/v1/parts/${part.id}/missed?who=${who}`, { method: "POST" }));
  } catch (error) {
    at("answer").textContent = word("not_kept", { reason: error.message });
  }
}

function remember(body) {
  localStorage.setItem("who", body.who);
  const known = [...at("types").options].map((option) => option.value);
  if (body.defect_type && !known.includes(body.defect_type)) {
    const option = document.createElement("option");
    option.value = body.defect_type;
    at("types").append(option);
  }
}

function take(part) {
  const place = parts.findIndex((one) => one.id === part.id);
  const before = held();
  if (place >= 0) {
    parts[place] = part;
  } else if (!only || part.verdict === only) {
    parts.unshift(part);
    parts.sort((a, b) => b.id - a.id);
    parts.length = Math.min(parts.length, KEPT);
    if (before) keep(before);
  } else {
    return;
  }
  if (!before && chosen !== parts[0].id) {
    if (chosen !== null) arrived = performance.now();
    chosen = parts[0].id;
  }
  show();
  strip();
  chart();
}

let due = null; // counts are asked for once for many parts
function countSoon() {
  due ??= setTimeout(() => { due = null; counts().catch(() => {}); }, 300);
}

function listen() {
  const source = new EventSource("/v1/events");
  source.addEventListener("open", () => {
    connected = true;
    refresh().catch(alarms).catch(lost);
  });
  source.addEventListener("error", () => {
    lost();
    // A browser tries again by itself only where there was no answer at all.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN);
  });
  source.addEventListener("message", (message) => {
    const event = JSON.parse(message.data);
    if (event.kind === "behind") refresh().catch(alarms).catch(lost);
    else take(event.part);
    if (event.kind === "part") countSoon();
  });
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
  m: keepMissed,
  n: () => at("note").focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.activeElement.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea")) return;
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
at("missed").addEventListener("click", keepMissed);
at("live").addEventListener("click", KEYS.Home);
at("filter").addEventListener("click", () => {
  only = only ? "" : "review";
  at("filter").setAttribute("aria-pressed", String(Boolean(only)));
  following = true;
  refresh().catch(lost);
});
at("picture").addEventListener("error", () => {
  at("picture").hidden = true;
  at("blank").hidden = false;
  at("blank").textContent = word("no_picture");
});
addEventListener("resize", chart);
setInterval(() => { alarms().catch(() => {}); }, 5000); // a model may fail while no part comes
at("who").value = localStorage.getItem("who") || "";
json("/v1/user").then(({ user }) => {
  if (user) at("who").value = user;
  at("who").readOnly = Boolean(user); // the record takes it from the token
});
offerLanguages(at("language"));
listen();
