// Figures as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Names in the order that people expect: gpu-9 before gpu-10. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

export const NONE = "–";

/** 1,234; 12.3; 0.4; and a dash for what is not known. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  return value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value) ? value.toFixed(1) : whole.format(value);
}

/** [figure, unit]: ["1.5", "GiB"]. */
export function sized(bytes) {
  if (bytes === null || bytes === undefined) return [NONE, ""];
  let at = 0;
  let value = bytes;
  while (value >= 1023.5 && at < UNITS.length - 1) {
    value /= 1024;
    at += 1;
  }
  return [at === 0 || value >= 99.95 ? value.toFixed(0) : value.toFixed(1), UNITS[at]];
}

export function size(bytes) {
  const [figure, unit] = sized(bytes);
  return unit ? `${figure} ${unit}` : figure;
}

/** "47.7 of 128 GiB", or "964 KiB of 64.0 MiB" where the units differ. */
export function share(used, all) {
  const [[a, unit], [b, whole]] = [sized(used), sized(all)];
  return unit === whole ? `${a} of ${b} ${unit}` : `${a} ${unit} of ${b} ${whole}`;
}

/** Bytes a second; 0 as such, so that what does not move is calm. */
export function rate(bytes) {
  return bytes === null || bytes === undefined ? NONE : bytes === 0 ? "0" : `${size(bytes)}/s`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function milliseconds(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

export function clock(at) {
  return new Date(1000 * at).toLocaleTimeString("en-GB");
}

export function count(n, one, many = `${one}s`) {
  return `${whole.format(n)} ${n === 1 ? one : many}`;
}
