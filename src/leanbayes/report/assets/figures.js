// The cards of the figures: legend, drawing, and numbers.
function swatchOf(figure, series, plain = false) {
  const style = styleOf(figure, series);
  const colour = plain ? "plain" : style.colour;
  const svg = make("svg", { class: `swatch ${colour} ${style.dash}`, viewBox: "0 0 30 14", width: 30, height: 14, "aria-hidden": "true" });
  if (figure.kind === "bars") {
    const isSteps = typeof series.x[0] === "number";
    svg.append(make("path", { class: `area ${style.fill} ${isSteps ? `steps ${style.dash}` : "solid"}`, d: "M3 1.5H27V12.5H3z" }));
    if (!plain && !isSteps) svg.append(make("path", { class: `pip ${style.fill}`, d: `M15 7${style.shape}` }));
  }
  if (figure.kind === "lines") svg.append(make("path", { class: "line", d: "M1 7H29" }));
  if (figure.kind !== "bars" && !(plain && figure.kind === "lines")) {
    svg.append(make("path", { class: `dot ${style.fill}`, d: `M15 7${plain ? outline(0) : style.shape}` }));
  }
  return svg;
}

// Methods, unless each has a panel with its name; and what the series of a method are, where it has several.
function legendOf(figure, series) {
  const firsts = (key) => [...new Map(series.toReversed().map((one) => [one[key], one])).values()].reverse();
  const entries = figure.apart ? [] : firsts("method").map((one) => [swatchOf(figure, { ...one, name: figure.names[0] }), METHODS[one.method].name]);
  if (figure.names.length > 1) entries.push(...firsts("name").map((one) => [swatchOf(figure, one, true), one.name]));
  return html("ul", { class: "legend" }, ...entries.map(([swatch, text]) => html("li", {}, swatch, text)));
}

// How many points a logarithmic axis cannot show.
function lostOn(figure, series) {
  const lost = (axis) => figure.log?.includes(axis) ? series.flatMap((one) => one[axis]).filter((value) => isNumber(value) && value <= 0).length : 0;
  const count = lost("x") + lost("y");
  return count ? `${count.toLocaleString("en")} values of zero or less have no place on a logarithmic axis.` : "";
}

class FigureView {
  constructor(node, figure) {
    this.node = node;
    this.figure = figure;
    figure.names = [...new Set(figure.series.map((one) => one.name))];
    const isWide = figure.apart || (figure.kind === "bars" && new Set(figure.series.flatMap((one) => one.x)).size > 8 && typeof figure.series[0].x[0] === "string");
    if (isWide) node.classList.add("wide");
    this.plot = html("div", { class: "plot" });
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
    // A diagonal is to be seen as one: its figure is about square.
    this.chart = drawChart(figure, series, figure.diagonal && !figure.apart ? Math.min(this.width, 520) : this.width);
    if (!this.chart) {
      plot.replaceChildren(html("p", { class: "note" }, series.length ? "There is no value to show." : "None of the methods chosen above has this figure."));
      return;
    }
    const { svg, layout } = this.chart;
    for (const [name, value] of [["role", "img"], ["tabindex", 0], ["aria-label", describe(figure, series)]]) svg.setAttribute(name, value);
    const [above, below] = layout.flip ? [figure.x, figure.y] : [figure.y, figure.x];
    const parts = [legendOf(figure, series), html("p", { class: "axis-name" }, above), svg, html("p", { class: "axis-name below" }, below)];
    const lost = lostOn(figure, series);
    if (lost) parts.push(html("p", { class: "note" }, lost));
    plot.replaceChildren(...parts);
    attachReadout(this);
  }
}
