// Keeps numbers on one line, and sorts a table by the column whose head is clicked: numbers by their value, "85.1 ± 1.3" by 85.1, words by the alphabet.
document.addEventListener("DOMContentLoaded", () => {
  const value = row => { const text = row.textContent.trim(); const number = parseFloat(text.replace(/,/g, "").replace("−", "-")); return [Number.isNaN(number), number, text]; };
  const compare = (a, b) => a[0] !== b[0] ? a[0] - b[0] : a[0] ? a[2].localeCompare(b[2]) : b[1] - a[1];
  document.querySelectorAll("article td").forEach(cell => { if (/^[−+-]?\d/.test(cell.textContent.trim())) cell.style.whiteSpace = "nowrap"; });
  document.querySelectorAll("article table").forEach(table => table.querySelectorAll("thead th").forEach((head, column) => {
    head.style.cursor = "pointer";
    head.tabIndex = 0;
    head.title = "sort by this column";
    const sort = () => {
      const up = head.getAttribute("aria-sort") === "descending";
      table.querySelectorAll("thead th").forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a.cells[column]), value(b.cells[column])) * (up && !value(a.cells[column])[0] && !value(b.cells[column])[0] ? -1 : 1));
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  }));
});
