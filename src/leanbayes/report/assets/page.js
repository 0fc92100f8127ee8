// Sets up the page: the selected methods, the theme, and every figure at its width.
const hidden = new Set();

function applyPicker(views) {
  for (const node of document.querySelectorAll("[data-method]")) {
    if (!(node instanceof SVGElement)) node.hidden = hidden.has(Number(node.dataset.method));
  }
  document.getElementById("all").hidden = hidden.size === 0;
  for (const view of views) view.show(hidden);
}

function attachPicker(views) {
  const picker = document.getElementById("picker");
  if (!picker) return;
  picker.addEventListener("change", ({ target }) => {
    if (target.checked) hidden.delete(Number(target.value));
    else hidden.add(Number(target.value));
    applyPicker(views);
  });
  document.getElementById("all").addEventListener("click", () => {
    for (const box of picker.querySelectorAll("input")) box.checked = true;
    hidden.clear();
    picker.querySelector("input").focus();
    applyPicker(views);
  });
  picker.addEventListener("submit", (event) => event.preventDefault());
}

function attachTheme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("leanbayes-theme", root.dataset.theme);
    } catch {
      // Without storage, the choice holds for this visit.
    }
    label();
  });
  system.addEventListener("change", label);
  label();
}

const cards = [...document.querySelectorAll("[data-figure]")];
const views = cards.map((node) => new FigureView(node, DATA.figures[node.dataset.figure]));
for (const view of views) view.show(hidden);
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const view = views.find((one) => one.plot === target);
    if (view.width !== target.clientWidth) view.draw();
  }
});
for (const view of views) resized.observe(view.plot);
attachPicker(views);
attachTheme();
const summary = document.querySelector("table.summary");
if (summary) attachSorting(summary);
