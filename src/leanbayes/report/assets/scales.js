// Scales from values to pixels, and their ticks.
function extent(lists) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (!isNumber(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

// Includes zero if the values are close to it, and makes an empty range nonempty.
function roomFor([low, high], withZero) {
  if (withZero || (low > 0 && low < 0.35 * high)) low = Math.min(low, 0);
  if (withZero || (high < 0 && high > 0.35 * low)) high = Math.max(high, 0);
  if (low < high) return [low, high];
  const half = Math.abs(low) * 0.1 || 0.5;
  return [low - half, high + half];
}

function roundStep(span, count) {
  const power = 10 ** Math.floor(Math.log10(span / count));
  const share = span / count / power;
  return power * (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10);
}

function linearTicks(low, high, count, percent) {
  const step = roundStep(high - low, count);
  const values = [];
  for (let k = Math.ceil(low / step - 1e-6); k <= high / step + 1e-6; k++) values.push(k * step);
  const texts = tickTexts(values, step, percent);
  return values.map((value, k) => ({ value, text: texts[k] }));
}

function logTicks(low, high, count, percent) {
  if (high < 5 * low) return linearTicks(low, high, count, percent);
  const inside = (steps) => {
    const values = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const step of steps) values.push(step * 10 ** power);
    }
    return values.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  };
  const decades = inside([1]);
  const values = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3]].map(inside).find((some) => some.length <= count);
  if (values && values.length >= 2) return values.map((value) => ({ value, text: logText(value, percent) }));
  if (decades.length < 2) return linearTicks(low, high, count, percent);
  const every = Math.ceil(decades.length / count);
  const kept = decades.filter((value) => Math.round(Math.log10(value)) % every === 0);
  return kept.map((value) => ({ value, text: logText(value, percent) }));
}

function logText(value, percent) {
  if (percent) return `${number(100 * value, 2)}%`;
  const [unit, sign] = UNITS.find(([size]) => value >= size * 0.999) ?? [1, ""];
  return number(value / unit, 2) + sign;
}

// from and to: the ends in pixels; room: pixels per tick.
function numberScale([low, high], from, to, { log, percent, room }) {
  const count = Math.max(2, Math.floor(Math.abs(to - from) / room));
  const along = log ? Math.log : (value) => value;
  let ticks = (log ? logTicks : linearTicks)(low, high, count, percent);
  if (!log && ticks.length < 2) {
    const step = roundStep(high - low, count);
    [low, high] = [Math.floor(low / step + 1e-6) * step, Math.ceil(high / step - 1e-6) * step];
    ticks = linearTicks(low, high, count, percent);
  }
  const [start, end] = [along(low), along(high)];
  const at = (value) => from + ((along(value) - start) / (end - start)) * (to - from);
  return { at, ticks };
}

// head: pixels reserved for the label at the start of each name's band.
function nameScale(names, length, head = 0) {
  const step = length / names.length;
  const places = new Map(names.map((name, k) => [name, k * step + (step + head) / 2]));
  const ticks = names.map((value) => ({ value, text: value }));
  return { at: (name) => places.get(String(name)), step: step - head, ticks };
}
