
"use strict";
// Everything here is comfort: without it the page says the same.
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));

  // Theme: as the system, light, dark.
  const theme = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  let current = 0;
  const showTheme = () => {
    const name = themes[current];
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
  };
  theme.hidden = false;
  theme.addEventListener("click", () => { current = (current + 1) % themes.length; showTheme(); });
  showTheme();

  // What a cell says at first sight: of a fold its summary.
  const words = (cell) => (cell.querySelector("summary") || cell).textContent.trim();

  // Sorting: each column head becomes a button; the first click puts the largest number first.
  const key = (row, column, numeric) => {
    const cell = row.cells[column];
    if (!numeric) return words(cell);
    return "value" in cell.dataset ? pythonNumber(cell.dataset.value) : NaN;
  };
  const pythonNumber = (text) => (text === "inf" ? Infinity : text === "-inf" ? -Infinity : Number(text));
  const before = (a, b, numeric) => {
    if (!numeric) return a.localeCompare(b, "en", { numeric: true });
    return a < b ? -1 : a > b ? 1 : 0;
  };
  const sort = (head) => {
    const table = head.closest("table");
    const numeric = head.dataset.sort === "number";
    const first = numeric ? "descending" : "ascending";
    const other = numeric ? "ascending" : "descending";
    const order = head.getAttribute("aria-sort") === first ? other : first;
    all("th[aria-sort]", table).forEach((th) => th.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => [key(row, head.cellIndex, numeric), row]);
    const missing = (value) => numeric && Number.isNaN(value);
    rows.sort(([a], [b]) => (
      missing(a) || missing(b) ? missing(a) - missing(b) : sign * before(a, b, numeric)
    ));
    body.append(...rows.map(([, row]) => row));
  };
  all("th[data-sort]").forEach((head) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sorter";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head));
    head.append(button);
  });

  // Filtering: a search field over each catalogue, and a choice for each column that offers one.
  const filters = [];
  const made = (name, attributes, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  all("[data-filter]").forEach((box) => {
    const table = box.querySelector("table");
    const rows = Array.from(table.tBodies[0].rows);
    if (rows.length < 2) return;
    const search = made("input", { type: "search", "aria-label": `Filter: ${box.dataset.filter}` });
    const count = made("span", { class: "count", "aria-live": "polite" });
    const choices = all("th[data-choose]", table).map((head) => {
      const column = head.cellIndex;
      const name = words(head);
      const known = new Set(rows.map((row) => words(row.cells[column])));
      const options = Array.from(known).sort((a, b) => before(a, b, false));
      const select = made("select", { "aria-label": `Show only: ${name}` }, made("option", { value: "" }, `${name}: all`));
      options.forEach((text) => select.append(made("option", { value: text }, text)));
      return { column, select };
    });
    const apply = () => {
      const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row) => {
        const fits = choices.every(({ column, select }) => !select.value || words(row.cells[column]) === select.value);
        const text = fits && wanted.length ? row.textContent.toLowerCase() : "";
        row.hidden = !(fits && wanted.every((word) => text.includes(word)));
        shown += row.hidden ? 0 : 1;
      });
      count.textContent = shown === rows.length ? `${rows.length} shown` : `${shown} of ${rows.length} shown`;
    };
    const clear = () => {
      search.value = "";
      choices.forEach(({ select }) => { select.value = ""; });
      apply();
    };
    [search, ...choices.map(({ select }) => select)].forEach((field) => field.addEventListener("input", apply));
    box.prepend(made("div", { class: "tools", role: "search" }, made("label", {}, "Filter ", search), ...choices.filter(({ select }) => select.length > 2).map(({ select }) => select), count));
    filters.push({ box, clear });
    apply();
  });

  // Copying.
  all("[data-copy]").forEach((box) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy: ${box.dataset.copy}`);
    button.addEventListener("click", async () => {
      const code = box.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    box.append(button);
  });

  // Heat maps: one stop for Tab, arrow keys inside.
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  all("table.heat").forEach((table) => {
    const links = all("a", table);
    links.forEach((link, index) => { link.tabIndex = index ? -1 : 0; });
    table.addEventListener("keydown", (event) => {
      const move = step[event.key];
      const cell = event.target.closest("td");
      if (!move || !cell) return;
      let row = cell.parentElement.rowIndex;
      let column = cell.cellIndex;
      for (;;) {
        row += move[0];
        column += move[1];
        const next = table.rows[row] && table.rows[row].cells[column];
        if (!next) return;
        const link = next.querySelector("a");
        if (!link) continue;
        event.preventDefault();
        links.forEach((other) => { other.tabIndex = -1; });
        link.tabIndex = 0;
        link.focus();
        return;
      }
    });
  });

  // What is pointed at, or printed, is unfolded.
  const unfold = () => {
    let place = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const target = place;
    if (target && target.closest("tr[hidden]")) filters.filter(({ box }) => box.contains(target)).forEach(({ clear }) => clear());
    for (; place; place = place.parentElement) if (place.tagName === "DETAILS") place.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  unfold();
  addEventListener("beforeprint", () => all("details").forEach((fold) => { fold.open = true; }));
})();
