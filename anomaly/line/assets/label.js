// The page for judging kept parts one by one: the photograph, keys, and marks on the defect.
// What clients and people have written is only ever put in place as text.

import { at, digits, json, person, pictureAddress, showPerson, svgElement, VERDICTS } from "./parts.js";
import { language, number, offerLanguages, word } from "./words.js";
import { zoomable } from "./zoom.js";

const WHY = { review: "why_review", near: "why_near", unlike: "why_unlike", check: "why_check", reject: "why_reject" };
const CAUGHT = { good: ["good"], defect: ["review", "reject"] }; // the model's verdicts that are right
const marks = at("marks"), picture = at("picture");
const zoom = zoomable(at("frame"), at("layers"), () => {}); // by wheel: dragging draws

let parts = []; // to judge, the worthiest first
let place = 0; // of the part that is shown
let left = 0; // parts to judge in all
let kinds = []; // of defect
let drawn = []; // marks on the photograph: {corners} of rectangles, {radius, points} of strokes
let begun = null; // the mark that is being drawn
let tool = "rectangle";
let judged = []; // what can be taken back, the newest last
let last = null; // the part that was judged last, as the service gives it
let busy = false; // a judgement is on its way

const shown = () => parts[place];

async function load() {
  const model = new URL(location).searchParams.get("model") || "";
  ({ parts, left, kinds } = await json(`/v1/labelling?limit=200&model=${encodeURIComponent(model)}`));
  place = 0;
  show();
}

function show(marked = [], kind = "") {
  const part = shown();
  drawn = marked;
  begun = null;
  zoom.reset();
  at("type").value = kind;
  at("left").textContent = word("left_to_judge", { count: number(left) });
  at("why").textContent = part ? word(WHY[part.why]) : "";
  at("why").className = part ? part.verdict : "";
  at("description").textContent = part ? description(part) : "";
  at("blank").hidden = Boolean(part);
  at("blank").textContent = word("all_judged");
  for (const id of ["good", "defect", "skip", "heatmap"]) at(id).disabled = !part;
  at("heatmap").setAttribute("aria-pressed", "false");
  marks.setAttribute("visibility", "hidden");
  picture.hidden = !part;
  if (part) {
    picture.src = pictureAddress(part, "photograph");
    picture.alt = word("picture_of", { picture: word("photograph"), part: part.id });
  } else picture.removeAttribute("src");
  const next = parts[place + 1];
  if (next) new Image().src = pictureAddress(next, "photograph");
  offerKinds();
}

function description(part) {
  const texts = [part.model, `#${part.id}`, part.path, new Date(part.time).toLocaleString(language, { dateStyle: "short", timeStyle: "short" })];
  if (part.verdict) texts.push(word(VERDICTS[part.verdict]));
  const times = part.threshold ? ` = ${number(part.image_score / part.threshold, 2)} ${word("of_reject")}` : "";
  texts.push(word("score", { score: digits(part.image_score) }) + times);
  return [...texts, part.reason].filter(Boolean).join(" · ");
}

function offerKinds() {
  at("kinds").replaceChildren(...kinds.slice(0, 9).map((kind, index) => {
    const button = document.createElement("button"), key = document.createElement("kbd");
    key.textContent = index + 1;
    button.append(`${kind} `, key);
    button.addEventListener("click", () => { at("type").value = kind; });
    return button;
  }));
}

// Marks: kept in pixels of the photograph, which are those of the svg.

function point(event) {
  const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(marks.getScreenCTM().inverse());
  return [x, y];
}

const size = () => marks.viewBox.baseVal; // the photograph's, also while its heatmap is shown
const radius = () => (at("size").value / 200) * Math.max(size().width, size().height);

// Whole pixels, as the mask will have them.
function edges([[x0, y0], [x1, y1]]) {
  return [Math.floor(Math.min(x0, x1)), Math.floor(Math.min(y0, y1)), Math.ceil(Math.max(x0, x1)), Math.ceil(Math.max(y0, y1))];
}

function draw() {
  at("drawn").replaceChildren(...[...drawn, begun].filter(Boolean).map((mark) => {
    if (mark.points) {
      return svgElement("polyline", { points: [mark.points[0], ...mark.points].join(" "), "stroke-width": 2 * mark.radius });
    }
    const [x, y, right, bottom] = edges(mark.corners);
    return svgElement("rect", { x, y, width: right - x, height: bottom - y });
  }));
}

function begin(event) {
  if (event.button || !shown() || !event.isPrimary) return;
  marks.setPointerCapture(event.pointerId);
  const start = point(event);
  begun = tool === "brush" ? { radius: radius(), points: [start] } : { corners: [start, start] };
  draw();
}

function go(event) {
  if (!begun) return;
  const [x, y] = point(event);
  if (begun.corners) begun.corners[1] = [x, y];
  else {
    const [x0, y0] = begun.points.at(-1);
    if (Math.hypot(x - x0, y - y0) > begun.radius / 3) begun.points.push([x, y]);
  }
  draw();
}

function end(event) {
  if (!begun) return;
  if (event.type === "pointerup" && (begun.points || begun.corners[0] !== begun.corners[1])) drawn.push(begun);
  begun = null;
  draw();
}

