// The bars and the curves, and how figures are written.

const SVG = "http://www.w3.org/2000/svg";
export const make = (name, attributes = {}, parent = null, words = null) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (words !== null) element.textContent = words;
  parent?.append(element);
  return element;
};

export const seconds = (value) => {
  const [unit, size] = [["µs", 1e-6], ["ms", 1e-3], ["s", 1]].findLast(([, one]) => value >= one * 0.9995) ?? ["µs", 1e-6];
  const number = value / size;
  return `${number >= 100 ? Math.round(number) : Number(number.toPrecision(3))} ${unit}`;
};
export const bytes = (value) => {
  const [unit, size] = [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9]].findLast(([, one]) => value >= one * 0.9995) ?? ["B", 1];
  return `${Number((value / size).toPrecision(3))} ${unit}`;
};

// Time of a step

const PARTS = [["compute", "computing"], ["communicate", "sending and receiving"], ["wait", "waiting"]];
export const keyOf = (parts) => parts.map(([kind, words]) => `<span><i class="c-${kind}"></i>${words}</span>`).join("");

export const drawBars = (place, rows, chosen, choose) => {
  const key = document.getElementById("bars-key");
  if (!key.innerHTML) key.innerHTML = keyOf(PARTS);
  const longest = Math.max(...rows.map(({ answer }) => answer?.step ?? 0));
  const sorted = [...rows].sort((a, b) => (a.answer?.step ?? Infinity) - (b.answer?.step ?? Infinity));
  const focused = document.activeElement?.dataset?.key;
  const old = new Map([...place.children].map((bar) => [bar.dataset.key, bar]));
  sorted.forEach(({ entry, answer, late }, order) => {
    const bar = old.get(entry.key) ?? newBar(entry, choose);
    old.delete(entry.key);
    bar.setAttribute("aria-pressed", String(entry.key === chosen));
    bar.classList.toggle("late", late);
    fill(bar, answer, longest);
    if (place.children[order] !== bar) place.insertBefore(bar, place.children[order] ?? null);
  });
  for (const bar of old.values()) bar.remove();
  if (focused) [...place.children].find((bar) => bar.dataset.key === focused)?.focus({ preventScroll: true });
};

const newBar = (entry, choose) => {
  const bar = document.createElement("button");
  bar.type = "button";
  bar.className = "bar";
  bar.dataset.key = entry.key;
  bar.innerHTML = `<span class="name"></span><span><span class="parts">${PARTS.map(([kind]) => `<span class="c-${kind}"></span>`).join("")}</span></span><span class="value"></span>`;
  bar.querySelector(".name").textContent = entry.exact ? entry.name : `${entry.name} *`;
  bar.addEventListener("click", () => choose(entry.key));
  return bar;
};

const fill = (bar, answer, longest) => {
  const parts = bar.querySelector(".parts");
  const value = bar.querySelector(".value");
  if (!answer?.step) {
    parts.style.width = "0";
    value.textContent = answer ? "not possible" : "…";
    bar.title = answer?.error ?? "";
    return;
  }
  const sum = PARTS.reduce((all, [kind]) => all + answer[kind], 0);
  parts.style.width = `${(100 * answer.step) / longest}%`;
  PARTS.forEach(([kind], place) => { parts.children[place].style.width = `${(100 * answer[kind]) / sum}%`; });
  value.textContent = seconds(answer.step);
  bar.dataset.step = answer.step;
  bar.title = `${PARTS.map(([kind, words]) => `${words} ${seconds(answer[kind])}`).join(", ")}; a worker sends ${bytes(answer.bytes_sent)}`;
};

// Scaling

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [560, 330, 52, 14, 10, 40];

