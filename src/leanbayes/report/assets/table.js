// Sorts the rows of the summary table by any column; rows without a value always come last.
function sortRows(table, column, direction) {
  const body = table.tBodies[0];
  const sign = direction === "ascending" ? 1 : -1;
  const isText = column === 0;
  const key = (row) => {
    const order = row.cells[column].dataset.order;
    return isText ? order : order === "" ? null : Number(order);
  };
  const rows = [...body.rows].toSorted((a, b) => {
    const [first, second] = [key(a), key(b)];
    if (first === null || second === null) return (first === null) - (second === null);
    if (isText) return sign * first.localeCompare(second, "en", { numeric: true });
    return first === second ? 0 : first < second ? -sign : sign;
  });
  body.append(...rows);
}

function attachSorting(table) {
  const buttons = [...table.querySelectorAll("button.sort")];
  buttons.forEach((button, column) => {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const other = { ascending: "descending", descending: "ascending" };
      const direction = other[head.getAttribute("aria-sort")] ?? button.dataset.first;
      for (const one of buttons) one.closest("th").removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      sortRows(table, column, direction);
      speak.textContent = `Sorted by ${button.textContent.trim()}, ${direction}.`;
    });
  });
  attachTips(table.querySelectorAll("[title]"));
}