function mark() {
  const rounded = (values) => values.map((value) => Math.round(10 * value) / 10);
  return {
    width: size().width,
    rectangles: drawn.filter(({ corners }) => corners).map(({ corners }) => edges(corners)),
    strokes: drawn.filter(({ points }) => points).map((stroke) => ({ radius: rounded([stroke.radius])[0], points: stroke.points.map(rounded) })),
  };
}

function choose(name) {
  tool = name;
  for (const id of ["rectangle", "brush"]) at(id).setAttribute("aria-pressed", String(id === name));
}

// Judgements.

const answer = (text) => { at("answer").textContent = text; };

async function once(act, failed) {
  if (busy) return;
  busy = true;
  try {
    await act();
  } catch (error) {
    answer(word(failed, { reason: error.message }));
  } finally {
    busy = false;
  }
}

async function judge(verdict) {
  const part = shown();
  if (!part || marks.getAttribute("visibility") !== "visible" || busy) return; // nobody has seen it
  if (verdict === "good" && drawn.length) return answer(word("mark_on_good"));
  await once(async () => {
    const kind = verdict === "defect" ? at("type").value.trim() : "";
    const body = { verdict, defect_type: kind, who: person() };
    last = await json(`/v1/parts/${part.id}/feedback`, drawn.length ? { ...body, mark: mark() } : body);
    localStorage.setItem("who", body.who);
    if (kind && !kinds.includes(kind)) kinds.push(kind);
    judged.push({ part, drawn, kind });
    parts.splice(place, 1);
    left -= 1;
    offerToKeep();
    answer(`#${part.id}: ${word(verdict === "good" ? "called_good" : "called_defect")}${kind && ` (${kind})`}`);
    await (parts[place] ? show() : load());
  }, "not_noted");
}

function offerToKeep() {
  const judgement = last && last.feedback;
  at("missed").hidden = !judgement || judgement.verdict !== "defect" || last.verdict !== "good";
  at("golden").hidden = !judgement || !CAUGHT[judgement.verdict].includes(last.verdict);
}

const keep = (what) => at(what).hidden || once(async () => {
  last = await json(`/v1/parts/${last.id}/${what}?who=${encodeURIComponent(person())}`, {});
  answer(`#${last.id}: ${word(what === "missed" ? "kept_missed" : "kept_golden")}`);
  at(what).hidden = true;
}, "not_kept");

function undo() {
  if (drawn.length) {
    drawn.pop();
    draw();
  } else if (judged.length) once(async () => {
    const { part, drawn: marked, kind } = judged.at(-1);
    await json(`/v1/parts/${part.id}/feedback`, { verdict: "", who: person() });
    judged.pop();
    last = null;
    parts.splice(place, 0, part);
    left += 1;
    offerToKeep();
    answer(word("taken_back", { part: part.id }));
    show(marked, kind);
  }, "not_noted");
}

function skip() {
  place += 1;
  if (place < parts.length) show();
  else once(load, "not_noted");
}

const heated = () => at("heatmap").getAttribute("aria-pressed") === "true";

function toggleHeatmap() {
  const on = !heated();
  at("heatmap").setAttribute("aria-pressed", String(on));
  picture.src = pictureAddress(shown(), on ? "heatmap" : "photograph");
}

const ACTIONS = {
  good: () => judge("good"),
  defect: () => judge("defect"),
  missed: () => keep("missed"),
  golden: () => keep("golden"),
  rectangle: () => choose("rectangle"),
  brush: () => choose("brush"),
  heatmap: toggleHeatmap,
  undo,
  skip,
};
const KEYS = { g: "good", d: "defect", m: "missed", k: "golden", r: "rectangle", b: "brush", h: "heatmap", u: "undo", ArrowRight: "skip" };

for (const [id, action] of Object.entries(ACTIONS)) at(id).addEventListener("click", action);
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input:not([type=range])");
  if (event.key === "Escape" || (typing && event.key === "Enter")) return document.activeElement.blur();
  if (typing || event.altKey || event.repeat) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if ((event.ctrlKey || event.metaKey) && key !== "z") return;
  if (kinds[key - 1]) at("type").value = kinds[key - 1];
  const id = key === "z" ? (event.ctrlKey || event.metaKey) && "undo" : KEYS[key];
  if (!id) return;
  event.preventDefault();
  if (!at(id).disabled) ACTIONS[id]();
});
for (const name of ["pointermove", "dblclick"]) marks.addEventListener(name, (event) => event.stopPropagation());
marks.addEventListener("pointerdown", begin);
marks.addEventListener("pointermove", go);
marks.addEventListener("pointerup", end);
marks.addEventListener("pointercancel", end);
picture.addEventListener("load", () => {
  if (heated()) return;
  marks.setAttribute("viewBox", `0 0 ${picture.naturalWidth} ${picture.naturalHeight}`);
  marks.setAttribute("visibility", "visible");
  draw();
});
picture.addEventListener("error", () => {
  if (heated()) return toggleHeatmap();
  parts.splice(place, 1); // its picture had to make room meanwhile
  if (parts[place]) show();
  else load().catch((error) => answer(error.message));
});
showPerson().catch(() => {});
offerLanguages(at("language"), () => show(drawn, at("type").value));
choose("rectangle");
load().catch((error) => answer(error.message));
