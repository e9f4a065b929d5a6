// One tile for each image. All exist from the start; their pictures are put in when they come near.
const PRINTED = 48;
const tiles = images.map(makeTile);
const grid = byId("tiles");
let order = [];
let current = 0; // the tile that the Tab key reaches

function makeTile(image, index) {
  const verdict = element("span", { class: "verdict" });
  const flag = element("span", { class: "flag", hidden: "" });
  const kind = element("span", { class: "type" }, flag, element("bdi", {}, visible(image.type)));
  const frame = element("span", { class: "frame" });
  const button = element("button", { class: "tile", type: "button", tabindex: "-1" },
    frame,
    element("span", { class: "caption" }, verdict,
      element("span", { class: "score" }, scale.text(image.score)),
      kind,
      element("span", { class: "file" }, element("bdi", {}, shortName(image.name)))));
  button.title = visible(image.name);
  const item = element("li", {}, button);
  item.dataset.index = index;
  return { item, button, frame, verdict, flag, kind, verdictNow: "", drawn: false };
}

function stackOf(image, withMarks = true) {
  if (!image.photo) return element("span", { class: "soft small" }, "no picture");
  const [width, height] = image.size;
  const stack = element("span", { class: height > width ? "stack upright" : "stack" });
  stack.style.aspectRatio = `${width} / ${height}`;
  stack.style.setProperty("--ratio", width / height);
  const picture = (kind, content, type) => {
    const node = element("img", { class: kind, alt: "" });
    node.src = `data:image/${type};base64,${content}`;
    return node;
  };
  stack.append(picture("photo", image.photo, "jpeg"));
  if (!withMarks || !data.labelled) return stack;
  if (image.heat) stack.append(picture("heat", image.heat, "webp"));
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const kind of ["marked", "truth"]) {
    if (image[kind]) svg.append(drawing("path", { class: "halo", d: image[kind] }), drawing("path", { class: kind, d: image[kind] }));
  }
  stack.append(svg);
  return stack;
}

function drawTile(index) {
  const tile = tiles[index];
  if (tile.drawn) return;
  tile.drawn = true;
  tile.frame.append(stackOf(images[index]));
}

const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    drawTile(Number(entry.target.dataset.index));
    nearby.unobserve(entry.target);
  }
}, { rootMargin: "500px" });

function layTiles(direction) {
  order = images.map((_, i) => i).sort((a, b) => direction * (images[a].score - images[b].score) || a - b);
  grid.append(...order.map((i) => tiles[i].item));
}

function showVerdicts(verdicts) {
  const flags = { "false-reject": "false reject", escape: "escape" };
  verdicts.forEach((verdict, i) => {
    const tile = tiles[i];
    if (tile.verdictNow === verdict) return;
    tile.verdictNow = verdict;
    tile.button.className = `tile ${verdict}`;
    tile.verdict.textContent = `${MARKS[verdict]} ${verdict}`;
    const flag = images[i].odd ? "unlike training" : flags[outcomeOf(images[i], verdict)];
    tile.flag.hidden = !flag;
    tile.flag.textContent = flag || "";
    tile.kind.hidden = !flag && !images[i].type;
  });
}

function filterTiles(keep) {
  let shown = 0;
  for (const index of order) {
    const { item } = tiles[index];
    const kept = keep(index);
    if (item.hidden === kept) item.hidden = !kept;
    if (!kept) continue;
    shown += 1;
    item.classList.toggle("beyond", shown > PRINTED);
    // What can be printed must be there before anybody asks for paper.
    if (shown <= PRINTED) drawTile(index);
  }
  byId("not-printed").textContent =
    shown > PRINTED ? `The first ${PRINTED} of ${shown} images are printed; filter the report to print others.` : "";
  if (shown && tiles[current].item.hidden) reach(shownTiles()[0]);
  return shown;
}

const shownTiles = () => order.filter((i) => !tiles[i].item.hidden);

function reach(index) {
  tiles[current].button.tabIndex = -1;
  current = index;
  tiles[current].button.tabIndex = 0;
}

function columns(list) {
  const top = tiles[list[0]].item.offsetTop;
  const second = list.findIndex((i) => tiles[i].item.offsetTop > top);
  return second < 0 ? list.length : second;
}

function moveByKey(event) {
  const list = shownTiles();
  const at = list.indexOf(current);
  const steps = {
    ArrowRight: () => at + 1, ArrowLeft: () => at - 1,
    ArrowDown: () => at + columns(list), ArrowUp: () => at - columns(list),
    Home: () => 0, End: () => list.length - 1,
  };
  if (!steps[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const to = steps[event.key]();
  if (to < 0 || to >= list.length) return;
  reach(list[to]);
  drawTile(list[to]);
  tiles[list[to]].button.focus();
}
