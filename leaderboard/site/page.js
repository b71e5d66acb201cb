// The theme, sorting and filtering. The page is whole without it.
"use strict";
(() => {
  const root = document.documentElement;
  const stored = (value) => {  // a browser may refuse storage to files
    try {
      if (value !== undefined) localStorage.setItem("theme", value);
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  };
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  root.classList.add("js");

  const label = (button) => {
    button.textContent = dark() ? "Light theme" : "Dark theme";
    button.setAttribute("aria-label", `Change to the ${dark() ? "light" : "dark"} theme`);
  };

  const value = (row, column) => {
    const cell = row.cells[column];
    const said = cell.dataset.sort ?? cell.textContent.trim();
    return said !== "" && !Number.isNaN(Number(said)) ? Number(said) : said;
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true}));

  // Ascending, then descending; a row without a value is last either way.
  const sort = (button) => {
    const head = button.closest("th"), table = button.closest("table"), column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows].map((row) => ({row, value: value(row, column)}));
    rows.sort((a, b) => (a.value === "" ? 1 : 0) - (b.value === "" ? 1 : 0) || (down ? -1 : 1) * order(a.value, b.value));
    table.tBodies[0].append(...rows.map(({row}) => row));
  };

  const filter = (field) => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.getElementById(field.dataset.table).tBodies[0].rows];
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const shown = rows.filter((row) => !row.hidden).length;
    field.closest(".tools").querySelector(".count").textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  };

  // A link to a row within a closed part opens that part.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let part = target?.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    if (target?.closest("details")) target.scrollIntoView();
  };

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    label(button);
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      stored(root.dataset.theme);
      label(button);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => label(button));
    for (const one of document.querySelectorAll("button.sort")) one.addEventListener("click", () => sort(one));
    for (const field of document.querySelectorAll("input[type=search]")) field.addEventListener("input", () => filter(field));
    addEventListener("hashchange", reveal);
    reveal();
  });
})();
