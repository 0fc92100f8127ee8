// The values at one position of a figure: under the mouse, under a finger, or reached by the arrow keys. A crosshair
// lists all series there; a cloud of points shows the nearest one.
const tip = document.getElementById("tip");
const speak = document.getElementById("status");
let shownBy = null; // the figure or cell whose tooltip is open
let place = null; // returns the position of the tooltip on the screen

function showTip(owner, where, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  [shownBy, place] = [owner, where];
  placeTip();
}

function placeTip() {
  const [x, y] = place();
  const { width, height } = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth - width - 8;
  tip.style.left = `${Math.max(8, Math.min(x - width / 2, room))}px`;
  tip.style.top = `${y - height - 14 > 4 ? y - height - 14 : y + 18}px`;
}

function hideTip() {
  tip.hidden = true;
  clearMarks(shownBy);
  shownBy = null;
}

function clearMarks(node) {
  for (const mark of node?.querySelectorAll?.(".ring, .cross") ?? []) mark.remove();
}

function valueOf(figure, point) {
  const { series, k } = point;
  const py = figure.percent?.includes("y");
  const between = isNumber(series.low?.[k]) && isNumber(series.high?.[k]);
  const range = between ? ` (${shown(series.low[k], py)} to ${shown(series.high[k], py)})` : "";
  return `${shown(series.y[k], py)}${range}`;
}

function readingOf(figure, point) {
  const { series, k } = point;
  const lines = [
    `${figure.x}: ${shown(series.x[k], figure.percent?.includes("x"))}`,
    `${figure.y}: ${valueOf(figure, point)}`,
  ];
  return series.labels?.[k] ? [series.labels[k], ...lines] : lines;
}

// The point of each series of a panel that is nearest to a point along the axis.
function besides(view, point) {
  const axis = view.chart.layout.flip ? "y" : "x";
  const panel = view.chart.panels.find((one) => one.points.includes(point));
  return panel.series.flatMap((series) => {
    if (series === point.series) return [point];
    const own = panel.points.filter((one) => one.series === series);
    const sameName = own.filter((one) => panel.names && String(series.x[one.k]) === String(point.series.x[point.k]));
    if (panel.names) return sameName;
    const away = (one) => Math.abs(one[axis] - point[axis]);
    return own.length ? [own.reduce((a, b) => (away(b) < away(a) ? b : a))] : [];
  });
}

function crosshairOf(view, point) {
  const { layout, panels } = view.chart;
  const panel = panels.find((one) => one.points.includes(point));
  const [x, y] = [short(point.x), short(point.y)];
  const d = layout.flip
    ? `M${short(panel.left)} ${y}h${short(layout.width)}`
    : `M${x} ${short(panel.top)}v${short(layout.height)}`;
  return make("path", { class: "cross", d });
}

function listOf(figure, point, points) {
  const px = figure.percent?.includes("x");
  const at = point.series.x[point.k];
  const rows = points.map((one) => {
    const { series, k } = one;
    const apart = series.x[k] === at ? "" : ` at ${shown(series.x[k], px)}`;
    const text = `${valueOf(figure, one)}${apart}${series.labels?.[k] ? `, ${series.labels[k]}` : ""}`;
    const name = figure.apart ? series.name || figure.y : whoOf(series);
    const cells = [html("td", {}, swatchOf(figure, series)), html("td", {}, name), html("td", {}, text)];
    return html("tr", one === point && points.length > 1 ? { class: "active" } : {}, ...cells);
  });
  const head = html("div", { class: "at" }, `${figure.x}: ${shown(at, px)}`);
  const what = html("div", {}, figure.y);
  return [head, what, html("table", {}, html("tbody", {}, ...rows))];
}

