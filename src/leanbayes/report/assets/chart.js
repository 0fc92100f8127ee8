// Draws one figure: its panels, axes and marks.
const INSET = 8; // pixels between the frame and the outermost marks
const GAP = 28; // pixels between panels, and to the right of the last tick
const pen = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// Shortens a long text in the middle, because names of layers differ at both ends.
function fitted(text, room) {
  if (textWidth(text) <= room) return text;
  let kept = text.length - 1;
  const cut = () => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
  while (kept > 2 && textWidth(cut()) > room) kept--;
  return cut();
}

// Methods differ in color, marker and dashes. The series of one method differ in dashes and, if the method has its own
// panel, also in shade and markers.
function styleOf(figure, series) {
  const method = METHODS[series.method];
  const order = figure.names.indexOf(series.name);
  const several = figure.names.length > 1;
  return {
    color: `c${method.color} t${figure.apart ? order % 2 : 0}`,
    dash: `d${several || figure.apart ? order % 5 : method.dash}`,
    fill: `f${Math.min(order, 2)}`,
    shape: outline(several && figure.apart ? order % 10 : method.marker),
    order,
  };
}

// The ranges of the axes, or the names along x, which all panels share.
function rangesOf(figure, series) {
  const log = { x: figure.log?.includes("x"), y: figure.log?.includes("y") };
  const fit = (list, isLog) => (isLog ? list.filter((value) => value > 0) : list);
  const isBars = figure.kind === "bars";
  const names = series.some((one) => one.x.some((x) => typeof x === "string"))
    ? [...new Set(series.flatMap((one) => one.x.map(String)))]
    : null;
  const ys = series.flatMap((one) => [one.y, one.low ?? [], one.high ?? []]).map((list) => fit(list, log.y));
  const xs = series.map((one) => (isBars && !names ? binEdges(one.x, log.x) : one.x)).map((list) => fit(list, log.x));
  let y = extent(ys);
  let x = names ? [0, 1] : extent(xs);
  if (!x || !y) return null;
  if (figure.diagonal && !names) x = y = extent([x, y]);
  const open = ([low, high]) => (low < high ? [low, high] : [low / 2, high * 2]);
  y = log.y ? open(isBars ? [y[0] / 1.5, y[1]] : y) : roomFor(y, isBars);
  if (!names && !(isBars && x[0] < x[1])) x = log.x ? open(x) : roomFor(x);
  return { log, names, x, y };
}

function panelsOf(figure, series) {
  if (!figure.apart) return [{ series }];
  return [...new Set(series.map((one) => one.method))].map((method) => ({
    method,
    series: series.filter((one) => one.method === method),
  }));
}

// The positions of all parts, in pixels.
function layoutOf(figure, ranges, panels, width) {
  const { names } = ranges;
  const slots = Math.max(...panels.map((panel) => panel.series.length));
  const most = Math.max(1, Math.min(panels.length, Math.floor(width / (names ? 280 : 180))));
  const columns = Math.ceil(panels.length / Math.ceil(panels.length / most));
  const widest = names ? Math.max(...names.map(textWidth)) : 0;
  const band = names ? (width / columns - 60) / names.length : 0;
  const flip = figure.kind === "bars" && names !== null && (band < widest + 10 || (0.78 * band) / slots < 5);
  const rough = (width - 50 - (columns - 1) * GAP) / columns;
  const tall = figure.apart ? [120, 0.8 * rough, 230] : [210, 0.6 * rough, 320];
  let height = figure.diagonal ? Math.min(rough - GAP, 340) : Math.min(Math.max(tall[0], tall[1]), tall[2]);
  // Long names are placed above their bars if they would leave too little room beside them.
  const above = flip && widest > 0.3 * width ? 18 : 0;
  if (flip) height = names.length * (Math.min(Math.max(7 * slots + 8, 18), 64) + above);
  const values = flip ? [] : valueScale(ranges, figure, height, 0).ticks.map((tick) => textWidth(tick.text));
  const left = Math.ceil(flip ? (above ? 0 : widest) : Math.max(...values)) + 10;
  const across = (width - left - GAP * columns + 6) / columns;
  return { columns, flip, above, slots, left, width: across, height, head: figure.apart ? 30 : 8, foot: 22 };
}

function valueScale(ranges, figure, from, to, room = 34) {
  const inset = Math.sign(to - from) * INSET;
  const start = figure.kind === "bars" ? from : from + inset;
  return numberScale(ranges.y, start, to - inset, { log: ranges.log.y, percent: figure.percent?.includes("y"), room });
}

// A scale along the bottom, with as many ticks as fit.
function withRoom(width, scaleFor) {
  for (const room of [52, 66, 90, 130, 200]) {
    const scale = scaleFor(Math.max(room, width / 11));
    const ends = scale.ticks.map((tick) => [scale.at(tick.value), textWidth(tick.text) / 2 + 4]);
    const apart = ends.every(([x, half], k) => !k || Math.abs(x - ends[k - 1][0]) >= half + ends[k - 1][1]);
    if (apart || room === 200) return scale;
  }
}

