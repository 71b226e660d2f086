// Numbers for people. "–" stands for a value that there is not.
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** A number with three digits. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** Bytes as number and unit. */
export function bytesParts(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ["–", ""];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return [short(value), UNITS[unit]];
}

export function bytes(value) {
  const [number, unit] = bytesParts(value);
  return unit ? `${number} ${unit}` : number;
}

export const rate = (value) => (value === null || value === undefined ? "–" : `${bytes(value)}/s`);

/** Seconds as number and unit. */
export function timeParts(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return ["–", ""];
  if (seconds < 0.001) return [short(seconds * 1e6), "µs"];
  if (seconds < 1) return [short(seconds * 1e3), "ms"];
  return [short(seconds), "s"];
}

export function time(seconds) {
  const [number, unit] = timeParts(seconds);
  return unit ? `${number} ${unit}` : number;
}

/** A ratio as a percentage: 100 % only if it is all, and 0 % only if it is nothing. */
export function percent(ratio) {
  if (ratio === null || ratio === undefined || !Number.isFinite(ratio)) return "–";
  if (ratio > 0 && ratio < 0.001) return "< 0.1 %";
  if (ratio < 1 && ratio >= 0.9995) return "> 99.9 %";
  const value = ratio * 100;
  return `${Number.isInteger(value) || value >= 99.95 ? value.toFixed(0) : value.toFixed(1)} %`;
}

export function count(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

/** A name or path for the screen: control characters and halves of characters are escaped. */
export function printable(name) {
  return name.replace(/[\p{Cc}\p{Cs}\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu, (c) =>
    `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
