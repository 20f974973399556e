// What needs attention, as sentences; each leads to what it speaks of. New ones are announced, once.

import { clock, count } from "./format.js";
import { Rows, element, text } from "./rows.js";

const list = document.getElementById("alerts");
const calm = document.getElementById("calm");
const announce = document.getElementById("announce");

/** The element that an alert speaks of. */
export function anchor(kind, of) {
  return `${kind}-${encodeURIComponent(of)}`;
}

class AlertRow {
  constructor(alert) {
    this.tag = element("span", { class: "tag" });
    this.link = element("a", { href: "#" });
    this.time = element("time");
    this.element = element("li", { class: alert.level }, this.tag, this.link, this.time);
  }

  show(alert) {
    text(this.tag, alert.tag);
    text(this.link, alert.text);
    text(this.time, `since ${clock(alert.since)}`);
    if (this.element.className !== alert.level) this.element.className = alert.level;
    const target = alert.kind === "cluster" ? (alert.of === "partitions" || alert.tag === "gone" ? "#partitions" : "#hosts") : `#${anchor(alert.kind, alert.of)}`;
    if (this.link.getAttribute("href") !== target) this.link.setAttribute("href", target);
  }
}

const rows = new Rows(list, (alert) => new AlertRow(alert));
const keyOf = (alert) => `${alert.kind} ${alert.of} ${alert.tag}`;
let known = new Set();

export function showAlerts(alerts) {
  rows.update(alerts, keyOf);
  list.hidden = !alerts.length;
  calm.hidden = alerts.length > 0;
  const keys = new Set(alerts.map(keyOf));
  const fresh = alerts.filter((alert) => !known.has(keyOf(alert)));
  if (fresh.length) announce.textContent = fresh.slice(0, 3).map((alert) => `${alert.tag}: ${alert.text}.`).join(" ");
  else if (known.size && !keys.size) announce.textContent = "Nothing needs attention.";
  known = keys;
  const title = alerts.length ? `(${alerts.length}) dataplane` : "dataplane";
  if (document.title !== title) document.title = title;
}

/** By element, the worst alert of it. */
export function flagged(alerts) {
  const found = new Map();
  for (const alert of alerts) {
    const key = `${alert.kind} ${alert.of}`;
    if (!found.has(key)) found.set(key, alert);
  }
  return found;
}

export function summary(tick) {
  const sample = tick.sample;
  if (!sample) return "";
  const parts = [count(sample.hosts.length, "host"), count(sample.streams.length, "stream")];
  if (tick.alerts.length) parts.push(tick.alerts.length === 1 ? "1 needs attention" : `${tick.alerts.length} need attention`);
  return parts.join(" · ");
}
