// ROC and precision-recall of the image scores, with the points where the thresholds stand.
const SIDE = 300, LEFT = 54, BELOW = 34;
const plots = [];

// How many images lie above each threshold, from the highest on; empty where a kind is missing.
function countsAbove() {
  const scored = [...images].sort((a, b) => b.score - a.score);
  const defect = scored.filter((image) => image.defect).length, sound = scored.length - defect;
  if (!defect || !sound) return [];
  const counts = [{ sound, defect, found: 0, falseAlarms: 0 }];
  scored.forEach((image, i) => {
    const last = counts.at(-1), next = { ...last };
    next[image.defect ? "found" : "falseAlarms"] += 1;
    // Equal scores are above the same thresholds.
    if (i && image.score === scored[i - 1].score) counts.pop();
    counts.push(next);
  });
  return counts;
}

function drawCurves() {
  if (!data.labelled) return;
  const value = (key) => data.figures.find((f) => f.key === key), counts = countsAbove();
  plots.push(
    plot("ROC", counts, "false rejects, share of good parts", "recall, share of defects found", value("image_auroc"),
      (n) => ({ x: n.falseAlarms / n.sound, y: n.found / n.defect })),
    plot("Precision and recall", counts, "recall, share of defects found", "precision, share of flagged that are defective", value("image_ap"),
      (n) => ({ x: n.found / n.defect, y: n.found + n.falseAlarms ? n.found / (n.found + n.falseAlarms) : 1 })),
  );
  byId("curves").replaceChildren(...plots.map((p) => p.node));
}

const TYPE_FIGURES = [["image_auroc", "image AUROC"], ["recall_at_frr_0.01", "recall at 1 % false rejects"], ["recall_at_frr_0.05", "recall at 5 %"]];

// Each type of defect by itself against all good parts: which one is hard to see?
function showTypeFigures() {
  if (!data.labelled || !data.by_type.length) return;
  const heading = ([key, title]) => element("th", { scope: "col" }, ...term(key, title, "type"));
  const shown = (row, key) => element("td", row[key] === null ? { title: row.reasons[key] || "" } : {}, row[key] === null ? "–" : row[key].toFixed(4));
  const rows = data.by_type.map((row) => element("tr", {},
    element("td", {}, element("bdi", {}, visible(row.type))), element("td", {}, String(row.images)), ...TYPE_FIGURES.map(([key]) => shown(row, key))));
  byId("by-type").replaceChildren(element("section", { class: "card" }, element("h2", {}, "Each type of defect against all good parts"),
    element("table", {}, element("thead", {}, element("tr", {}, ...[["", "Type"], ["", "images"], ...TYPE_FIGURES].map(heading))), element("tbody", {}, ...rows))));
}

function plot(title, counts, xLabel, yLabel, figure, where) {
  const node = element("figure", { class: "curve card" });
  const heading = element("h2", {}, title);
  if (figure && figure.value !== null) heading.append(element("span", { class: "soft" }, " · ", ...term(figure.key, figure.label, "curve"), ` ${figure.value.toFixed(4)}`));
  node.append(element("figcaption", {}, heading));
  if (!counts.length) {
    node.append(element("p", { class: "soft" }, (figure && figure.reason) || "undefined for these images"));
    return { node, move() {} };
  }
  const x = (v) => LEFT + v * SIDE, y = (v) => 8 + (1 - v) * SIDE;
  const svg = drawing("svg", { viewBox: `0 0 ${LEFT + SIDE + 14} ${SIDE + BELOW + 10}`, role: "img", "aria-label": `${title}: ${yLabel} over ${xLabel}` });
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(
      drawing("line", { class: "grid", x1: x(0), x2: x(1), y1: y(tick), y2: y(tick) }),
      drawing("line", { class: "grid", x1: x(tick), x2: x(tick), y1: y(0), y2: y(1) }),
      drawing("text", { x: x(tick), y: y(0) + 15, "text-anchor": "middle" }, String(tick)),
      drawing("text", { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" }, String(tick)),
    );
  }
  svg.append(
    drawing("text", { x: x(0.5), y: y(0) + 31, "text-anchor": "middle" }, xLabel),
    drawing("text", { transform: `translate(9 ${y(0.5)}) rotate(-90)`, "text-anchor": "middle" }, yLabel),
    drawing("polyline", { class: "line", points: counts.map(where).map((at) => `${x(at.x).toFixed(1)},${y(at.y).toFixed(1)}`).join(" ") }),
  );
  const dots = {}, lines = {};
  const list = element("ul");
  for (const side of ["review", "reject"]) {
    dots[side] = drawing("circle", { class: side, r: 6 });
    lines[side] = element("li", { class: side });
    svg.append(dots[side]);
    list.append(lines[side]);
  }
  node.append(svg, list);
  return {
    node,
    move(side, n) {
      const at = where(n);
      dots[side].setAttribute("cx", x(at.x));
      dots[side].setAttribute("cy", y(at.y));
      lines[side].replaceChildren(element("b", {}, side === "review" ? "not good" : "rejected"),
        `: ${xLabel.split(",")[0]} ${percent(at.x, 1)}, ${yLabel.split(",")[0]} ${percent(at.y, 1)}`);
    },
  };
}

function moveCurvePoints(counts) {
  if (!plots.length) return;
  const { sound, defect } = counts;
  const base = { sound: sound.total, defect: defect.total };
  for (const p of plots) {
    p.move("review", { ...base, falseAlarms: sound.total - sound.good, found: defect.total - defect.good });
    p.move("reject", { ...base, falseAlarms: sound.reject, found: defect.reject });
  }
}
