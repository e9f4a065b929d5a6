// What the pages share: requests to the service, a part's texts and pictures, the person's name.

import { language } from "./words.js";

export const VERDICTS = { good: "verdict_good", review: "verdict_review", reject: "verdict_reject" };
export const at = (id) => document.getElementById(id);
export const digits = (value) => value.toLocaleString(language, { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
// The hash keeps another record's part of this number out of the browser's memory.
export const pictureAddress = (part, kind) => `/v1/parts/${part.id}/${kind}?of=${part.image_sha256.slice(0, 16)}`;
export const person = () => at("who").value.trim();

// The service's answer; a body is posted. Throws the reason of a refusal.
export async function json(path, body) {
  const posted = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, posted);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail || response.statusText);
  return answer;
}

export function svgElement(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Fills in the name that was typed last; a user's own can't be changed, as the record takes it from the token.
export async function showPerson() {
  at("who").value = localStorage.getItem("who") || "";
  const { user } = await json("/v1/user");
  if (user) at("who").value = user;
  at("who").readOnly = Boolean(user);
}
