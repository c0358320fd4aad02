// What is chosen, what is asked, and who draws it. The state is in the address.
import { drawBars, drawScaling, text, seconds } from "./figures.js";
import { Player } from "./player.js";

const $ = (id) => document.getElementById(id);
const page = crypto.randomUUID();
const WAIT = 60; // milliseconds between a movement of a control and the question

const amount = (value, units) => {
  const [unit, size] = units.findLast(([, size]) => value >= size * 0.9995) ?? units[0];
  return `${Number((value / size).toPrecision(3))} ${unit}`;
};
const CONTROLS = [
  { name: "megabytes", label: "Model", log: true, show: (v) => amount(v, [["kB", 1e-3], ["MB", 1], ["GB", 1000]]) },
  { name: "workers", label: "Workers", log: true, whole: true, show: (v) => String(v) },
  { name: "megabits", label: "Bandwidth", log: true, show: (v) => amount(v, [["Mbit/s", 1], ["Gbit/s", 1000]]) },
  { name: "latency_us", label: "Latency, one way", log: true, show: (v) => amount(v, [["µs", 1], ["ms", 1000]]) },
  { name: "compute_ms", label: "Compute, a batch", log: true, show: (v) => amount(v, [["ms", 1], ["s", 1000]]) },
  { name: "slow", label: "Slowest worker", log: true, show: (v) => (v === 1 ? "as the others" : `takes ${Number(v.toPrecision(2))} ×`) },
  { name: "variation", label: "Compute varies by", show: (v) => `± ${v} %` },
];
const STEPS = 100; // of a slider

let menu;
const state = { values: {}, shown: new Set(), chosen: "ring" };
let answers = new Map(); // "strategy workers" -> answer
const before = new Map(); // what was shown last of each strategy, until the new answer is there
let asking = null;
let timer = 0;

const keyOf = (strategy, workers) => `${strategy} ${workers}`;
const entries = () => menu.strategies.filter((entry) => state.shown.has(entry.key));

// Sliders

const rounded = (value) => Number(value.toPrecision(2));
const valueAt = (control, place) => {
  const { low, high } = menu.controls[control.name];
  const part = place / STEPS;
  const raw = control.log ? low * (high / low) ** part : low + (high - low) * part;
  if (place === STEPS) return high;
  return control.whole || !control.log ? Math.round(raw) : Math.min(high, Math.max(low, rounded(raw)));
};
const placeOf = (control, value) => {
  const { low, high } = menu.controls[control.name];
  const part = control.log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  return Math.round(part * STEPS);
};

const makeSliders = () => {
  for (const control of CONTROLS) {
    const { name, label } = control;
    const box = document.createElement("div");
    box.className = "slider";
    box.innerHTML = `<label for="${name}">${label} <output for="${name}"></output></label>
      <input type="range" id="${name}" min="0" max="${STEPS}" step="1">`;
    const input = box.querySelector("input");
    input.title = menu.controls[name].meaning;
    input.addEventListener("input", () => {
      let value = valueAt(control, Number(input.value));
      if (value === state.values[name]) { // whole numbers: several places stand for one
        const old = placeOf(control, value);
        value = Math.min(menu.controls[name].high, Math.max(menu.controls[name].low, value + Math.sign(input.value - old)));
      }
      state.values[name] = value;
      showValues();
      changed();
    });
    $("sliders").append(box);
  }
};

const showValues = () => {
  for (const control of CONTROLS) {
    const input = $(control.name);
    const value = state.values[control.name];
    const words = control.show(value);
    input.value = placeOf(control, value);
    input.setAttribute("aria-valuetext", words);
    input.parentElement.querySelector("output").textContent = words;
  }
};

const makeChips = () => {
  for (const entry of menu.strategies) {
    const label = document.createElement("label");
    label.innerHTML = `<input type="checkbox" value="${entry.key}">
      <svg viewBox="0 0 26 8" aria-hidden="true"><line x1="0" y1="4" x2="26" y2="4" stroke="${entry.colour}" stroke-width="3" stroke-dasharray="${entry.dash[1] ? entry.dash.join(" ") : ""}"/></svg>
      <span></span>`;
    label.querySelector("span").textContent = entry.name;
    label.querySelector("input").addEventListener("change", (event) => {
      if (event.target.checked) state.shown.add(entry.key);
      else if (state.shown.size > 1) state.shown.delete(entry.key);
      else event.target.checked = true;
      if (!state.shown.has(state.chosen)) state.chosen = [...state.shown][0];
      changed();
    });
    $("chosen").append(label);
  }
};

// The address

const start = () => {
  for (const { name } of CONTROLS) state.values[name] = menu.controls[name].default;
  state.shown = new Set(menu.strategies.filter((entry) => entry.shown).map((entry) => entry.key));
  state.chosen = "ring";
};
const readAddress = () => {
  start();
  const given = new URLSearchParams(location.hash.slice(1));
  for (const { name, whole } of CONTROLS) {
    const { low, high } = menu.controls[name];
    const value = Number(given.get(name));
    if (given.has(name) && value >= low && value <= high) state.values[name] = whole ? Math.round(value) : value;
  }
  const keys = menu.strategies.map((entry) => entry.key);
  const shown = (given.get("shown") ?? "").split(" ").filter((key) => keys.includes(key));
  if (shown.length) state.shown = new Set(shown);
  if (keys.includes(given.get("chosen"))) state.chosen = given.get("chosen");
  if (!state.shown.has(state.chosen)) state.chosen = [...state.shown][0];
};
const showState = () => {
  showValues();
  for (const box of $("chosen").querySelectorAll("input")) box.checked = state.shown.has(box.value);
};
const writeAddress = () => {
  const told = new URLSearchParams(state.values);
  told.set("shown", [...state.shown].join(" "));
  told.set("chosen", state.chosen);
  history.replaceState(null, "", `#${told}`);
};

