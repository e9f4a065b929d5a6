// The words of the pages in the language of whoever looks: ?lang=de, else what was chosen last, else
// the browser's. Pages import this before they say anything.

const LANGUAGES = { en: "English", de: "Deutsch", es: "Español", zh: "中文" };
const PLACES = { word: "textContent", label: "ariaLabel", hint: "title" };
const TABLE = await (await fetch("words.json")).json();

// What this browser remembers by a name, and with a value what it shall remember. A browser that lets
// pages store nothing throws; the page then works without.
export function remembered(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name) || "";
  } catch {
    return "";
  }
}

const address = new URL(location);
const wanted = [address.searchParams.get("lang"), remembered("language"), ...navigator.languages];
export let language = wanted.map((name) => (name || "").slice(0, 2).toLowerCase()).find((name) => name in LANGUAGES) || "en";

// A text of the table, with values in place of its {names}.
export const word = (key, values = {}) =>
  TABLE[key][language].replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);

// A number as it is written there.
export const number = (value, digits) =>
  value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });

// Puts words into the elements that name them: data-word as text, data-label for those who listen,
// data-hint for a mouse that rests.
export function fill(root = document) {
  document.documentElement.lang = language;
  for (const [name, property] of Object.entries(PLACES)) {
    for (const node of root.querySelectorAll(`[data-${name}]`)) node[property] = word(node.dataset[name]);
  }
}

// Makes a select offer the languages; with another one, `changed` says what isn't in elements.
export function offerLanguages(select, changed = () => location.reload()) {
  select.replaceChildren(...Object.entries(LANGUAGES).map(([value, name]) => new Option(name, value, false, value === language)));
  select.addEventListener("change", () => {
    language = select.value;
    remembered("language", language);
    address.searchParams.delete("lang");
    history.replaceState(null, "", address);
    fill();
    changed();
  });
}

if (address.searchParams.has("lang")) remembered("language", language);
fill();
