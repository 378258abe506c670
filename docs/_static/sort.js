// Keeps numbers on one line, and sorts a table by the column whose head is clicked: numbers by their value, "85.1 ± 1.3" by 85.1, words by the alphabet.
// A table of results that is long begins with its best rows, another that is very long with its first; a button shows the others.
document.addEventListener("DOMContentLoaded", () => {
  const OPEN_ROWS = 12;
  const LONG = 20;
  const VERY_LONG = 60;
  const isNumber = cell => /^[−+-]?\d/.test(cell.textContent.trim());
  const value = row => { const text = row.textContent.trim(); const number = parseFloat(text.replace(/,/g, "").replace("−", "-")); return [Number.isNaN(number), number, text]; };
  const compare = (a, b) => a[0] !== b[0] ? a[0] - b[0] : a[0] ? a[2].localeCompare(b[2]) : b[1] - a[1];
  const isOfResults = rows => [...rows[0].cells].slice(1).every((_, column) => rows.filter(row => isNumber(row.cells[column + 1])).length > rows.length / 2);
  const LONGEST_NUMBER = 40;  // "81.3 ± 1.6 ↗ ⊣ (best simple)"; longer is a sentence that begins with a number
  document.querySelectorAll("article td").forEach(cell => { if (isNumber(cell) && cell.textContent.trim().length <= LONGEST_NUMBER) cell.style.whiteSpace = "nowrap"; });
  document.querySelectorAll("article table").forEach(table => {
    let isFolded = false;
    const fold = () => [...table.tBodies[0].rows].forEach((row, place) => { row.hidden = isFolded && place >= OPEN_ROWS; });
    const sort = (head, column) => {
      const up = head.getAttribute("aria-sort") === "descending";
      table.querySelectorAll("thead th").forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a.cells[column]), value(b.cells[column])) * (up && !value(a.cells[column])[0] && !value(b.cells[column])[0] ? -1 : 1));
      table.tBodies[0].append(...rows);
      fold();
    };
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, column) => {
      head.style.cursor = "pointer";
      head.tabIndex = 0;
      head.title = "sort by this column";
      head.addEventListener("click", () => sort(head, column));
      head.addEventListener("keydown", event => { if (event.key === "Enter") sort(head, column); });
    });
    const rows = [...table.tBodies[0].rows];
    const ofResults = rows.length >= LONG && isOfResults(rows);
    if (table.closest("details") || !(ofResults || rows.length >= VERY_LONG)) return;
    isFolded = true;
    if (ofResults) sort(heads[1], 1); else fold();
    const button = document.createElement("button");
    button.className = "all-rows";
    button.textContent = `Show all ${rows.length} rows`;
    button.addEventListener("click", () => { isFolded = false; fold(); button.remove(); });
    (table.closest(".table-wrapper") || table).after(button);
  });
});