function scalesOf(figure, ranges, layout) {
  const { names, log } = ranges;
  const { width, height, flip } = layout;
  if (flip) {
    const y = withRoom(width, (room) => valueScale(ranges, figure, 0, width, room));
    return { x: nameScale(names, height, layout.above), y };
  }
  const inset = figure.kind === "bars" ? 1 : INSET;
  const percent = figure.percent?.includes("x");
  const along = (room) => numberScale(ranges.x, inset, width - inset, { log: log.x, percent, room });
  const x = names ? nameScale(names, width) : withRoom(width, along);
  if (names) {
    const every = Math.ceil((Math.max(...names.map(textWidth)) + 8) / x.step);
    x.ticks = x.ticks.filter((_, k) => k % every === 0);
  }
  return { x, y: valueScale(ranges, figure, height, 0) };
}

function axesOf(panel, layout, scales, isFirst) {
  const { width, height, flip, above } = layout;
  const [across, up] = flip ? [scales.y, scales.x] : [scales.x, scales.y];
  const nodes = [make("rect", { class: "frame", width: short(width), height: short(height) })];
  for (const tick of across.ticks) {
    const x = short(across.at(tick.value));
    if (!across.step) nodes.push(make("path", { class: "grid", d: `M${x} 0V${short(height)}` }));
    nodes.push(make("text", { x, y: short(height + 17), "text-anchor": "middle" }, tick.text));
  }
  for (const tick of up.ticks) {
    const y = short(up.at(tick.value));
    if (!up.step) nodes.push(make("path", { class: "grid", d: `M0 ${y}H${short(width)}` }));
    if (above) nodes.push(make("text", { x: 6, y: y - up.step / 2 - 2 }, fitted(tick.text, width - 6)));
    else if (isFirst) nodes.push(make("text", { x: -8, y: y + 4, "text-anchor": "end" }, tick.text));
  }
  nodes.push(make("path", { class: "axis", d: `M0 0V${short(height)}H${short(width)}` }));
  return nodes;
}

function diagonalOf(ranges, scales) {
  const low = Math.max(ranges.x[0], ranges.y[0]);
  const high = Math.min(ranges.x[1], ranges.y[1]);
  const ends = [low, high].map((value) => [scales.x.at(value), scales.y.at(value)]);
  return make("path", { class: "diagonal", d: polyline(ends) });
}

function marksOf(figure, panel, series, slot, slots) {
  const style = styleOf(figure, series);
  let tips = series.x.map((x, k) => panel.spot(x, series.y[k]));
  let nodes;
  if (figure.kind === "lines") nodes = drawLines(panel, series, style);
  else if (figure.kind === "points") nodes = drawPoints(panel, series, style);
  else if (panel.names) ({ nodes, tips } = drawBars(panel, series, style, slot, slots));
  else nodes = drawSteps(panel, series, style, slots > 2);
  const points = tips.map((spot, k) => spot && { x: spot[0] + panel.left, y: spot[1] + panel.top, series, k });
  return { nodes: nodes.filter(Boolean), points: points.filter(Boolean) };
}

function panelTitle(panel, layout) {
  const method = METHODS[panel.method];
  const name = make("text", { class: "panel-title", x: 14, y: -9 }, fitted(method.name, layout.width - 14));
  name.append(make("title", {}, method.name));
  return [make("path", { class: `dot c${method.color}`, d: `M5 -13${outline(method.marker)}` }), name];
}

// Returns the drawing and the position of each point, or null if no value can be shown.
function drawChart(figure, series, width) {
  const ranges = rangesOf(figure, series);
  if (!ranges) return null;
  const panels = panelsOf(figure, series);
  const layout = layoutOf(figure, ranges, panels, width);
  const scales = scalesOf(figure, ranges, layout);
  const rows = Math.ceil(panels.length / layout.columns);
  const row = layout.head + layout.height + layout.foot;
  const height = short(rows * row);
  const svg = make("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}` });
  const usable = (value, log) => isNumber(value) && (!log || value > 0);
  panels.forEach((panel, place) => {
    const column = place % layout.columns;
    panel.left = layout.left + column * (layout.width + GAP);
    panel.top = layout.head + Math.floor(place / layout.columns) * row;
    Object.assign(panel, { names: ranges.names, log: ranges.log, flip: layout.flip, xScale: scales.x });
    panel.base = scales.y.at(ranges.log.y ? ranges.y[0] : 0);
    panel.spot = (x, y) => {
      if (!usable(y, ranges.log.y) || !(ranges.names || usable(x, ranges.log.x))) return null;
      return layout.flip ? [scales.y.at(y), scales.x.at(x)] : [scales.x.at(x), scales.y.at(y)];
    };
    const group = make("g", { transform: `translate(${short(panel.left)} ${short(panel.top)})` });
    group.append(...axesOf(panel, layout, scales, column === 0));
    if (figure.diagonal && !ranges.names) group.append(diagonalOf(ranges, scales));
    if (figure.apart) group.append(...panelTitle(panel, layout));
    panel.points = [];
    panel.series.forEach((one, slot) => {
      const { nodes, points } = marksOf(figure, panel, one, slot, layout.slots);
      group.append(make("g", { class: "marks", "data-method": one.method }, ...nodes));
      panel.points = panel.points.concat(points);
    });
    svg.append(group);
  });
  return { svg, panels, layout };
}
