// Formatting of numbers. Values that are not finite are null in the data.
const isNumber = (value) => typeof value === "number";

const UNITS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

const raised = (power) => String(power).replace(/[-\d]/g, (sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]);

const withMinus = (text) => text.replace("-", "−");

function exponential(value, digits) {
  const [front, power] = value.toExponential(digits - 1).split("e");
  return withMinus(Number(front) === 1 ? `10${raised(+power)}` : `${Number(front)}×10${raised(+power)}`);
}

function number(value, digits = 5) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-3 || size >= 1e9)) return exponential(value, digits);
  return withMinus(value.toLocaleString("en", { maximumSignificantDigits: digits }));
}

// A value of a figure, which may be a name or a fraction.
function shown(value, percent) {
  if (typeof value === "string") return value;
  if (!percent || !isNumber(value)) return number(value);
  const share = 100 * value;
  return `${Math.abs(share) >= 0.1 || !share ? withMinus(share.toFixed(2)) : number(share, 3)}%`;
}

// The labels of ticks along an axis, with as many decimals as their distance needs.
function tickTexts(values, step, percent) {
  const times = percent ? 100 : 1;
  const largest = times * Math.max(...values.map(Math.abs));
  if (largest > 0 && largest < 1e-3) return values.map((value) => (value ? exponential(value, 2) : "0"));
  const [unit, sign] = UNITS.find(([size]) => largest >= size && largest >= 1e4) ?? [1, ""];
  const places = Math.max(0, -Math.floor(Math.log10((times * step) / unit) + 1e-9));
  const text = (value) => (value ? withMinus(((times * value) / unit).toFixed(places)) + sign : "0");
  return values.map((value) => text(value) + (percent ? "%" : ""));
}