function showPoint(view, point, aloud) {
  const { figure, chart } = view;
  if (shownBy !== chart.svg) hideTip();
  clearMarks(chart.svg);
  const lines = readingOf(figure, point);
  let content;
  if (figure.kind === "points") {
    const who = html("strong", {}, swatchOf(figure, point.series), whoOf(point.series));
    content = [who, ...lines.map((line) => html("div", {}, line))];
  } else {
    chart.svg.append(crosshairOf(view, point));
    content = listOf(figure, point, besides(view, point));
  }
  chart.svg.append(make("circle", { class: "ring", cx: short(point.x), cy: short(point.y), r: 7 }));
  const where = () => {
    const box = chart.svg.getBoundingClientRect();
    return [box.left + point.x, box.top + point.y];
  };
  showTip(chart.svg, where, ...content);
  if (aloud) speak.textContent = `${whoOf(point.series)}, ${lines.join(", ")}`;
}

// For lines and bars the position along the axis counts most; for points, both directions do.
function nearest(view, x, y) {
  const { figure, chart } = view;
  const { width, height, flip } = chart.layout;
  const weights = { lines: [1, 0.3], points: [1, 1], bars: flip ? [0.02, 1] : [1, 0.02] }[figure.kind];
  let best = null;
  let least = figure.kind === "points" ? 60 : Infinity;
  for (const panel of chart.panels) {
    const [right, down] = [x - panel.left, y - panel.top];
    if (right < -12 || right > width + 12 || down < -12 || down > height + 12) continue;
    for (const point of panel.points) {
      const away = Math.hypot(weights[0] * (point.x - x), weights[1] * (point.y - y));
      if (away < least) [best, least] = [point, away];
    }
  }
  return best;
}

function attachReadout(view) {
  const { svg, panels } = view.chart;
  const onPoint = (event) => {
    const box = svg.getBoundingClientRect();
    const point = nearest(view, event.clientX - box.left, event.clientY - box.top);
    if (point) showPoint(view, point, false);
    else hideTip();
  };
  svg.addEventListener("pointermove", onPoint);
  svg.addEventListener("pointerdown", onPoint);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hideTip());
  svg.addEventListener("blur", hideTip);

  const axis = view.chart.layout.flip ? "y" : "x";
  const tracks = panels
    .flatMap((panel) => panel.series.map((one) => panel.points.filter((point) => point.series === one)))
    .filter((points) => points.length)
    .map((points) => points.toSorted((a, b) => a[axis] - b[axis]));
  let [track, at] = [0, -1];
  svg.addEventListener("keydown", (event) => {
    if (!tracks.length) return;
    const ahead = Math.max(1, Math.round(tracks[track].length / 10));
    const far = { PageDown: ahead, PageUp: -ahead, Home: -Infinity, End: Infinity };
    const step = { ArrowRight: 1, ArrowLeft: -1, ...far }[event.key];
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step && !turn) return;
    event.preventDefault();
    if (turn) track = (track + turn + tracks.length) % tracks.length;
    at = Math.max(0, Math.min(at + (step ?? 0), tracks[track].length - 1));
    showPoint(view, tracks[track][at], true);
  });
}

// Shows the `title` texts of tables as tooltips, because a title appears only under the mouse.
function attachTips(nodes) {
  for (const node of nodes) {
    node.dataset.tip = node.title;
    node.removeAttribute("title");
    const where = () => {
      const box = node.getBoundingClientRect();
      return [box.left + box.width / 2, box.top];
    };
    const lines = () => node.dataset.tip.split("\n").map((line) => html("div", {}, line));
    const open = () => shownBy === node || showTip(node, where, ...lines());
    for (const event of ["pointerenter", "pointermove", "focus"]) node.addEventListener(event, open);
    for (const event of ["pointerleave", "blur"]) node.addEventListener(event, hideTip);
  }
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
document.addEventListener("pointerdown", (event) => shownBy?.contains(event.target) || hideTip());
// A tooltip opened by the keyboard moves along; one under the mouse closes, because another element is there now.
const onScroll = () => (shownBy && shownBy === document.activeElement ? placeTip() : hideTip());
document.addEventListener("scroll", onScroll, { passive: true, capture: true });
