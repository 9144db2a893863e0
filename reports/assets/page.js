
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

  // Sorting: each column head becomes a button; the first click puts the largest number first.
  const key = (row, column, numeric) => {
    const cell = row.cells[column];
    if (!numeric) return cell.textContent.trim();
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
    for (; place; place = place.parentElement) if (place.tagName === "DETAILS") place.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
  addEventListener("beforeprint", () => all("details").forEach((fold) => { fold.open = true; }));
})();
