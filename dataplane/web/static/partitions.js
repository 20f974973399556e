// Who leads and follows what, as a map of streams by hosts and as a table; and what has changed.

import { colours, prepared } from "./draw.js";
import { byName, clock, count } from "./format.js";
import { Rows, element, text } from "./rows.js";

const canvas = document.getElementById("map-canvas");
const box = document.getElementById("map");
const said = document.getElementById("map-said");
const summary = document.getElementById("partition-summary");
const table = document.getElementById("partition-rows");
const details = document.getElementById("partition-details");
const none = document.getElementById("no-events");
const LABEL = 168;
const WORDS = { failover: "failover", joined: "joined", left: "left" };

class EventRow {
  constructor(event) {
    const words = { failover: `${event.what}: from ${event.source} to ${event.target}` };
    this.element = element("li", {}, element("time", {}, clock(event.at)), element("span", { class: event.kind }, WORDS[event.kind] ?? event.kind), element("span", {}, words[event.kind] ?? event.what));
  }

  show() {}
}

const events = new Rows(document.getElementById("events"), (event) => new EventRow(event));

export class Partitions {
  constructor() {
    this.version = -1;
    this.wanted = -1;
    this.visible = false;
    this.streams = {};
    this.hosts = [];
    new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.bring();
    }, { rootMargin: "200px" }).observe(document.getElementById("partitions"));
    details.addEventListener("toggle", () => this.fill());
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => text(said, ""));
  }

  show(tick) {
    this.wanted = tick.placement;
    this.hosts = tick.sample ? [...tick.sample.hosts].sort((a, b) => byName(a.name, b.name)) : [];
    events.update([...tick.events].reverse(), (event) => event.number);
    none.hidden = tick.events.length > 0;
    if (this.visible) this.bring();
  }

  async bring() {
    if (this.version === this.wanted || this.asking) return;
    this.asking = true;
    try {
      const answer = await fetch("/partitions");
      if (!answer.ok) return;
      const told = await answer.json();
      this.version = told.version;
      this.wanted = Math.max(this.wanted, told.version);
      this.streams = told.streams;
      this.draw();
      this.fill();
    } finally {
      this.asking = false;
    }
  }

  draw() {
    const names = Object.keys(this.streams);
    const columns = this.columns();
    const all = names.reduce((n, name) => n + this.streams[name].length, 0);
    const led = names.reduce((n, name) => n + this.streams[name].filter((each) => each[3]).length, 0);
    text(summary, all ? `${count(all, "partition")}, ${led === all ? "all led" : `${count(all - led, "without a leader", "without a leader")}`}.` : "There are none: this node is alone.");
    box.hidden = !all;
    if (!all) return;
    this.cell = columns.length > 24 ? 13 : Math.min(44, Math.max(18, (box.clientWidth - LABEL - 20) / columns.length));
    this.tall = names.length > 24 ? 13 : 20;
    const width = LABEL + this.cell * columns.length + 8;
    const height = 26 + this.tall * names.length;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = prepared(canvas, width, height);
    context.font = `${this.tall > 14 ? 12.5 : 11}px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    context.fillStyle = colours.soft;
    context.fillText(columns.length > 3 ? `${columns.length} hosts, by name` : "", LABEL, 10);
    names.forEach((name, i) => this.row(context, name, 26 + this.tall * i, columns));
  }

  columns() {
    return this.hosts.map((host) => host.node);
  }

  row(context, name, y, columns) {
    const middle = y + this.tall / 2;
    context.fillStyle = colours.ink;
    context.fillText(shortened(context, name), 0, middle);
    const leads = new Map();
    const follows = new Map();
    for (const [, leader, followers, isLed] of this.streams[name]) {
      leads.set(leader, (leads.get(leader) ?? true) && isLed);
      for (const node of followers) follows.set(node, true);
    }
    const side = Math.min(this.tall - 4, this.cell - 4, 13);
    columns.forEach((node, i) => {
      const x = LABEL + this.cell * i;
      context.fillStyle = colours.fill;
      if (!leads.has(node) && !follows.has(node)) context.fillRect(x + side / 2 - 1, middle - 1, 2, 2);
      if (follows.has(node)) {
        context.strokeStyle = colours.line;
        context.globalAlpha = 0.6;
        context.strokeRect(x + 0.75, middle - side / 2 + 0.75, side - 1.5, side - 1.5);
        context.globalAlpha = 1;
      }
      if (leads.has(node)) {
        context.fillStyle = leads.get(node) ? colours.line : colours["crit-edge"];
        const inner = follows.has(node) ? 2.5 : 0;
        context.fillRect(x + inner, middle - side / 2 + inner, side - 2 * inner, side - 2 * inner);
      }
    });
  }

  point(event) {
    const names = Object.keys(this.streams);
    const name = names[Math.floor((event.offsetY - 26) / this.tall)];
    const node = this.columns()[Math.floor((event.offsetX - LABEL) / this.cell)];
    const host = this.hosts.find((each) => each.node === node);
    if (!name || !host) return text(said, "");
    const leads = this.streams[name].filter((each) => each[1] === node).map((each) => each[0]);
    const follows = this.streams[name].filter((each) => each[2].includes(node)).map((each) => each[0]);
    const parts = [];
    if (leads.length) parts.push(`leads ${leads.join(", ")}`);
    if (follows.length) parts.push(`follows ${follows.join(", ")}`);
    text(said, `${name} on ${host.name}: ${parts.join("; ") || "nothing"}`);
  }

  fill() {
    if (!details.open) return;
    const named = new Map(this.hosts.map((host) => [host.node, host.name]));
    const rows = [];
    for (const name in this.streams)
      for (const [number, leader, followers, isLed] of this.streams[name]) {
        if (rows.length >= 2000) break;
        const led = isLed ? (named.get(leader) ?? leader) : "no host";
        rows.push(element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, number), element("td", {}, led), element("td", { class: "wide" }, followers.map((node) => named.get(node) ?? node).join(", "))));
      }
    table.replaceChildren(...rows);
  }
}

function shortened(context, name) {
  if (context.measureText(name).width <= LABEL - 14) return name;
  let length = name.length;
  while (length > 1 && context.measureText(`${name.slice(0, length)}…`).width > LABEL - 14) length -= 1;
  return `${name.slice(0, length)}…`;
}
