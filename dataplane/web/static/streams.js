// Streams as pipelines: what comes in, then each task as a stage with its rate, what is pending, and its lag.

import { anchor } from "./alerts.js";
import { Spark } from "./draw.js";
import { byName, duration, number, share, size } from "./format.js";
import { Folded, Rows, element, text } from "./rows.js";

class Stage {
  constructor(name, id) {
    this.task = element("span", { class: "task", title: name });
    this.rate = element("span");
    this.left = element("span");
    this.tag = element("span", { class: "tag" });
    this.tag.hidden = true;
    const spark = element("div", { class: "spark" });
    const head = element("div", { class: "head" }, this.task, element("span", { class: "rate" }, this.rate, element("small", {}, " rows/s")));
    this.element = element("li", { class: "stage", id }, head, element("div", { class: "lag" }, this.left, this.tag), spark);
    this.task.textContent = name;
    this.spark = new Spark(spark);
  }

  show(rate, said, alert, series, now, visible) {
    text(this.rate, number(rate));
    text(this.left, said);
    const level = alert ? alert.level : "";
    if (this.level !== level) {
      this.level = level;
      this.element.className = `stage ${level}`;
      this.tag.hidden = !alert;
    }
    if (alert) text(this.tag, alert.tag);
    if (visible) this.spark.draw(series, now);
  }
}

function held(stream) {
  const rows = stream.max_rows ? `${number(stream.rows)} of ${number(stream.max_rows)} rows` : `${number(stream.rows)} rows`;
  const bytes = stream.max_bytes ? share(stream.bytes, stream.max_bytes) : size(stream.bytes);
  const parts = [rows, bytes];
  if (stream.rows) parts.push(`oldest ${duration(stream.oldest_s)}`);
  if (stream.version >= 0) parts.push(`step ${number(stream.version)}`);
  if (stream.closed) parts.push("closed");
  return parts.join(" · ");
}

function said(task) {
  if (task.waiting && !task.pending) return task.waiting === 1 ? "1 consumer waits" : `${number(task.waiting)} consumers wait`;
  const parts = [`${number(task.pending)} pending`];
  if (task.pending && task.lag_s !== null && task.lag_s >= 1) parts.push(duration(task.lag_s));
  else if (task.leased) parts.push(`${number(task.leased)} leased`);
  return parts.join(" · ");
}

class StreamRow {
  constructor(stream, choose) {
    this.name = element("button", { class: "name", type: "button", "aria-pressed": "false" }, stream.name);
    this.name.addEventListener("click", () => choose(stream.name));
    this.held = element("p", { class: "held" });
    this.stages = element("ol", { class: "stages", "aria-label": `Stages of ${stream.name}` });
    this.element = element("li", { class: "stream", id: anchor("stream", stream.name) }, element("div", {}, this.name, this.held), this.stages);
    this.input = new Stage("producers", anchor("producers", stream.name));
    this.stages.append(this.input.element);
    this.tasks = new Map();
    this.sparks = [this.input.spark];
  }

  show(stream, book, alerts, chosen) {
    const on = stream.name === chosen;
    if (this.on !== on) {
      this.on = on;
      this.element.toggleAttribute("data-chosen", on);
      this.name.setAttribute("aria-pressed", String(on));
    }
    text(this.held, held(stream));
    const waiting = stream.waiting ? (stream.waiting === 1 ? "1 waits for room" : `${number(stream.waiting)} wait for room`) : " ";
    this.input.show(stream.rate, waiting, alerts.get(`stream ${stream.name}`), book.of("stream", stream.name, "rate"), book.now, this.visible);
    for (const task of stream.tasks) {
      const key = `${stream.name}/${task.name}`;
      let stage = this.tasks.get(task.name);
      if (!stage) {
        stage = new Stage(task.name, anchor("task", key));
        this.tasks.set(task.name, stage);
        this.stages.append(stage.element);
        this.sparks.push(stage.spark);
      }
      stage.show(task.rate, said(task), alerts.get(`task ${key}`), book.of("task", stream.name, task.name, "rate"), book.now, this.visible);
    }
  }
}

export class Streams {
  constructor(choose) {
    this.rows = new Rows(document.getElementById("stream-list"), (stream) => new StreamRow(stream, choose));
    this.folded = new Folded(document.getElementById("more-streams"), 12, "stream", "streams");
    this.filter = document.getElementById("filter");
    this.none = document.getElementById("no-streams");
    this.listed = [];
  }

  /** Those that need attention first, then by name. */
  show(streams, book, alerts, chosen) {
    const worst = (stream) => (alerts.has(`stream ${stream.name}`) || stream.tasks.some((task) => alerts.has(`task ${stream.name}/${task.name}`)) ? 0 : 1);
    const wanted = this.filter.value.trim().toLowerCase();
    const found = streams.filter((stream) => !wanted || stream.name.toLowerCase().includes(wanted));
    const ordered = found.map((stream) => [worst(stream), stream]).sort((a, b) => a[0] - b[0] || byName(a[1].name, b[1].name));
    this.listed = this.folded.shown(ordered.map(([, stream]) => stream));
    this.rows.update(this.listed, (stream) => stream.name, book, alerts, chosen);
    text(this.none, streams.length ? "No stream has this in its name." : "No stream is open.");
    this.none.hidden = this.listed.length > 0;
  }
}
