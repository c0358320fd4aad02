// One step: who computes, sends, receives and waits, and the messages on their way.
import { bytes, keyOf, make, seconds } from "./figures.js";

const WIDTH = 520;
const HEIGHT = 430;
const LANES = 620;
const LABEL = 62;
const FRAME = 30; // milliseconds
const KINDS = [["compute", "computing"], ["send", "sending"], ["receive", "receiving"], ["wait", "waiting"], ["native", "exchanging"]];
const together = (words) => words.replaceAll("N - 1", "N\u00a0-\u00a01");
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  constructor(places) {
    this.places = places;
    this.part = 0; // of the step that has passed
    this.running = !still.matches;
    this.last = null;
    places.lanesKey.innerHTML = keyOf(KINDS.slice(0, 4));
    places.play.addEventListener("click", () => this.run(!this.running));
    places.moment.addEventListener("input", () => { this.run(false); this.part = places.moment.value / 1000; this.draw(); });
    this.run(this.running);
    const tick = (now) => {
      requestAnimationFrame(tick);
      if (this.last !== null && now - this.last < FRAME) return; // the simulation needs the processor, too
      if (this.running && this.course && this.last !== null) {
        this.part = (this.part + (now - this.last) / 1000 / Number(places.speed.value)) % 1;
        this.draw();
      }
      this.last = now;
    };
    requestAnimationFrame(tick);
  }

  run(on) {
    this.running = on;
    this.places.play.textContent = on ? "❚❚" : "▶";
    this.places.play.setAttribute("aria-label", on ? "Pause" : "Play");
  }

  show(course, entry, values) {
    const { places } = this;
    places.does.textContent = together(entry.does);
    places.pays.textContent = together(entry.pays);
    const what = entry.round > 1 ? `${entry.round} steps` : "One step";
    places.title.textContent = `${what}: ${entry.name}`;
    if (course.error) {
      this.course = null;
      places.network.replaceChildren();
      places.lanes.replaceChildren();
      places.networkNote.textContent = `Not possible: ${course.error}`;
      places.lanesNote.textContent = "";
      return;
    }
    this.course = course;
    this.part = this.running ? 0 : this.part;
    this.makeNetwork();
    this.makeLanes();
    const fewer = course.workers < values.workers ? `Shown with ${course.workers} workers, since nobody could follow the messages of ${values.workers}. ` : "";
    const drawn = course.every > 1 ? `; every ${course.every}th is drawn` : "";
    const size = course.messages.length ? Math.max(...course.messages.map((message) => message[4])) : 0;
    places.networkNote.textContent = `${fewer}${course.count} messages, ${bytes(course.bytes)} in all${drawn}. The largest have ${bytes(size)}; a dot leaves when a message is sent, and arrives when it has been taken in. All go through the switch in the middle.${course.ranks.some(({ role }) => role === "server") ? " A square is a server." : ""}`;
    places.lanesNote.textContent = "Upper half of a row: what the rank does itself; lower half: what is sent and received behind it. Click to go to a moment.";
    this.draw();
  }

  makeNetwork() {
    const { ranks, messages } = this.course;
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "ranks around a switch, and the messages between them" });
    const middle = (this.middle = { x: WIDTH / 2, y: HEIGHT / 2 });
    const size = ranks.length > 12 ? 15 : 19;
    this.at = ranks.map((_, rank) => {
      const angle = (2 * Math.PI * rank) / ranks.length - Math.PI / 2;
      return { x: middle.x + (middle.x - 34) * Math.cos(angle), y: middle.y + (middle.y - 28) * Math.sin(angle) };
    });
    for (const { x, y } of this.at) make("line", { class: "link", x1: x, y1: y, x2: middle.x, y2: middle.y }, svg);
    make("rect", { x: middle.x - 9, y: middle.y - 9, width: 18, height: 18, rx: 3, class: "c-idle node", stroke: "var(--soft)" }, svg);
    this.layer = make("g", {}, svg);
    this.dots = [];
    this.nodes = ranks.map(({ role }, rank) => {
      const { x, y } = this.at[rank];
      const group = make("g", { class: "node" }, svg);
      const shape = role === "server"
        ? make("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size, rx: 3 }, group)
        : make("circle", { cx: x, cy: y, r: size }, group);
      make("text", { x, y }, group, role === "server" ? `S${rank}` : String(rank));
      return shape;
    });
    const largest = Math.max(1, ...messages.map((message) => message[4]));
    this.radius = (size_) => 2.5 + 6 * Math.sqrt(size_ / largest);
    this.places.network.replaceChildren(svg);
  }

  makeLanes() {
    const { ranks, seconds: whole } = this.course;
    const row = ranks.length > 12 ? 20 : 28;
    const height = row * ranks.length + 26;
    const svg = make("svg", { viewBox: `0 0 ${LANES} ${height}`, role: "img", "aria-label": "what each rank does in the step, over time" });
    const x = (at) => LABEL + ((LANES - LABEL - 6) * at) / whole;
    ranks.forEach(({ role, main, behind }, rank) => {
      const top = row * rank;
      make("text", { class: "faint", x: LABEL - 8, y: top + row / 2 + 3, "text-anchor": "end" }, svg, `${role === "server" ? "server" : "rank"} ${rank}`);
      const lane = (spans, from, deep) => {
        const paths = {};
        for (const [begin, end, kind] of spans) {
          paths[kind] = `${paths[kind] ?? ""}M${x(begin).toFixed(2)} ${from}h${Math.max(x(end) - x(begin), 0.4).toFixed(2)}v${deep}H${x(begin).toFixed(2)}z`;
        }
        for (const kind of ["wait", "native", "compute", "send", "receive"]) if (paths[kind]) make("path", { class: `c-${kind}`, d: paths[kind] }, svg);
      };
      const deep = (row - 6) * 0.6;
      lane(main, top + 2, deep);
      lane(behind, top + 3 + deep, row - 7 - deep);
    });
    for (let tick = 0; tick <= 4; tick += 1) {
      const anchor = tick === 4 ? "end" : tick ? "middle" : "start";
      make("text", { class: "faint", x: x((whole * tick) / 4), y: height - 8, "text-anchor": anchor }, svg, tick ? seconds((whole * tick) / 4) : "0");
    }
    this.cursor = make("line", { class: "cursor", y1: 0, y2: height - 24 }, svg);
    this.x = x;
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * LANES;
      this.part = Math.min(1, Math.max(0, (place - LABEL) / (LANES - LABEL - 6)));
      this.draw();
    });
    this.places.lanes.replaceChildren(svg);
  }

  draw() {
    if (!this.course) return;
    const { ranks, messages, seconds: whole } = this.course;
    const now = this.part * whole;
    const { places } = this;
    places.moment.value = Math.round(this.part * 1000);
    places.now.textContent = `${seconds(now)} of ${seconds(whole)}`;
    places.moment.setAttribute("aria-valuetext", places.now.textContent);
    this.cursor.setAttribute("x1", this.x(now));
    this.cursor.setAttribute("x2", this.x(now));
    ranks.forEach(({ main, behind }, rank) => this.nodes[rank].setAttribute("class", `c-${doing(main, behind, now)}`));
    let used = 0;
    for (const [begin, end, source, target, size] of messages) {
      if (begin > now) break;
      if (end < now) continue;
      const dot = (this.dots[used] ??= make("circle", { class: "message c-send" }, this.layer));
      const { x, y } = this.along(source, target, end > begin ? (now - begin) / (end - begin) : 1);
      dot.setAttribute("cx", x.toFixed(1));
      dot.setAttribute("cy", y.toFixed(1));
      dot.setAttribute("r", this.radius(size).toFixed(1));
      dot.removeAttribute("display");
      used += 1;
    }
    for (const dot of this.dots.slice(used)) dot.setAttribute("display", "none");
    document.documentElement.dataset.travelling = String(used);
  }

  along(source, target, part) {
    const [a, b, c] = [this.at[source], this.at[target], this.middle];
    const bend = 0.65; // to the switch; all the way, and messages would lie on one another
    const via = { x: (1 - bend) * (a.x + b.x) / 2 + bend * c.x, y: (1 - bend) * (a.y + b.y) / 2 + bend * c.y };
    const [p, q, r] = [(1 - part) ** 2, 2 * part * (1 - part), part ** 2];
    return { x: p * a.x + q * via.x + r * b.x, y: p * a.y + q * via.y + r * b.y };
  }
}

const at = (spans, now) => spans.find(([begin, end]) => begin <= now && now < end)?.[2];

const doing = (main, behind, now) => {
  const own = at(main, now);
  return own && own !== "wait" ? own : at(behind, now) ?? own ?? "wait";
};
