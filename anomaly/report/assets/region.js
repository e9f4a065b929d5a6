const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const { width, height } = data;
const picture = byId("picture");
const polygons = []; // {kind, corners: [[x, y], …]} in original pixels
const cross = { x: Math.round(width / 2), y: Math.round(height / 2), shown: false };
let open = []; // corners of the polygon that is being drawn
let kind = "region";
let dragged = null;

function svg(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

const scale = () => Math.max(width / picture.clientWidth, height / picture.clientHeight);
const within = (value, end) => Math.min(Math.max(Math.round(value), 0), end);

function place(event) {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(
    picture.getScreenCTM().inverse(),
  );
  return [within(at.x, width), within(at.y, height)];
}

function near([x, y], [a, b]) {
  return Math.hypot(x - a, y - b) <= 9 * scale();
}

function cornerAt(point) {
  for (const corners of [open, ...polygons.map((one) => one.corners)]) {
    const found = corners.find((corner) => near(corner, point));
    if (found) return { corners, found };
  }
  return null;
}

function close() {
  if (open.length < 3) return;
  polygons.push({ kind, corners: open });
  open = [];
}

function add(point) {
  if (open.length > 2 && near(open[0], point)) close();
  else open.push(point);
}

function listed(corners) {
  const shown = (value, end) => +(value / end).toFixed(5);
  return `[${corners.map(([x, y]) => `[${shown(x, width)}, ${shown(y, height)}]`).join(", ")}]`;
}

function yaml() {
  const lines = ["image:"];
  for (const name of ["region", "ignore"]) {
    const mine = polygons.filter((one) => one.kind === name);
    if (!mine.length) continue;
    lines.push(`  ${name}:`, "    polygons:");
    lines.push(...mine.map((one) => `      - ${listed(one.corners)}`));
  }
  return lines.length > 1 ? `${lines.join("\n")}\n` : "";
}

function item(polygon, number) {
  const node = document.createElement("li");
  const what = polygon.kind === "region" ? "look here" : "ignore";
  node.textContent = `${what}, ${polygon.corners.length} corners`;
  const remove = document.createElement("button");
  remove.type = "button";
  remove.className = "button";
  remove.textContent = "Remove";
  remove.setAttribute("aria-label", `Remove polygon ${number + 1}`);
  remove.addEventListener("click", () => {
    polygons.splice(number, 1);
    draw();
  });
  node.append(remove);
  return node;
}

function draw() {
  const nodes = [svg("image", { href: data.photo, width, height, preserveAspectRatio: "none" })];
  for (const { kind: name, corners } of polygons)
    nodes.push(svg("polygon", { class: name, points: corners.join(" ") }));
  nodes.push(svg("polyline", { class: kind, points: open.join(" ") }));
  for (const corners of [open, ...polygons.map((one) => one.corners)])
    for (const [cx, cy] of corners) nodes.push(svg("circle", { cx, cy, r: 5 * scale() }));
  if (cross.shown) {
    const across = { x1: 0, y1: cross.y, x2: width, y2: cross.y };
    const down = { x1: cross.x, y1: 0, x2: cross.x, y2: height };
    for (const line of [across, down]) nodes.push(svg("line", { class: "cross", ...line }));
  }
  picture.replaceChildren(...nodes);
  byId("list").replaceChildren(...polygons.map(item));
  byId("yaml").value = yaml();
  byId("copied").textContent = "";
  const left = open.length ? `; ${open.length} corners of an open polygon` : "";
  byId("cross").textContent = `x ${cross.x}, y ${cross.y}${left}`;
}

picture.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  const point = place(event);
  const hit = cornerAt(point);
  if (hit && !(open.length > 2 && hit.found === open[0])) dragged = hit.found;
  else add(point);
  picture.setPointerCapture(event.pointerId);
  picture.focus();
  cross.shown = false;
  draw();
  event.preventDefault();
});

picture.addEventListener("pointermove", (event) => {
  [cross.x, cross.y] = place(event);
  if (dragged) [dragged[0], dragged[1]] = [cross.x, cross.y];
  draw();
});

picture.addEventListener("pointerup", () => {
  dragged = null;
});

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

picture.addEventListener("keydown", (event) => {
  const step = event.shiftKey ? 10 : 1;
  if (event.key in MOVES) {
    const [dx, dy] = MOVES[event.key];
    cross.x = within(cross.x + dx * step, width);
    cross.y = within(cross.y + dy * step, height);
    cross.shown = true;
  } else if (event.key === " ") add([cross.x, cross.y]);
  else if (event.key === "Enter") close();
  else if (event.key === "Backspace") open.pop();
  else if (event.key === "Escape") open = [];
  else return;
  event.preventDefault();
  draw();
});

for (const chip of document.querySelectorAll("[data-kind]"))
  chip.addEventListener("click", () => {
    kind = chip.dataset.kind;
    for (const one of document.querySelectorAll("[data-kind]"))
      one.setAttribute("aria-pressed", String(one === chip));
    draw();
  });

window.addEventListener("resize", draw);

byId("copy").addEventListener("click", async () => {
  let done = true;
  try {
    await navigator.clipboard.writeText(byId("yaml").value);
  } catch {
    byId("yaml").select();
    done = document.execCommand("copy"); // pages from disk have no clipboard in some browsers
  }
  byId("copied").textContent = done ? "Copied." : "Press Ctrl+C to copy.";
});

picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
byId("name").textContent = data.name;
byId("size").textContent = `${width} × ${height} pixels`;
draw();
