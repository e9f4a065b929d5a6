// Scores: good parts above the line and defective ones below it, or all above it where nobody has
// said which they are. Heights are logarithmic: one defect still shows beside a thousand good parts.
const BINS = 44;
const EDGE = 9; // half a slider's thumb, so that thumb and line stand at the same place
const SERIES = data.labelled
  ? [["sound", "good", images.filter((i) => !i.defect).map((i) => i.score)], ["defect", "defective", images.filter((i) => i.defect).map((i) => i.score)]]
  : [["sound", "", unlabelled]];

const histogram = { svg: byId("histogram"), zones: {}, lines: {} };

function binned(scores) {
  const counts = Array(BINS).fill(0);
  for (const score of scores) counts[Math.min(BINS - 1, Math.floor(((score - scale.low) / (scale.high - scale.low)) * BINS))] += 1;
  return counts;
}

function drawHistogram() {
  const { svg } = histogram;
  const width = svg.clientWidth || 390, height = svg.clientHeight || 160;
  const top = 2, base = height - 30, middle = data.labelled ? (top + base) / 2 : base, tall = middle - top - 4;
  const x = (score) => EDGE + ((score - scale.low) / (scale.high - scale.low)) * (width - 2 * EDGE);
  histogram.x = x;
  const bars = SERIES.map(([kind, name, scores], i) => ({ kind, name, counts: binned(scores), up: i ? -1 : 1 }));
  const most = Math.max(1, ...bars.flatMap((series) => series.counts));
  const tallness = (count) => (Math.log1p(count) / Math.log1p(most)) * tall;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  for (const verdict of VERDICTS) {
    histogram.zones[verdict] = drawing("rect", { class: `zone ${verdict}`, y: top, height: base - top });
    svg.append(histogram.zones[verdict]);
  }
  const marks = [];
  for (let count = 1; count <= most; count *= 10) if (tallness(count) > 9) marks.push(count);
  const level = (up, count) => middle - up * (0.5 + tallness(count));
  for (const { up } of bars) for (const count of marks) {
    svg.append(drawing("line", { class: "axis faint", x1: EDGE, x2: width - EDGE, y1: level(up, count), y2: level(up, count) }));
  }
  const step = (width - 2 * EDGE) / BINS;
  for (const { kind, name, counts, up } of bars) counts.forEach((count, bin) => {
    if (!count) return;
    const from = scale.low + (bin * (scale.high - scale.low)) / BINS, to = from + (scale.high - scale.low) / BINS;
    svg.append(drawing("rect", {
      class: `bar ${kind}`, x: EDGE + bin * step + 0.5, width: step - 1, rx: 1,
      y: up > 0 ? level(up, count) : middle + 0.5, height: tallness(count),
    }, drawing("title", {}, `${count} ${name} from ${scale.text(from)} to ${scale.text(to)}`.replace("  ", " "))));
  });
  svg.append(drawing("line", { class: "axis", x1: EDGE, x2: width - EDGE, y1: middle, y2: middle }));
  for (const { counts, up } of bars) for (const count of marks) {
    // At the right, or as near to it as no bar is under the number.
    let end = BINS;
    while (end > 1 && (counts[end - 1] >= count || counts[end - 2] >= count)) end -= 1;
    const x = EDGE + (end > 1 ? end : BINS) * step;
    svg.append(drawing("text", { class: "count", x, y: level(up, count) + (up > 0 ? -2 : 10), "text-anchor": "end" }, String(count)));
  }
  for (const side of ["review", "reject"]) {
    histogram.lines[side] = drawing("line", { class: `limit ${side}`, y1: top, y2: base + 14 });
    svg.append(histogram.lines[side]);
  }
  const { ticks, digits } = niceTicks(scale.low, scale.high, 6);
  for (const tick of ticks) {
    svg.append(drawing("text", { x: x(tick), y: base + 14, "text-anchor": "middle" }, tick.toFixed(digits)));
  }
  svg.append(drawing("text", { x: width / 2, y: height - 3, "text-anchor": "middle" }, `image score (${data.unit})`));
  for (const { name, up } of bars) { // where such images hardly have scores, beside the numbers
    const place = up > 0 ? { x: width - EDGE - 20, y: top + 9, "text-anchor": "end" } : { x: EDGE + 2, y: base - 4 };
    svg.append(drawing("text", { class: "count", ...place }, `number of ${name} images`.replace("  ", " ")));
  }
  byId("bars").textContent = `heights logarithmic, tallest bar ${most}`;
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
    `Histogram of ${SERIES.reduce((n, [, , scores]) => n + scores.length, 0)} image scores from ${scale.text(scale.low)} to ${scale.text(scale.high)}; ` +
    `review threshold ${scale.text(limits.review)}, reject threshold ${scale.text(limits.reject)}.`;
}
