"use strict";
// Draws the charts in the colours of the page, sorts and filters the table of clients.
(function () {
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const figures = JSON.parse(document.getElementById("figures").textContent);

  // ---------------------------------------------------------------- light and dark

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
  }

  // The layout's colours, as flat keys for Plotly.relayout.
  function colours(layout, printed = false) {
    const style = getComputedStyle(root);
    const paper = { "--ink": "#000", "--panel": "#fff", "--soft": "#444", "--line": "#ccc" };
    const of = (name) => printed ? paper[name] : style.getPropertyValue(name).trim();
    const changes = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": of("--ink"),
      "hoverlabel.bgcolor": of("--panel"),
      "hoverlabel.bordercolor": of("--soft"),
      "hoverlabel.font.color": of("--ink"),
      "modebar.bgcolor": "rgba(0,0,0,0)",
      "modebar.color": of("--soft"),
      "modebar.activecolor": of("--ink"),
    };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      changes[axis + ".gridcolor"] = of("--line");
      if (layout[axis].minor) changes[axis + ".minor.gridcolor"] = of("--line");
      changes[axis + ".zerolinecolor"] = of("--line");
      changes[axis + ".linecolor"] = of("--line");
    }
    if (layout.coloraxis) {
      changes["coloraxis.colorscale"] = isDark() && !printed
        ? [[0, "#23272f"], [0.5, "#3f63a8"], [1, "#cfe0ff"]]
        : [[0, "#f1f3f7"], [0.5, "#7fa3dc"], [1, "#12357a"]];
    }
    return changes;
  }

  // ---------------------------------------------------------------- charts

  const narrow = () => window.innerWidth < 600;

  function draw(key) {
    const chart = document.getElementById("chart-" + key);
    const { data, layout } = figures[key];
    // dragging a finger over a chart must scroll the page
    if (touch) layout.dragmode = false;
    if (narrow()) layout.font.size = 11;
    chart.style.height = layout.height + "px"; // otherwise a resized window would collapse it
    return Plotly.newPlot(chart, data, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch || narrow() ? false : "hover",
      modeBarButtons: [["toImage", "resetScale2d"]],
      showSendToCloud: false, // plotly would offer to upload the data
      plotlyServerURL: "",
    }).then(() => Plotly.relayout(chart, colours(layout)));
  }

  function recolour() {
    document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
    return Promise.all(Object.keys(figures).map((key) => {
      const chart = document.getElementById("chart-" + key);
      return Plotly.relayout(chart, colours(chart.layout));
    }));
  }

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    recolour();
  });
  prefersDark.addEventListener("change", recolour);

  // Paper is white, and narrower than most windows.
  window.addEventListener("beforeprint", () => {
    for (const key of Object.keys(figures)) {
      const chart = document.getElementById("chart-" + key);
      Plotly.relayout(chart, { ...colours(chart.layout, true), width: 680 });
    }
  });
  window.addEventListener("afterprint", () => {
    recolour();
    for (const key of Object.keys(figures)) {
      const height = document.getElementById("chart-" + key).layout.height;
      Plotly.relayout("chart-" + key, { width: null, height, autosize: true });
    }
  });
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";

  // ---------------------------------------------------------------- table

  const table = document.getElementById("table");
  const body = table.tBodies[0];
  const heads = Array.from(table.tHead.rows[0].cells);
  const rows = Array.from(body.rows);
  const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  function sortBy(column) {
    const head = heads[column];
    const down = head.getAttribute("aria-sort") === "ascending";
    const text = head.dataset.kind === "text";
    const keyed = rows.map((row) => {
      const shown = row.cells[column].textContent;
      return { row, key: text ? shown : parseFloat(shown.replace(/,/g, "")) };
    });
    keyed.sort((a, b) => {
      // unknown values come last in either direction
      if (!text && (isNaN(a.key) || isNaN(b.key))) return isNaN(a.key) - isNaN(b.key);
      const order = text ? words.compare(a.key, b.key) : a.key - b.key;
      return down ? -order : order;
    });
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...keyed.map((one) => one.row));
  }

  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sortBy(column));
  });

  const filter = document.getElementById("filter");
  const haystacks = rows.map((row) =>
    Array.from(row.cells, (cell) => cell.textContent).join("\t").toLowerCase());

  filter.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase();
    let left = 0;
    rows.forEach((row, index) => {
      row.hidden = !haystacks[index].includes(wanted);
      if (!row.hidden) left += 1;
    });
    const all = rows.length.toLocaleString("en");
    document.getElementById("count").textContent =
      wanted ? `${left.toLocaleString("en")} of ${all} clients` : `${all} clients`;
  });

  Promise.all(Object.keys(figures).map(draw)).then(() => { root.dataset.drawn = "yes"; });
})();
