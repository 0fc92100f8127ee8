// The marks of one series, as path data, so that thousands of points are only a few elements.
const CLOUD = 150; // more points than this are drawn as dots, not markers
const LAYERS = 6; // number of layers of a cloud, so that dense regions are darker

const short = (pixels) => Math.round(pixels * 10) / 10;
const outline = (marker) => document.getElementById(`marker-${marker}`).getAttribute("d").slice(4);
const markers = (spots, shape) => spots.map(([x, y]) => `M${short(x)} ${short(y)}${shape}`).join("");

// Splits a list at missing values.
function stretches(list) {
  const found = [[]];
  for (const one of list) {
    if (one) found.at(-1).push(one);
    else found.push([]);
  }
  return found.filter((some) => some.length);
}

// A single point is a line of length 0, which round caps turn into a dot.
function polyline(spots) {
  const d = `M${spots.map(([x, y]) => `${short(x)} ${short(y)}`).join("L")}`;
  return spots.length === 1 ? `${d}h0` : d;
}

function band(panel, series) {
  return series.x.map((x, k) => {
    const low = panel.spot(x, series.low?.[k]);
    const high = panel.spot(x, series.high?.[k]);
    return low && high && [low, high];
  });
}

// Markers whose area is the share of the examples behind each point.
function sizedMarkers(spots, series, style) {
  const nodes = spots.map((spot, k) => {
    if (!spot) return null;
    const scale = Math.max(0.8, 2.4 * Math.sqrt(series.sizes[k] ?? 0));
    const transform = `translate(${short(spot[0])} ${short(spot[1])}) scale(${short(scale)})`;
    return make("path", { class: `dot sized ${style.color} ${style.fill}`, transform, d: `M0 0${style.shape}` });
  });
  return nodes.filter(Boolean);
}

function drawLines(panel, series, style) {
  if (series.sizes) {
    const at = series.x.map((x, k) => panel.spot(x, series.y[k]));
    return [
      make("path", { class: `line thin ${style.color} ${style.dash}`, d: stretches(at).map(polyline).join("") }),
      whiskers(panel, series, (edge) => edge, `tinted ${style.color}`),
      ...sizedMarkers(at, series, style),
    ];
  }
  const spots = series.x.map((x, k) => panel.spot(x, series.y[k]));
  const edges = stretches(band(panel, series)).filter((some) => some.length > 1);
  const around = (some) => [...some.map(([low]) => low), ...some.map(([, high]) => high).reverse()];
  const area = edges.map((some) => `${polyline(around(some))}z`);
  const every = spots.length > 16 ? Math.ceil(spots.length / 6) : 1;
  const marked = spots.filter((spot, k) => spot && k % every === (3 * series.method + 2 * style.order) % every);
  return [
    area.length && make("path", { class: `band ${style.color}`, d: area.join("") }),
    make("path", { class: `line ${style.color} ${style.dash}`, d: stretches(spots).map(polyline).join("") }),
    make("path", { class: `dot ${style.color} ${style.fill}`, d: markers(marked, style.shape) }),
  ];
}

function whiskers(panel, series, places, tint = "") {
  const ends = band(panel, series).map((edge, k) => edge && places(edge, k));
  const d = ends.filter(Boolean).map(polyline).join("");
  const lines = [make("path", { class: "halo", d }), make("path", { class: `whisker ${tint}`, d })];
  return d && make("g", {}, ...(tint ? lines.slice(1) : lines));
}

function drawPoints(panel, series, style) {
  const spots = series.x.map((x, k) => panel.spot(x, series.y[k])).filter(Boolean);
  if (spots.length <= CLOUD) {
    return [
      whiskers(panel, series, (edge) => edge),
      make("path", { class: `dot ${style.color} ${style.fill}`, d: markers(spots, style.shape) }),
    ];
  }
  const layers = Array.from({ length: LAYERS }, (_, layer) => spots.filter((_, k) => k % LAYERS === layer));
  return layers.map((some) => make("path", { class: `cloud ${style.color} ${style.fill}`, d: markers(some, "h0") }));
}

// Bars side by side for each name; `slot` of `slots` is the position of this series among them.
function drawBars(panel, series, style, slot, slots) {
  const thick = Math.min((0.78 * Math.abs(panel.xScale.step)) / slots, 26);
  const aside = (slot - (slots - 1) / 2) * thick;
  const move = ([x, y]) => (panel.flip ? [x, y + aside] : [x + aside, y]);
  const half = Math.max(0.5, thick / 2 - (thick > 5 ? 0.5 : 0.25));
  const tips = series.x.map((x, k) => panel.spot(x, series.y[k])).map((spot) => spot && move(spot));
  const [base, width] = [short(panel.base), short(2 * half)];
  const bars = tips.filter(Boolean).map(([x, y]) => {
    if (panel.flip) return `M${base} ${short(y - half)}H${short(x)}v${width}H${base}z`;
    return `M${short(x - half)} ${base}V${short(y)}h${width}V${base}z`;
  });
  // The marker of the method at the base of each long bar, so that methods differ not only in color.
  const size = Math.min(1, (1.7 * half) / 10);
  const inside = (1.4 * half + 2) / size;
  const feet = tips.filter((spot) => spot && Math.abs((panel.flip ? spot[0] : spot[1]) - panel.base) > 3 * half + 6);
  const foot = (tip) => panel.base / size + Math.sign(tip - panel.base) * inside;
  const pips = feet.map(([x, y]) => (panel.flip ? [foot(x), y / size] : [x / size, foot(y)]));
  const classes = `${style.color} ${style.fill}`;
  const nodes = [
    make("path", { class: `area ${classes}`, d: bars.join("") }),
    half > 2 && make("path", { class: `pip ${classes}`, transform: `scale(${size})`, d: markers(pips, style.shape) }),
    whiskers(panel, series, (edge) => edge.map(move)),
  ];
  return { nodes, tips };
}

// A histogram; x are the centers of its bins.
function drawSteps(panel, series, style, crowded) {
  const edges = binEdges(series.x, panel.log.x);
  const corners = series.x.map((_, k) => {
    const [left, right] = [panel.spot(edges[k], series.y[k]), panel.spot(edges[k + 1], series.y[k])];
    return left && right && [left, right];
  });
  const runs = stretches(corners).map((some) => some.flat());
  const base = short(panel.base);
  const d = runs.map((spots) => `M${short(spots[0][0])} ${base}L${polyline(spots).slice(1)}V${base}`);
  const classes = `${crowded ? "crowded " : ""}${style.color} ${style.dash} ${style.fill}`;
  return [make("path", { class: `area steps ${classes}`, d: d.join("") })];
}

function binEdges(middles, log) {
  const [to, from] = log ? [Math.log, Math.exp] : [Number, Number];
  const at = middles.map(to);
  const half = at.length > 1 ? (at[1] - at[0]) / 2 : 0.5;
  const last = at.length > 1 ? (at.at(-1) - at.at(-2)) / 2 : 0.5;
  const between = at.slice(1).map((value, k) => (value + at[k]) / 2);
  return [at[0] - half, ...between, at.at(-1) + last].map(from);
}
