// The content of a figure as text and as a table, for readers who do not see it.
const ROWS = 60; // per series in the table

const whoOf = (series) => METHODS[series.method].name + (series.name ? `, ${series.name}` : "");

function sentenceOf(figure, series) {
  const [px, py] = ["x", "y"].map((axis) => figure.percent?.includes(axis));
  const known = series.y.flatMap((y, k) => (isNumber(y) && series.x[k] !== null ? [[series.x[k], y]] : []));
  if (!known.length) return `${whoOf(series)}: no values.`;
  const low = known.reduce((a, b) => (b[1] < a[1] ? b : a));
  const high = known.reduce((a, b) => (b[1] > a[1] ? b : a));
  const at = ([x, y]) => `${shown(y, py)} at ${shown(x, px)}`;
  if (known.length <= 3) return `${whoOf(series)}: ${known.map(at).join(", ")}.`;
  if (figure.kind === "lines") {
    return `${whoOf(series)}: from ${at(known[0])} to ${at(known.at(-1))}, lowest ${at(low)}, highest ${at(high)}.`;
  }
  if (figure.kind === "bars") return `${whoOf(series)}: lowest ${at(low)}, highest ${at(high)}.`;
  const ends = extent([known.map(([x]) => x)]);
  const along = ends ? `${figure.x} from ${shown(ends[0], px)} to ${shown(ends[1], px)}, ` : "";
  const up = `${figure.y} from ${shown(low[1], py)} to ${shown(high[1], py)}`;
  return `${whoOf(series)}: ${known.length} points, ${along}${up}.`;
}

function describe(figure, series) {
  const what = { lines: "Lines", points: "Points", bars: "Bars" }[figure.kind];
  const all = series.map((one) => sentenceOf(figure, one));
  return `${figure.title}. ${what} of ${figure.y} by ${figure.x}. ${all.join(" ")}`;
}

function dataTable(figure, series) {
  const has = (field) => series.some((one) => one[field]?.length);
  const named = figure.names.length > 1 || figure.names[0] !== "";
  const [px, py] = ["x", "y"].map((axis) => figure.percent?.includes(axis));
  const more = [...(has("low") ? ["low", "high"] : []), ...(has("labels") ? ["label"] : [])];
  const heads = ["method", ...(named ? ["series"] : []), figure.x, figure.y, ...more];
  const body = html("tbody");
  const left = [];
  for (const one of series) {
    const every = Math.ceil(one.x.length / ROWS);
    let rows = 0;
    for (let k = 0; k < one.x.length; k += every, rows++) {
      const cells = [...(named ? [one.name] : []), shown(one.x[k], px), shown(one.y[k], py)];
      if (has("low")) cells.push(shown(one.low?.[k], py), shown(one.high?.[k], py));
      if (has("labels")) cells.push(one.labels?.[k] ?? "");
      const head = html("th", { scope: "row" }, METHODS[one.method].name);
      body.append(html("tr", {}, head, ...cells.map((cell) => html("td", {}, cell))));
    }
    const [out, all] = [one.x.length - rows, one.x.length].map((count) => count.toLocaleString("en"));
    if (rows < one.x.length) left.push(`${out} of ${all} points of ${whoOf(one)}`);
  }
  const head = html("thead", {}, html("tr", {}, ...heads.map((text) => html("th", { scope: "col" }, text))));
  const title = `Data of: ${figure.title}`;
  const table = html("table", { class: "data" }, html("caption", { class: "hidden" }, title), head, body);
  const scroll = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table);
  return left.length ? [scroll, html("p", { class: "note" }, `Not shown: ${left.join("; ")}.`)] : [scroll];
}
