// Words, numbers and times in the reader's language: that of ?lang=de, else the one chosen last, else
// the browser's.

const LANGUAGES = { en: "English", de: "Deutsch", es: "Español", zh: "中文" };
const PLACES = { word: "textContent", label: "ariaLabel" };
const TABLE = await (await fetch("words.json")).json();

// The text that the browser keeps by a name; a value is kept first. Where pages may store nothing, this
// throws, and the page works without.
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

// A text of words.json, with values in place of its {names}.
export const word = (key, values = {}) =>
  TABLE[key][language].replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);

// A number with so many decimals.
export const number = (value, digits) =>
  value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });

// A number with four significant digits.
export const digits = (value) =>
  value.toLocaleString(language, { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });

// A time in ISO 8601 as hours, minutes and seconds here.
export const clock = (time) => new Date(time).toLocaleTimeString(language, { hourCycle: "h23" });

// Puts words into the elements that name them: data-word as text, data-label for screen readers.
function fill() {
  document.documentElement.lang = language;
  for (const [name, property] of Object.entries(PLACES)) {
    for (const node of document.querySelectorAll(`[data-${name}]`)) node[property] = word(node.dataset[name]);
  }
}

// Fills a select with the languages; after a choice, `changed` draws what `fill` doesn't know.
export function offerLanguages(select, changed) {
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
