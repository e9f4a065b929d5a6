// The data of the page, and small builders. Strings from the data only ever become text nodes.
const data = JSON.parse(document.getElementById("data").textContent);
const images = data.images;
const VERDICTS = ["good", "review", "reject"];
const MARKS = { good: "✓", review: "?", reject: "✕" };

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// A figure's name that explains itself: under the mouse, and at a press or a key.
function term(key, title, place) {
  const about = data.glossary[key];
  if (!about) return [title];
  const id = `about-${place}-${key}`;
  return [element("button", { class: "term", type: "button", popovertarget: id, title: about }, title),
    element("span", { id, popover: "", class: "about" }, element("b", {}, title), about)];
}

// A name for a small place: a file without its folders beside its type, else below the folder that
// all share; of a long one the beginning, and the end, where numbers are.
const folder = sharedFolder();

function sharedFolder() {
  if (data.labelled || !images.length) return 0;
  const paths = images.map((i) => i.name.split("/").slice(0, -1));
  const different = paths[0].findIndex((part, at) => paths.some((path) => path[at] !== part));
  return different < 0 ? paths[0].length : different;
}

function shortName(path) {
  const parts = path.split("/");
  const letters = [...visible(data.labelled ? parts.at(-1) : parts.slice(folder).join("/"))];
  return letters.length <= 22 ? letters.join("") : `${letters.slice(0, 7).join("")}…${letters.slice(-14).join("")}`;
}

// Control characters and those that turn the direction of text are shown, not obeyed.
function visible(text) {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
}

// As the model decides: above the threshold, never at it; what isn't a number doesn't pass.
// A reason for review makes a verdict stricter, never milder.
function verdictOf({ score, odd }, limits) {
  if (score <= limits.review) return odd ? "review" : "good";
  return score <= limits.reject ? "review" : "reject";
}

// The scores of images without labels, also of those that aren't shown, in ascending order; those
// with a reason for review are apart.
const [unlabelled, oddScores] = data.labelled ? [] : [data.scores, data.odd].map(
  (scores) => new Float64Array(Uint8Array.from(atob(scores), (c) => c.charCodeAt(0)).buffer));
const scale = scoreScale();

function scoreScale() {
  const own = data.thresholds;
  const limits = [own.review, own.reject].filter((t) => t !== null);
  const scores = images.map((i) => i.score);
  const ends = data.labelled || !unlabelled.length ? scores : [unlabelled[0], unlabelled.at(-1), ...scores];
  const known = ends.concat(limits);
  const low = known.length ? known.reduce((a, b) => Math.min(a, b)) : 0;
  const high = known.length ? known.reduce((a, b) => Math.max(a, b)) : 1;
  const span = Math.max(high - low, Math.abs(high) * 1e-6, 1e-9);
  const power = Math.floor(Math.log10(span / 300));
  const step = Number(`1e${power}`);
  const digits = Math.max(0, -power);
  const rounded = (value) => Number(value.toFixed(digits));
  return {
    step, digits,
    low: Math.max(0, rounded(Math.floor((low - span * 0.02) / step) * step)),
    high: rounded(Math.ceil((high + span * 0.02) / step) * step),
    text: (value) => value.toFixed(digits),
  };
}

function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) ticks.push(k * step);
  return { ticks, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function percent(part, whole) {
  return whole ? `${Number(((100 * part) / whole).toPrecision(3))} %` : "–";
}
