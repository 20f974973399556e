// Hosts: memory, disk and links, a row each. Those that need attention come first.

import { anchor } from "./alerts.js";
import { Spark } from "./draw.js";
import { byName, milliseconds, number, rate, share, size } from "./format.js";
import { Folded, Rows, element, flag, text } from "./rows.js";

class HostRow {
  constructor(host) {
    this.name = element("span");
    this.small = element("small");
    this.tag = element("span", { class: "tag" });
    const head = element("th", { scope: "row", id: anchor("host", host.node), title: `node ${host.node}` }, this.name, this.small, this.tag);
    this.fill = element("i");
    this.memory = element("span");
    const memory = element("td", { "data-of": "Memory" }, element("span", { class: "bar", "aria-hidden": "true" }, this.fill), this.memory);
    const lines = [element("div"), element("div")];
    this.sparks = lines.map((line) => new Spark(line));
    const [trend, puts] = lines.map((line) => element("td", { class: "s" }, line));
    this.cells = {};
    const cell = (name) => (this.cells[name] = element("td", { class: "n", "data-of": name }));
    this.element = element("tr", {}, head, memory, trend, cell("Disk"), cell("Put"), puts, cell("In"), cell("Out"), cell("Waiting"), cell("Leads"), cell("Follows"), cell("Answers in"));
  }

  set(name, value, zero) {
    const cell = this.cells[name];
    text(cell, value);
    flag(cell, "zero", zero);
  }

  show(host, book, alerts) {
    const alert = alerts.get(`host ${host.node}`);
    const level = alert ? alert.level : "";
    if (this.level !== level) {
      this.level = level;
      this.element.className = level;
    }
    this.tag.hidden = !alert;
    if (alert) text(this.tag, alert.tag);
    text(this.name, host.name);
    text(this.small, host.own ? "asked" : "");
    const filled = host.memory_budget ? host.memory_used / host.memory_budget : 0;
    const scaled = `scaleX(${filled.toFixed(3)})`;
    if (this.fill.scaled !== scaled) this.fill.style.transform = this.fill.scaled = scaled;
    text(this.memory, host.silent ? "–" : share(host.memory_used, host.memory_budget));
    this.set("Disk", host.silent ? "–" : size(host.disk_used), !host.disk_used);
    for (const [name, of] of [["Put", "put"], ["In", "fetched"], ["Out", "sent"]]) this.set(name, rate(host[of]), !host[of]);
    this.set("Waiting", number(host.waiting), !host.waiting);
    this.set("Leads", number(host.leads), !host.leads);
    this.set("Follows", number(host.follows), !host.follows);
    this.set("Answers in", host.silent ? "–" : milliseconds(host.answer_ms), false);
    if (!this.visible) return;
    this.sparks[0].most = host.memory_budget;
    this.sparks[0].draw(book.of("host", host.node, "memory"), book.now);
    this.sparks[1].draw(book.of("host", host.node, "put"), book.now);
  }
}

export class Hosts {
  constructor() {
    this.rows = new Rows(document.getElementById("host-rows"), (host) => new HostRow(host));
    this.folded = new Folded(document.getElementById("more-hosts"), 16, "host", "hosts");
  }

  show(hosts, book, alerts) {
    const level = (host) => (!alerts.has(`host ${host.node}`) ? 2 : alerts.get(`host ${host.node}`).level === "critical" ? 0 : 1);
    const ordered = hosts.map((host) => [level(host), host]).sort((a, b) => a[0] - b[0] || byName(a[1].name, b[1].name));
    this.rows.update(this.folded.shown(ordered.map(([, host]) => host)), (host) => host.node, book, alerts);
  }
}