export const drawScaling = (place, rows, curves, state, menu) => {
  const alone = menu.batch / (state.values.compute_ms / 1000); // samples/s of one worker that sends nothing
  const most = Math.max(16, state.values.workers);
  const points = [...curves.values()].flat();
  const low = Math.min(alone, ...points.map((one) => one.samples_per_second)) / alone;
  const x = (workers) => LEFT + ((WIDTH - LEFT - RIGHT) * Math.log2(workers)) / Math.log2(most);
  const floor = Math.log2(Math.max(low, 1 / 256)) - 0.2;
  const ceiling = Math.log2(most);
  const y = (speed) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (Math.log2(Math.max(speed, 1 / 300)) - floor)) / (ceiling - floor);
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": describe(rows, curves, alone) });
  for (let power = Math.ceil(floor / 2) * 2; power <= ceiling; power += 2) {
    const speed = 2 ** power;
    make("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(speed), y2: y(speed) }, svg);
    make("text", { class: "faint", x: LEFT - 7, y: y(speed) + 4, "text-anchor": "end" }, svg, speed >= 1 ? `${speed}×` : `1/${1 / speed}×`);
  }
  for (let workers = 1; workers <= most; workers *= 2) {
    make("text", { class: "faint", x: x(workers), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, svg, String(workers));
  }
  make("text", { class: "faint", x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, svg, "workers");
  make("path", { class: "ideal", d: `M${x(1)} ${y(1)}L${x(most)} ${y(most)}` }, svg);
  make("text", { class: "faint", x: x(most) - 74, y: y(most) + 12, "text-anchor": "end" }, svg, "ideal");
  for (const { entry } of [...rows].sort((a, b) => (a.entry.key === state.chosen) - (b.entry.key === state.chosen))) {
    const curve = curves.get(entry.key);
    if (!curve?.length) continue;
    const dash = entry.dash[1] ? entry.dash.join(" ") : "";
    const path = curve.map((one) => `${x(one.workers).toFixed(1)} ${y(one.samples_per_second / alone).toFixed(1)}`).join("L");
    const line = make("path", { class: entry.key === state.chosen ? "curve chosen" : "curve", d: `M${path}`, stroke: entry.colour, "stroke-dasharray": dash, "data-strategy": entry.key }, svg);
    make("title", {}, line, entry.name);
    for (const one of curve) {
      const dot = make("circle", { cx: x(one.workers), cy: y(one.samples_per_second / alone), r: 3, fill: entry.colour }, svg);
      make("title", {}, dot, `${entry.name}, ${one.workers} workers: ${text.count(one.samples_per_second)} samples/s`);
    }
  }
  const [name, last] = [rows.find(({ entry }) => entry.key === state.chosen)?.entry.name, curves.get(state.chosen)?.at(-1)];
  if (last) make("text", { class: "named", x: x(last.workers), y: y(last.samples_per_second / alone) - 9, "text-anchor": last.workers > most / 4 ? "end" : "middle" }, svg, name);
  place.replaceChildren(svg);
  document.getElementById("scaling-note").textContent = `Samples a second, as multiples of one worker that sends nothing (${text.count(alone)}; batches of ${menu.batch}). Colours and dashes are those beside the names; the thick curve is the chosen strategy.`;
};

const describe = (rows, curves, alone) => rows.map(({ entry }) => {
  const last = curves.get(entry.key)?.at(-1);
  return last ? `${entry.name}: ${last.workers} workers are ${(last.samples_per_second / alone).toPrecision(2)} times one` : "";
}).filter(Boolean).join("; ");

// Words

const UNHURRIED = new Set(["asynchronous", "pairs", "backup", "elastic"]); // nobody waits for the slowest
export const text = {
  count: (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(2)))),
  less: (ratio) => (ratio < 1.02 ? "hardly less" : `${Math.round(100 * (1 - 1 / ratio))} % less`),
  // The part of a step that the first of `known` saves most of, against the second.
  why: ({ entry, answer }, known, values) => {
    const next = known[1];
    const computing = answer.compute / answer.step;
    if (computing > 0.85) {
      const near = known.filter((row) => row.answer.step < 1.1 * answer.step).length;
      const alike = near > 1 ? ` ${near} of ${known.length} strategies are within 10 %.` : "";
      return `Why: computing takes ${Math.round(100 * computing)} % of its step, and what is sent hides behind it.${alike}`;
    }
    if (!next || next.answer.step < 1.02 * answer.step) return `Why: ${bytes(answer.bytes_sent)} leave each worker in a step, and no link carries more than others.`;
    const saved = ([kind]) => next.answer[kind] - answer[kind];
    const [kind] = [...PARTS].sort((a, b) => saved(b) - saved(a))[0];
    const less = `${seconds(Math.max(saved([kind]), 1e-6))} less in a step than with ${next.entry.name}`;
    if (kind === "compute") return `Why: a worker computes ${less}${entry.key === "sharded" ? ", since it updates its own shard of the parameters only" : ""}.`;
    if (kind === "wait") return `Why: a worker waits ${less}${values.slow >= 1.5 && UNHURRIED.has(entry.key) ? ", since nobody waits for the slow one" : ""}.`;
    const fewer = answer.bytes_sent < 0.95 * next.answer.bytes_sent ? `, since only ${bytes(answer.bytes_sent)} leave it, not ${bytes(next.answer.bytes_sent)}` : "";
    return `Why: a worker sends and receives for ${less}${fewer}.`;
  },
};
