// One image, large, beside itself with its marks; as large as its file when that is wanted.
const viewer = byId("viewer");
let viewed = 0;
let fullSize = false;

function figure(image, title, ...rest) {
  const frame = element("span", { class: "frame" }, stackOf(image, ...rest));
  frame.addEventListener("click", (event) => setFullSize(!fullSize, event));
  frame.addEventListener("scroll", () => { // both show the same place
    const follows = frame.placed === `${frame.scrollLeft} ${frame.scrollTop}`;
    frame.placed = null;
    if (follows) return; // an event of the other one's, which may have gone on since
    for (const other of byId("viewer-pictures").querySelectorAll(".frame")) {
      if (other === frame) continue;
      other.scrollTo(frame.scrollLeft, frame.scrollTop);
      other.placed = `${other.scrollLeft} ${other.scrollTop}`;
    }
  });
  return element("figure", {}, frame, element("figcaption", {}, title));
}

function view(index) {
  viewed = index;
  const image = images[index];
  const list = shownTiles();
  const at = list.indexOf(index);
  byId("viewer-name").replaceChildren(element("bdi", {}, visible(image.name)));
  const dimmed = image.partly ? "; dimmed: not looked at" : "";
  byId("viewer-pictures").replaceChildren(...(data.labelled
    ? [figure(image, "image", false), figure(image, `with heatmap${dimmed}`)]
    : [figure(image, image.photo ? "heatmap" : "")]));
  const facts = [
    ["verdict", `${MARKS[tiles[index].verdictNow]} ${tiles[index].verdictNow}`],
    ["score", scale.text(image.score)],
    ["truth", visible(image.type)],
    [data.labelled ? "size" : "heatmap", image.source ? image.source.join(" × ") : ""],
    ["sha256", image.sha256 ? `${image.sha256.slice(0, 12)}…` : "–"],
    ["image", `${at + 1} of ${list.length}`],
  ];
  byId("viewer-facts").replaceChildren(...facts.filter(([, value]) => value).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, element("bdi", {}, value)))));
  byId("viewer-odd").textContent = image.odd ? `Reason for a person to look: ${visible(image.odd)}` : "";
  byId("viewer-file").hidden = !image.link;
  if (image.link) byId("viewer-file").href = image.link;
  byId("previous").disabled = at <= 0;
  byId("next").disabled = at >= list.length - 1;
  byId("full").hidden = !image.photo;
  if (!viewer.open) viewer.showModal();
  setFullSize(fullSize);
}

// Every pixel of the image is one of the page; what was pressed comes to the middle, or a defect.
function setFullSize(wanted, press = null) {
  const { source, size, truth, marked } = images[viewed];
  const frames = [...byId("viewer-pictures").querySelectorAll(".frame")];
  const box = press && press.currentTarget.firstChild.getBoundingClientRect();
  fullSize = wanted;
  viewer.classList.toggle("full-size", wanted);
  byId("full").setAttribute("aria-pressed", String(wanted));
  for (const frame of frames) {
    if (source) frame.firstChild.style.setProperty("--full", `${source[0]}px`);
    if (wanted) frame.tabIndex = 0;
    else frame.removeAttribute("tabindex");
  }
  const kept = source && size[0] < source[0] ? `The page keeps this picture at ${size.join(" × ")} pixels of ${source.join(" × ")}.` : "";
  byId("viewer-kept").textContent = wanted ? kept : "";
  if (!wanted || !frames.length) return;
  const [frame] = frames;
  const spot = /^M([\d.]+) ([\d.]+)/.exec(truth || marked || "");
  const middle = spot ? [spot[1] / size[0], spot[2] / size[1]] : [0.5, 0.5];
  const [x, y] = box ? [(press.clientX - box.left) / box.width, (press.clientY - box.top) / box.height] : middle;
  frame.scrollTo(x * frame.scrollWidth - frame.clientWidth / 2, y * frame.scrollHeight - frame.clientHeight / 2);
}

function viewNext(step) {
  const list = shownTiles();
  const to = list.indexOf(viewed) + step;
  if (to >= 0 && to < list.length) view(list[to]);
}

function startViewer() {
  byId("close").addEventListener("click", () => viewer.close());
  byId("previous").addEventListener("click", () => viewNext(-1));
  byId("next").addEventListener("click", () => viewNext(1));
  byId("full").addEventListener("click", () => setFullSize(!fullSize));
  byId("viewer-outline").addEventListener("click", () => byId("outline").click());
  viewer.addEventListener("keydown", (event) => {
    if (event.key === "z") setFullSize(!fullSize);
    else if (event.target.matches(".frame")) return; // the arrow keys move the picture
    else if (event.key === "ArrowLeft") viewNext(-1);
    else if (event.key === "ArrowRight") viewNext(1);
    else return;
    event.preventDefault();
  });
  viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
  viewer.addEventListener("close", () => {
    reach(viewed);
    tiles[viewed].button.focus();
  });
}
