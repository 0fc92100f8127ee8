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
  const boxes = [...picker.querySelectorAll("input")];
  const apply = () => {
    hidden.clear();
    for (const box of boxes) if (!box.checked) hidden.add(Number(box.value));
    applyPicker(views);
  };
  picker.addEventListener("change", apply);
  document.getElementById("all").addEventListener("click", () => {
    for (const box of boxes) box.checked = true;
    boxes[0].focus();
    apply();
  });
  picker.addEventListener("submit", (event) => event.preventDefault());
  attachVerdicts((name) => {
    const box = boxes.find((one) => METHODS[one.value].name === name);
    if (box && !box.checked) {
      box.checked = true;
      apply();
    }
  });
  apply();
}

// Shows the verdicts on the chosen method, whose lines are drawn from then on.
function attachVerdicts(draw) {
  const choice = document.getElementById("method");
  choice?.addEventListener("change", () => {
    for (const node of document.querySelectorAll("[data-verdicts]")) {
      node.hidden = node.dataset.verdicts !== choice.value;
    }
    draw(choice.value);
  });
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
attachPicker(views);
if (!document.getElementById("picker")) {
  for (const view of views) view.show(hidden);
  attachVerdicts(() => {});
}
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const view = views.find((one) => one.plot === target);
    if (view.width !== target.clientWidth) view.draw();
  }
});
for (const view of views) resized.observe(view.plot);
attachTheme();
const summary = document.querySelector("table.summary");
if (summary) {
  attachSorting(summary);
  attachColumns(summary);
}
