// The cards of the figures: legend, drawing, and data table.
function swatchOf(figure, series, plain = false) {
  const style = styleOf(figure, series);
  const color = plain ? `plain t${figure.apart ? style.order % 2 : 0}` : style.color;
  const size = { viewBox: "0 0 30 14", width: 30, height: 14 };
  const svg = make("svg", { class: `swatch ${color} ${style.dash}`, "aria-hidden": "true", ...size });
  if (figure.kind === "bars") {
    const isSteps = typeof series.x[0] === "number";
    const how = isSteps ? `steps ${style.dash}` : "solid";
    svg.append(make("path", { class: `area ${style.fill} ${how}`, d: "M3 1.5H27V12.5H3z" }));
    if (!plain && !isSteps) svg.append(make("path", { class: `pip ${style.fill}`, d: `M15 7${style.shape}` }));
  }
  if (figure.kind === "lines") svg.append(make("path", { class: "line", d: "M1 7H29" }));
  // Markers distinguish series only if each method has its own panel.
  if (figure.kind !== "bars" && (!plain || figure.apart || figure.kind === "points")) {
    const shape = plain && !figure.apart ? outline(0) : style.shape;
    svg.append(make("path", { class: `dot ${style.fill}`, d: `M15 7${shape}` }));
  }
  return svg;
}

// The methods, unless each has a titled panel, and the names of the series, if a method has several.
function legendOf(figure, series) {
  const firsts = (key, values) => values.map((value) => series.find((one) => one[key] === value)).filter(Boolean);
  const methods = figure.apart ? [] : firsts("method", [...METHODS.keys()]);
  const names = figure.names.length > 1 ? firsts("name", figure.names) : [];
  const entries = [
    ...methods.map((one) => [swatchOf(figure, { ...one, name: figure.names[0] }), METHODS[one.method].name]),
    ...names.map((one) => [swatchOf(figure, one, true), one.name]),
  ];
  return html("ul", { class: "legend" }, ...entries.map(([swatch, text]) => html("li", {}, swatch, text)));
}

// Reports how many points a logarithmic axis cannot show.
function lostOn(figure, series) {
  const axes = [...(figure.log ?? "")];
  const isLost = (one, k) => axes.some((axis) => isNumber(one[axis][k]) && one[axis][k] <= 0);
  const count = series.reduce((sum, one) => sum + one.x.filter((_, k) => isLost(one, k)).length, 0);
  return count ? `Not shown on a logarithmic axis: ${count.toLocaleString("en")} points at zero or less.` : "";
}

class FigureView {
  constructor(node, figure) {
    this.node = node;
    this.figure = figure;
    figure.names = [...new Set(figure.series.map((one) => one.name))];
    const places = new Set(figure.series.flatMap((one) => one.x.filter((x) => typeof x === "string")));
    const isLong = places.size > 8 && Math.max(...[...places].map((name) => name.length)) > 18;
    if (figure.apart || isLong) node.classList.add("wide");
    // Figures with a diagonal are about square.
    this.plot = html("div", { class: figure.diagonal && !figure.apart ? "plot square" : "plot" });
    this.details = html("details", {}, html("summary", {}, "Data"));
    this.details.addEventListener("toggle", () => this.fillDetails());
    node.append(this.plot, this.details);
  }

  show(hidden) {
    this.series = this.figure.series.filter((one) => !hidden.has(one.method));
    this.fillDetails();
    this.draw();
  }

  fillDetails() {
    while (this.details.children.length > 1) this.details.lastChild.remove();
    if (this.details.open && this.series.length) this.details.append(...dataTable(this.figure, this.series));
  }

  draw() {
    const { figure, series, plot } = this;
    this.width = plot.clientWidth;
    if (!this.width) return;
    this.chart = drawChart(figure, series, this.width);
    if (!this.chart) {
      const why = series.length ? "There are no values to show." : "None of the selected methods has this figure.";
      plot.replaceChildren(html("p", { class: "note" }, why));
      return;
    }
    const { svg, layout } = this.chart;
    const spoken = { role: "img", tabindex: 0, "aria-label": describe(figure, series) };
    for (const name in spoken) svg.setAttribute(name, spoken[name]);
    const [above, below] = layout.flip ? [figure.x, figure.y] : [figure.y, figure.x];
    plot.replaceChildren(
      legendOf(figure, series),
      html("p", { class: "axis-name" }, above),
      svg,
      html("p", { class: "axis-name below" }, below),
      html("p", { class: "note" }, lostOn(figure, series)),
    );
    attachReadout(this);
  }
}
