// One image, large, beside itself with its marks.
const viewer = byId("viewer");
let viewed = 0;

function view(index) {
  viewed = index;
  const image = images[index];
  const list = shownTiles();
  const at = list.indexOf(index);
  const figure = (title, ...rest) => element("figure", {}, element("span", { class: "frame" }, stackOf(image, ...rest)), element("figcaption", {}, title));
  byId("viewer-name").replaceChildren(element("bdi", {}, visible(image.name)));
  byId("viewer-pictures").replaceChildren(figure("image", false), figure(`with heatmap and outlines${image.partly ? "; dimmed: not looked at" : ""}`));
  const facts = [
    ["verdict", `${MARKS[tiles[index].verdictNow]} ${tiles[index].verdictNow}`],
    ["score", scale.text(image.score)],
    ["truth", visible(image.type)],
    ["size", `${image.source[0]} × ${image.source[1]}`],
    ["sha256", image.sha256 ? `${image.sha256.slice(0, 12)}…` : "–"],
    ["image", `${at + 1} of ${list.length}`],
  ];
  byId("viewer-facts").replaceChildren(...facts.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, element("bdi", {}, value)))));
  byId("viewer-odd").textContent = image.odd ? `For a person to look at, whatever the score: ${visible(image.odd)}` : "";
  byId("previous").disabled = at <= 0;
  byId("next").disabled = at >= list.length - 1;
  if (!viewer.open) viewer.showModal();
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
  viewer.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") viewNext(-1);
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
