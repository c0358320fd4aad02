"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const views = [];
  const hidden = new Set();
  const night = matchMedia("(prefers-color-scheme: dark)");
  const tell = (name, value) => Promise.all(views.map((view) => view.signal(name, value).runAsync()));

  const draw = async (place, spec) => {
    const plot = place.querySelector(".plot");
    try {
      const options = { renderer: "svg", actions: false, tooltip: { theme: night.matches ? "dark" : "light" } };
      const { view } = await vegaEmbed(plot, spec, options);
      views.push(view.signal("dark", night.matches));
      await view.runAsync();
      place.dataset.drawn = "true";
    } catch (error) {
      plot.textContent = `This figure could not be drawn: ${error.message}`;
      plot.classList.add("error");
    }
  };

  const specs = JSON.parse(document.getElementById("orchestra-figures").textContent);
  const drawn = all("[data-figure]").map((place) => draw(place, specs[place.dataset.figure]));
  Promise.all(drawn).then(() => { document.documentElement.dataset.ready = "true"; });

  night.addEventListener("change", () => tell("dark", night.matches));
  addEventListener("beforeprint", () => {
    tell("dark", false);
    all("details").forEach((part) => { part.open = true; });
  });
  addEventListener("afterprint", () => tell("dark", night.matches));

  all(".chips button").forEach((chip) => chip.addEventListener("click", () => {
    const shown = chip.getAttribute("aria-pressed") === "true";
    chip.setAttribute("aria-pressed", String(!shown));
    JSON.parse(chip.dataset.rows).forEach((name) => (shown ? hidden.add(name) : hidden.delete(name)));
    tell("hidden", [...hidden]);
  }));

  const valueOf = (row, column) => {
    const value = row.cells[column].dataset.value;
    return value === undefined ? null : Number(value);
  };
  const sort = (title) => {
    const column = title.cellIndex;
    const body = title.closest("table").tBodies[0];
    const first = title.dataset.rising === "true" ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = title.getAttribute("aria-sort") === first ? other : first;
    all("th", title.parentElement).forEach((one) => one.removeAttribute("aria-sort"));
    title.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      const [left, right] = [valueOf(a, column), valueOf(b, column)];
      if (left === null || right === null) return (left === null) - (right === null);
      return sign * (left - right);
    };
    body.append(...[...body.rows].sort(compare));
  };
  all(".results thead button").forEach((button) => {
    button.addEventListener("click", () => sort(button.closest("th")));
  });

  // Perfetto answers PING with PONG once it can take a trace: https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui
  const PERFETTO = "https://ui.perfetto.dev";
  const open = (button) => {
    const trace = Uint8Array.from(atob(button.dataset.trace), (letter) => letter.charCodeAt(0));
    const other = window.open(PERFETTO);
    if (!other) return;
    const ask = setInterval(() => (other.closed ? clearInterval(ask) : other.postMessage("PING", PERFETTO)), 100);
    const answered = (event) => {
      if (event.source !== other || event.data !== "PONG") return;
      clearInterval(ask);
      removeEventListener("message", answered);
      other.postMessage({ perfetto: { buffer: trace.buffer, title: button.dataset.title } }, PERFETTO);
    };
    addEventListener("message", answered);
  };
  all("[data-trace]").forEach((button) => button.addEventListener("click", () => open(button)));
})();
