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

// Shows only the main columns, or all of them. A group without a visible column has no header.
function attachColumns(table) {
  const button = document.getElementById("columns");
  const groups = [...table.querySelectorAll("[data-group]")];
  const heads = [...table.querySelectorAll("th[data-of]")];
  const all = button?.textContent;
  const show = (every) => {
    table.classList.toggle("all", every);
    for (const group of groups) {
      const own = heads.filter((head) => head.dataset.of === group.dataset.group);
      const count = own.filter((head) => every || !head.classList.contains("more")).length;
      group.hidden = count === 0;
      group.colSpan = Math.max(count, 1);
    }
    if (button) button.textContent = every ? "Main columns" : all;
    cueScrolling(table);
  };
  button?.addEventListener("click", () => show(!table.classList.contains("all")));
  show(!button);
  new ResizeObserver(() => cueScrolling(table)).observe(table.parentElement);
  table.parentElement.addEventListener("scroll", () => cueScrolling(table), { passive: true });
}

// Says that the table is wider than its box, and where it continues.
function cueScrolling(table) {
  const box = table.parentElement;
  const rest = box.scrollWidth - box.clientWidth;
  box.classList.toggle("continues", rest - box.scrollLeft > 2);
  box.nextElementSibling.hidden = rest <= 2;
}
