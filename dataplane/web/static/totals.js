// The cluster in five figures, with their last ten minutes.

import { number, sized } from "./format.js";
import { Spark } from "./draw.js";
import { element, text } from "./rows.js";

const PARTS = [
  ["rows", "Rows appended", (s) => [number(s.rows), "/s"]],
  ["put", "Bytes put", (s) => [sized(s.put)[0], s.put === null ? "" : `${sized(s.put)[1]}/s`]],
  ["crossed", "Between hosts", (s) => [sized(s.crossed)[0], s.crossed === null ? "" : `${sized(s.crossed)[1]}/s`]],
  ["memory", "Memory", (s) => [sized(s.memory)[0], `${sized(s.memory)[1]} of ${sized(s.budget).join(" ")}`]],
  ["waiting", "Waiting now", (s) => [number(s.waiting), s.waiting === 1 ? "request" : "requests"]],
];
const shown = PARTS.map(([key, label, format]) => {
  const figure = element("span");
  const unit = element("small");
  const trend = element("dd", { class: "trend" });
  const box = element("div", {}, element("dt", {}, label), element("dd", { class: "figure" }, figure, unit), trend);
  document.getElementById("totals").append(box);
  return { key, format, figure, unit, spark: new Spark(trend) };
});

function sum(items, of) {
  let found = null;
  for (const item of items) if (item[of] !== null) found = (found ?? 0) + item[of];
  return found;
}

export function totalsOf(sample) {
  const up = sample.hosts.filter((host) => !host.silent);
  const waiting = sum(up, "waiting") + sample.streams.reduce((n, s) => n + s.waiting + s.tasks.reduce((m, t) => m + t.waiting, 0), 0);
  return { rows: sum(sample.streams, "rate"), put: sum(up, "put"), crossed: sum(up, "fetched"), memory: sum(up, "memory_used") ?? 0, budget: sum(up, "memory_budget") ?? 0, waiting };
}

export function showTotals(totals, book) {
  for (const each of shown) {
    const [figure, unit] = each.format(totals);
    text(each.figure, figure);
    text(each.unit, unit);
    each.spark.draw(book.of("cluster", each.key), book.now);
  }
}

export function remeasureTotals() {
  for (const each of shown) each.spark.width = 0;
}
