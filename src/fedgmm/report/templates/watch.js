"use strict";
// Asks for the state of the run once a second and shows it; texts are set as text, never as markup.
(function () {
  const by = (id) => document.getElementById(id);
  const number = (value, digits = 0) => value == null ? "–" : value.toLocaleString(
    "en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const decimal = (value) => number(value, 4);
  const percent = (value) => value == null ? "–" : number(100 * value, 1) + "%";
  const size = (bytes) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    const power = bytes < 1000 ? 0 : Math.min(Math.floor(Math.log10(bytes) / 3), 4);
    return number(bytes / 1000 ** power, power ? 1 : 0) + " " + units[power];
  };
  const shown = {
    log_likelihood: decimal, validation_accuracy: percent, answered: number, bytes: size,
    epsilon: (value) => number(value, 3), seconds: (value) => number(value, 1),
  };
  const from_zero = ["answered", "bytes", "epsilon"];
  const titles = {
    log_likelihood: "log-likelihood", validation_accuracy: "accuracy", answered: "clients", bytes: "bytes",
    epsilon: "ε", seconds: "seconds",
  };
  const sentences = {
    waiting: "There is no run in this folder yet. The page waits for it.",
    preparing: "The run prepares: files are read and sizes are chosen. No round is finished yet.",
    training: "The run is training.",
    stopped: "No process works on the run: it was interrupted.",
    finished: "The run is finished.",
  };

  function fill(parent, tag, texts) {
    parent.replaceChildren(...texts.map((text) => {
      const one = document.createElement(tag);
      one.textContent = text;
      return one;
    }));
  }

  function lines(body, rows) {
    body.replaceChildren(...rows.map((cells) => {
      const row = document.createElement("tr");
      fill(row, "td", cells);
      return row;
    }));
  }

  function cards(values) {
    by("cards").replaceChildren(...values.map(([name, value, detail]) => {
      const card = document.createElement("div");
      card.className = "card";
      fill(card, "dt", [name]);
      const text = document.createElement("dd");
      const small = document.createElement("small");
      small.textContent = detail;
      text.append(value, small);
      card.append(text);
      return card;
    }));
  }

  function curve(key, history) {
    const points = history.filter((one) => one[key] != null);
    const panel = by(key);
    panel.hidden = !points.length || (key === "bytes" && !points.some((one) => one.bytes));
    if (panel.hidden) return;
    const values = points.map((one) => one[key]);
    const least = Math.min(...values), high = Math.max(...values);
    const low = from_zero.includes(key) ? 0 : least;  // otherwise a few bytes more would look like a jump
    const first = points[0].round, last = points[points.length - 1].round;
    const x = (one) => last > first ? 600 * (one.round - first) / (last - first) : 300;
    const y = (one) => high > low ? 170 - 160 * (one[key] - low) / (high - low) : 90;
    const drawn = points.length > 1 ? points : [{ ...points[0], round: first - 1 }, points[0]];
    const place = (one) => points.length > 1 ? x(one) : (one.round < first ? 280 : 320);
    panel.querySelector("polyline").setAttribute(
      "points", drawn.map((one) => place(one).toFixed(1) + "," + y(one).toFixed(1)).join(" "));
    const write = shown[key], now = write(values[values.length - 1]);
    const text = write(least) === write(high) ? `always ${now}` : `${write(least)} to ${write(high)}, now ${now}`;
    panel.querySelector("svg").setAttribute("aria-label", panel.querySelector("h2").textContent + ": " + text);
    fill(panel.querySelector(".ends"), "span", [`round ${first}`, text, `round ${last}`]);
  }

  function show(state) {
    const history = state.history, last = history[history.length - 1] || {};
    let sentence = sentences[state.status];
    if (state.status === "stopped") {
      sentence += state.federated
        ? " Start fedgmm server again with the same folder to resume it."
        : " Resume it with fedgmm resume.";
    }
    if (state.stopped) sentence += " It stopped early: " + state.stopped;
    if (state.test) sentence += " " + state.test;
    by("status").textContent = sentence;
    document.documentElement.dataset.status = state.status;
    by("progress").max = state.rounds || 1;
    by("progress").value = state.status === "finished" ? state.rounds || 1 : last.round || 0;
    const tiles = [
      ["Round", number(last.round || 0), state.rounds ? "of at most " + state.rounds : ""],
      ["Method", state.method || "–", state.method ? (state.federated ? "federation" : "one machine") : ""],
      ["Log-likelihood", number(last.log_likelihood, 3), "of training rows"],
      ["Time", last.seconds == null ? "–" : number(last.seconds, 1) + " s", "of all rounds"],
    ];
    if (last.validation_accuracy != null) tiles.push(["Accuracy", percent(last.validation_accuracy), "on validation rows"]);
    if (last.answered != null) tiles.push(["Replied", number(last.answered), "clients, last round"]);
    if (state.bytes) tiles.push(["Traffic", size(state.bytes), "to and from all clients"]);
    if (last.epsilon != null) tiles.push(["ε spent", number(last.epsilon, 3), state.budget ? "of " + state.budget : ""]);
    cards(tiles);
    Object.keys(shown).filter(by).forEach((key) => curve(key, history));
    by("clients").hidden = !state.clients.length;
    lines(by("clients").querySelector("tbody"), state.clients.map((one) =>
      [one.name, number(one.answered), number(one.last), size(one.bytes), one.problem || ""]));
    const keys = Object.keys(titles).filter((key) => last[key] != null && (key !== "bytes" || last.bytes));
    by("rounds").hidden = !history.length;
    fill(by("rounds").querySelector("thead tr"), "th", ["round", ...keys.map((key) => titles[key])]);
    lines(by("rounds").querySelector("tbody"), history.slice(-12).reverse().map((one) =>
      [number(one.round), ...keys.map((key) => one[key] == null ? "–" : shown[key](one[key]))]));
  }

  async function ask() {
    try {
      const reply = await fetch("/state");
      if (!reply.ok) throw new Error(String(reply.status));
      show(await reply.json());
    } catch (error) {
      by("status").textContent = "fedgmm watch has ended, so the page no longer changes.";
      document.documentElement.dataset.status = "gone";
    }
    setTimeout(ask, 1000);
  }
  ask();
})();
