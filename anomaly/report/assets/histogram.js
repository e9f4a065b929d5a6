// Scores of good parts above the line, of defective ones below it; the thresholds cut through both.
const BINS = 44;
const EDGE = 9; // half a slider's thumb, so that thumb and line stand at the same place

const histogram = { svg: byId("histogram"), zones: {}, lines: {} };

function drawHistogram() {
  const { svg } = histogram;
  const width = svg.clientWidth || 390, height = svg.clientHeight || 160;
  const top = 2, base = height - 16, middle = (top + base) / 2, tall = middle - top - 4;
  const x = (score) => EDGE + ((score - scale.low) / (scale.high - scale.low)) * (width - 2 * EDGE);
  histogram.x = x;
  const counts = { sound: Array(BINS).fill(0), defect: Array(BINS).fill(0) };
  for (const { score, defect } of images) {
    const bin = Math.min(BINS - 1, Math.floor(((score - scale.low) / (scale.high - scale.low)) * BINS));
    counts[defect ? "defect" : "sound"][bin] += 1;
  }
  const most = Math.max(1, ...counts.sound, ...counts.defect);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  for (const verdict of VERDICTS) {
    histogram.zones[verdict] = drawing("rect", { class: `zone ${verdict}`, y: top, height: base - top });
    svg.append(histogram.zones[verdict]);
  }
  const step = (width - 2 * EDGE) / BINS;
  for (const kind of ["sound", "defect"]) counts[kind].forEach((count, bin) => {
    if (!count) return;
    const size = Math.max(1.5, (count / most) * tall);
    svg.append(drawing("rect", {
      class: `bar ${kind}`, x: EDGE + bin * step + 0.5, width: step - 1, rx: 1,
      y: kind === "sound" ? middle - 0.5 - size : middle + 0.5, height: size,
    }));
  });
  svg.append(drawing("line", { class: "axis", x1: EDGE, x2: width - EDGE, y1: middle, y2: middle }));
  for (const side of ["review", "reject"]) {
    histogram.lines[side] = drawing("line", { class: `limit ${side}`, y1: top, y2: height });
    svg.append(histogram.lines[side]);
  }
  const { ticks, digits } = niceTicks(scale.low, scale.high, 6);
  for (const tick of ticks) {
    svg.append(drawing("text", { x: x(tick), y: height - 2, "text-anchor": "middle" }, tick.toFixed(digits)));
  }
  byId("tallest").textContent = `tallest bar: ${most}; ${data.unit} →`;
}

function showLimits(limits) {
  const at = (value) => Math.min(Math.max(value, scale.low), scale.high);
  const edges = [scale.low, at(limits.review), at(limits.reject), scale.high].map(histogram.x);
  VERDICTS.forEach((verdict, i) => {
    histogram.zones[verdict].setAttribute("x", edges[i]);
    histogram.zones[verdict].setAttribute("width", Math.max(0, edges[i + 1] - edges[i]));
  });
  for (const side of ["review", "reject"]) {
    const x = histogram.x(at(limits[side]));
    histogram.lines[side].setAttribute("x1", x);
    histogram.lines[side].setAttribute("x2", x);
  }
  byId("histogram-text").textContent =
    `Histogram of ${images.length} image scores from ${scale.text(scale.low)} to ${scale.text(scale.high)}; ` +
    `review above ${scale.text(limits.review)}, reject above ${scale.text(limits.reject)}.`;
}