// Questions

const changed = () => {
  writeAddress();
  clearTimeout(timer);
  timer = setTimeout(ask, WAIT);
};
const query = (strategies) => new URLSearchParams({ ...state.values, strategies, page });

const ask = async () => {
  asking?.abort();
  const mine = (asking = new AbortController());
  answers = new Map();
  try {
    const strategies = entries().map((entry) => entry.key).join(",");
    const watching = watch(mine.signal);
    const response = await fetch(`api/steps?${query(strategies)}`, { signal: mine.signal });
    if (!response.ok) throw new Error(await response.text());
    await readLines(response.body, mine);
    await watching;
  } catch (error) {
    if (mine.signal.aborted) return;
    $("status").textContent = `The studio does not answer: ${error.message}`;
  }
};

const readLines = async (body, mine) => {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let total = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done || mine.signal.aborted) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map(JSON.parse)) {
      if ("error" in line) throw new Error(line.error);
      if ("total" in line) ({ total } = line);
      else answers.set(keyOf(line.strategy, line.workers), line);
    }
    draw(total);
  }
};

const watch = async (signal) => {
  const response = await fetch(`api/course?${query(state.chosen)}`, { signal });
  if (response.status === 409) return;
  if (!response.ok) throw new Error(await response.text());
  player.show(await response.json(), menu.strategies.find((entry) => entry.key === state.chosen), state.values);
  document.documentElement.dataset.course = state.chosen;
};

const choose = (key) => {
  state.chosen = key;
  writeAddress();
  draw();
  asking ??= new AbortController();
  watch(asking.signal).catch(() => {});
};

// Drawing

let scheduled = 0;
let latest = 0;
const draw = (total = latest) => {
  latest = total;
  cancelAnimationFrame(scheduled);
  scheduled = requestAnimationFrame(() => {
    const { workers } = state.values;
    const rows = entries().map((entry) => {
      const key = keyOf(entry.key, workers);
      if (answers.has(key)) before.set(entry.key, answers.get(key));
      return { entry, answer: before.get(entry.key), late: !answers.has(key) };
    });
    const here = rows.filter((row) => !row.late).length;
    drawBars($("bars"), rows, state.chosen, choose);
    drawScaling($("scaling"), rows, curves(), state, menu);
    tell(rows, here);
    $("progress").hidden = answers.size === total;
    $("progress").value = total ? answers.size / total : 0;
    const many = workers > 16 ? ` With ${workers} workers a strategy may take some seconds.` : "";
    $("status").textContent = answers.size < total ? `${answers.size} of ${total} simulations.${here < rows.length ? many : ""}` : `${total} simulations done.`;
    document.documentElement.dataset.ready = String(total > 0 && answers.size === total);
    document.documentElement.dataset.bars = String(here === rows.length);
  });
};

const curves = () => new Map(entries().map((entry) => [
  entry.key,
  [...answers.values()].filter((one) => one.strategy === entry.key && one.step).sort((a, b) => a.workers - b.workers),
]));

const tell = (rows, here) => {
  const known = rows.filter((row) => row.answer?.step && !row.late).sort((a, b) => a.answer.step - b.answer.step);
  if (here < rows.length || !known.length) return;
  const { values } = state;
  const [best, next] = known;
  const ideal = (values.workers * menu.batch) / (values.compute_ms / 1000);
  const part = best.answer.samples_per_second / ideal;
  const lead = next ? `, ${text.less(next.answer.step / best.answer.step)} than ${next.entry.name}` : "";
  $("answer").textContent = `Fastest here: ${best.entry.name}, ${seconds(best.answer.step)} a step${lead}.`;
  const exact = best.entry.exact ? null : known.find((row) => row.entry.exact);
  const worth = exact ? ` But a step of it may teach less than one on the whole batch; of those where it teaches as much, the fastest is ${exact.entry.name}, ${seconds(exact.answer.step)}.` : "";
  const worse = part * values.workers < 1 ? " One worker alone would be faster." : "";
  $("why").textContent = `${text.why(best, known, values)}${worth} The ${values.workers} workers do ${text.count(best.answer.samples_per_second)} samples a second, ${Math.round(part * 100)} % of what they would if nobody sent anything.${worse}`;
};

// Begin

const player = new Player({
  network: $("network"), lanes: $("lanes"), play: $("play"), moment: $("moment"), now: $("now"), speed: $("speed"),
  does: $("does"), pays: $("pays"), title: $("course-title"), networkNote: $("network-note"), lanesNote: $("lanes-note"), lanesKey: $("lanes-key"),
});
$("reset").addEventListener("click", () => { start(); showState(); changed(); });
$("share").addEventListener("click", async () => {
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  $("share").textContent = "Copied";
  setTimeout(() => { $("share").textContent = "Copy the address"; }, 1500);
});
addEventListener("hashchange", () => { readAddress(); showState(); changed(); });
menu = await (await fetch("api/menu")).json();
makeSliders();
makeChips();
readAddress();
showState();
writeAddress();
ask();
