// How many images get each verdict: in all, and by type of part where that is known.
const OUTCOMES = data.labelled
  ? [["all", "All"], ["false-reject", "False rejects"], ["escape", "Escapes"], ["review", "To review"]]
  : [["all", "All"], ["reject", "Rejected"], ["review", "To review"], ["good", "Good"]];

function countVerdicts(verdicts, limits) {
  if (!data.labelled) return countScores(limits);
  const none = () => ({ good: 0, review: 0, reject: 0, total: 0 });
  const counts = { sound: none(), defect: none(), types: new Map(data.types.map((t) => [t, none()])) };
  images.forEach((image, i) => {
    for (const group of [counts[image.defect ? "defect" : "sound"], counts.types.get(image.type)]) {
      group[verdicts[i]] += 1;
      group.total += 1;
    }
  });
  return counts;
}

function countScores(limits) {
  const upTo = (limit, scores) => { // how many scores aren't above it
    let low = 0, high = scores.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (scores[middle] <= limit) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const good = upTo(limits.review, unlabelled), total = unlabelled.length + oddScores.length;
  const passed = upTo(limits.reject, unlabelled) + upTo(limits.reject, oddScores);
  return { good, review: passed - good, reject: total - passed, total };
}

function outcomeOf(image, verdict) {
  if (!data.labelled) return verdict;
  if (verdict === "review") return "review";
  if (image.defect) return verdict === "good" ? "escape" : "found";
  return verdict === "reject" ? "false-reject" : "passed";
}

function outcomeCounts(counts) {
  if (!data.labelled) return counts;
  return {
    "false-reject": counts.sound.reject,
    escape: counts.defect.good,
    review: counts.sound.review + counts.defect.review,
  };
}

function showOutcomes(counts) {
  const n = outcomeCounts(counts);
  const { sound, defect } = counts;
  const box = (key, tone, value, title, detail, hint) => {
    const node = element("div", { class: `outcome ${value ? tone : ""}`, "data-outcome": key });
    node.title = hint;
    node.append(element("b", {}, String(value)), element("span", {}, title), element("span", {}, detail));
    return node;
  };
  if (!data.labelled) {
    const share = (verdict) => `${percent(n[verdict], n.total)} of ${n.total}`;
    byId("outcomes").replaceChildren(
      box("reject", "bad", n.reject, "rejected", share("reject"), "parts above the reject threshold"),
      box("review", "waiting", n.review, "to review", share("review"), "parts for a person to look at"),
      box("good", "", n.good, "good", share("good"), "parts that pass"),
    );
    return;
  }
  byId("outcomes").replaceChildren(
    box("false-reject", "bad", n["false-reject"], "false rejects", `${percent(n["false-reject"], sound.total)} of ${sound.total}`, "good parts that are rejected"),
    box("escape", "bad", n.escape, "escapes", `${percent(n.escape, defect.total)} of ${defect.total}`, "defective parts that pass as good"),
    box("review", "waiting", n.review, "to review", `${sound.review} good, ${defect.review} defective`, "parts for a person to look at"),
  );
}

function showTypes(counts) {
  if (!data.labelled) return;
  const rows = [...counts.types].filter(([, n]) => n.total).map(([type, n]) => {
    const wrong = type === data.good ? "reject" : "good";
    const cells = VERDICTS.map((verdict) => element("td", {
      class: n[verdict] === 0 ? "zero" : verdict === wrong ? "wrong" : "",
    }, String(n[verdict])));
    const share = element("div", { class: "share" });
    for (const verdict of VERDICTS) {
      const part = element("i", { class: verdict });
      part.style.flexGrow = n[verdict];
      share.append(part);
    }
    const name = element("td", {}, element("bdi", {}, visible(type)));
    name.title = visible(type);
    const row = element("tr", {}, name, element("td", {}, share), ...cells);
    row.dataset.type = type;
    return row;
  });
  byId("types").tBodies[0].replaceChildren(...rows);
}
