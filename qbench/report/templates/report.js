"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const show = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    theme.setAttribute("aria-pressed", String(dark));
    theme.textContent = dark ? "Light" : "Dark";
    theme.setAttribute("aria-label", dark ? "Switch to light colours" : "Switch to dark colours");
  };
  const asked = new URLSearchParams(location.search).get("theme");
  show(asked ? asked === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  theme.addEventListener("click", () => show(root.dataset.theme !== "dark"));

  const key = (cell) => {
    if (cell.dataset.sort !== undefined) return Number(cell.dataset.sort);
    return cell.classList.contains("number") ? NaN : cell.textContent.trim(); // "failed", "—"
  };
  const isNothing = (value) => value === "" || value === "—" || Number.isNaN(value);
  const order = (a, b) =>
    typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });

  for (const data of document.querySelectorAll(".data")) {
    const body = data.querySelector("tbody");
    const rows = [...body.rows];
    const heads = [...data.querySelectorAll("thead th")];

    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const sorted = rows
          .map((row, index) => ({ row, index, value: key(row.cells[column]) }))
          .sort((a, b) => {
            const empty = isNothing(a.value) - isNothing(b.value); // always last
            if (empty) return empty;
            return (down ? -1 : 1) * order(a.value, b.value) || a.index - b.index;
          });
        body.append(...sorted.map((entry) => entry.row));
      });
    });

    const input = data.querySelector("input");
    const output = data.querySelector("output");
    const texts = rows.map((row) =>
      [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => texts[index].includes(word));
        if (!row.hidden) shown += 1;
      });
      output.textContent = `${shown} of ${rows.length} rows`;
    });
  }
})();
