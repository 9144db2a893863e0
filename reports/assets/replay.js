
"use strict";
// Views as tabs, and close looks that take the focus and give it back. Comfort, all of it.
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const made = (name, attributes, text) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };

  let number = 0;
  all("[data-tabs]").forEach((box) => {
    const views = all(":scope > .tab", box);
    const list = made("div", { role: "tablist", "aria-label": box.dataset.tabs }, "");
    const tabs = views.map((view) => {
      number += 1;
      view.id = view.id || `view-${number}`;
      view.setAttribute("role", "tabpanel");
      const tab = made("button", { type: "button", role: "tab", id: `tab-${number}`, "aria-controls": view.id }, view.querySelector("h3").textContent);
      view.setAttribute("aria-labelledby", tab.id);
      view.removeAttribute("aria-label");
      return tab;
    });
    const choose = (chosen) => tabs.forEach((tab, index) => {
      tab.setAttribute("aria-selected", String(index === chosen));
      tab.tabIndex = index === chosen ? 0 : -1;
      views[index].classList.toggle("away", index !== chosen);
    });
    tabs.forEach((tab, index) => {
      tab.addEventListener("click", () => choose(index));
      tab.addEventListener("keydown", (event) => {
        const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        const next = (to + tabs.length) % tabs.length;
        choose(next);
        tabs[next].focus();
      });
    });
    list.append(...tabs);
    box.prepend(list);
    box.classList.add("tabbed");
    choose(0);
  });

  // Pictures: a click, or the button for the keyboard, makes one larger and small again.
  all("[data-zoom]").forEach((figure) => {
    const name = figure.dataset.zoom;
    const button = made("button", { type: "button", class: "zoom", "aria-pressed": "false", "aria-label": `Larger: ${name}` }, "Larger");
    const toggle = () => {
      const large = figure.classList.toggle("zoomed");
      button.setAttribute("aria-pressed", String(large));
      button.textContent = large ? "Smaller" : "Larger";
    };
    button.addEventListener("click", toggle);
    figure.querySelector("svg.matrix").addEventListener("click", toggle);
    figure.querySelector("figcaption").append(button);
  });

  // What a cell is about, where the pointer rests on it.
  all("table.judged tbody").forEach((body) => body.addEventListener("pointerover", (event) => {
    const cell = event.target.closest("td");
    if (!cell || "named" in cell.dataset) return;
    cell.dataset.named = "";
    const table = cell.closest("table");
    const [row, column] = [cell.parentElement.cells[0], table.tHead.rows[0].cells[cell.cellIndex]];
    cell.title = `${row.textContent}, ${column.textContent}: ${cell.textContent}${cell.title && `; ${cell.title}`}`;
  }));

  // A look that is asked for has the focus; Escape, or the link back, returns to its cell.
  const asked = () => location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const cellsOf = (look) => all("table.judged a").filter((link) => link.hash === `#${look.id}`);
  const show = () => {
    all("td.asked").forEach((cell) => cell.classList.remove("asked"));
    const look = asked();
    if (!look || !look.matches(".look")) return;
    cellsOf(look).forEach((link) => link.closest("td").classList.add("asked"));
    look.focus({ preventScroll: true });
  };
  addEventListener("hashchange", show);
  const back = (event) => {
    const look = event.target.closest && event.target.closest(".look");
    if (!look) return;
    if (event.type === "keydown" ? event.key !== "Escape" : !event.target.matches(".back")) return;
    const link = cellsOf(look).find((each) => each.checkVisibility()) || null;
    if (!link) return;
    event.preventDefault();
    link.focus({ preventScroll: true });
    link.scrollIntoView({ block: "center" });
  };
  document.addEventListener("keydown", back);
  document.addEventListener("click", back);
  show();
})();
