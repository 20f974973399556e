// A step's timeline: rows a second of each part of a stream over three minutes, and what each did in the last whole step.

import { colours, prepared } from "./draw.js";
import { duration, number } from "./format.js";
import { Series } from "./series.js";
import { element, text } from "./rows.js";

const LANE = 40;
const TOP = 22;
const BOTTOM = 20;
const LABEL = 112;
const FILLED = 12; // buckets between two looks
const canvas = document.getElementById("lane-canvas");
const box = document.getElementById("lanes");
const body = document.querySelector("#step-table tbody");
const caption = document.getElementById("step-caption");
const title = document.getElementById("step-stream");

export class Steps {
  constructor() {
    this.name = null;
    this.lanes = [];
    this.visible = false;
    this.asked = 0;
    new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.draw();
    }).observe(box);
  }

  /** Show this stream, with what the server has kept of it. */
  async choose(name) {
    this.name = name;
    this.lanes = [];
    text(title, name);
    const asked = ++this.asked;
    const answer = await fetch(`/stream?name=${encodeURIComponent(name)}`);
    if (!answer.ok || asked !== this.asked) return;
    const told = await answer.json();
    const made = (values) => new Series(values.length, values, told.end);
    this.bucketS = told.bucket_s;
    this.now = told.end;
    this.version = made(told.version);
    this.lanes = [{ name: "producers", rate: made(told.rate), waiting: made(told.waiting), blocks: true }];
    for (const task in told.tasks) this.lanes.push({ name: task, rate: made(told.tasks[task].rate), waiting: made(told.tasks[task].waiting), blocks: false });
    box.style.height = `${TOP + BOTTOM + LANE * this.lanes.length}px`;
    this.draw();
    this.table();
  }

  took(stream, at) {
    if (!this.lanes.length || !stream || stream.name !== this.name) return;
    const bucket = Math.floor(at / this.bucketS);
    this.now = Math.max(this.now, bucket);
    this.version.spread(bucket, stream.version, FILLED);
    this.lanes[0].rate.spread(bucket, stream.rate, FILLED);
    this.lanes[0].waiting.spread(bucket, stream.waiting, FILLED);
    for (const task of stream.tasks) {
      const lane = this.lanes.find((each) => !each.blocks && each.name === task.name);
      if (!lane) continue;
      lane.rate.spread(bucket, task.rate, FILLED);
      lane.waiting.spread(bucket, task.waiting, FILLED);
    }
    if (this.visible) {
      this.draw();
      this.table();
    }
  }

  /** [bucket, version] of each change of version. */
  changes() {
    const found = [];
    let before = NaN;
    for (let bucket = this.now - this.version.values.length + 1; bucket <= this.now; bucket++) {
      const version = this.version.get(bucket);
      if (version !== version) continue;
      if (before === before && version > before) found.push([bucket, Math.round(version)]);
      before = version;
    }
    return found;
  }

  draw() {
    if (!this.lanes.length) return;
    const width = box.clientWidth;
    const height = TOP + BOTTOM + LANE * this.lanes.length;
    const context = prepared(canvas, width, height);
    if (!context) return;
    const n = this.version.values.length;
    const label = Math.min(LABEL, width / 4);
    const dx = (width - label) / n;
    const first = this.now - n + 1;
    context.font = `12.5px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    this.lanes.forEach((lane, i) => this.lane(context, lane, TOP + LANE * i, { label, dx, n, first, width }));
    context.textBaseline = "alphabetic";
    this.marks(context, { label, dx, first, width, height });
  }

  lane(context, lane, y, { label, dx, n, first, width }) {
    const base = y + LANE - 6;
    const tall = LANE - 12;
    let top = 0;
    for (let i = 0; i < n; i++) top = Math.max(top, lane.rate.get(first + i) || 0);
    context.fillStyle = lane.blocks ? colours.block : colours.wait;
    context.globalAlpha = 0.42;
    for (let i = 0; i < n; i++) if (lane.waiting.get(first + i) > 0) context.fillRect(label + i * dx, base - tall, dx + 0.4, tall);
    context.globalAlpha = 1;
    context.fillStyle = colours.line;
    const wide = Math.max(1, dx - (dx > 3 ? 1 : 0));
    if (top > 0)
      for (let i = 0; i < n; i++) {
        const value = lane.rate.get(first + i);
        if (value > 0) context.fillRect(label + i * dx, base - (tall * value) / top, wide, (tall * value) / top);
      }
    context.strokeStyle = colours.hair;
    context.beginPath();
    context.moveTo(label, base + 0.5);
    context.lineTo(width, base + 0.5);
    context.stroke();
    context.fillStyle = colours.ink;
    context.fillText(lane.name, 0, base - tall / 2 - 6, label - 12);
    context.fillStyle = colours.soft;
    context.fillText(top > 0 ? `to ${number(top)}/s` : "nothing", 0, base - tall / 2 + 9, label - 12);
  }

  marks(context, { label, dx, first, width, height }) {
    const end = height - BOTTOM;
    let free = label;
    for (const [bucket, version] of this.changes()) {
      const x = Math.round(label + (bucket - first) * dx) + 0.5;
      context.strokeStyle = colours.faint;
      context.beginPath();
      context.moveTo(x, TOP - 8);
      context.lineTo(x, end);
      context.stroke();
      if (x < free) continue;
      context.fillStyle = colours.soft;
      const said = `step ${version}`;
      const wide = context.measureText(said).width;
      if (x + 4 + wide > width) continue;
      context.fillText(said, x + 4, TOP - 8);
      free = x + wide + 14;
    }
    context.fillStyle = colours.soft;
    for (let minutes = 0; minutes <= 2; minutes++) {
      const said = minutes ? `−${minutes} min` : "now";
      const x = label + (this.now - (60 * minutes) / this.bucketS - first + 1) * dx;
      context.fillText(said, x - context.measureText(said).width, height - 5);
    }
  }

  /** The last whole step: of each part its rows, and the shares of the time in which it moved some, and in which somebody waited. */
  table() {
    const changes = this.changes();
    const whole = changes.length > 1 ? [changes[changes.length - 2], changes[changes.length - 1]] : null;
    const from = whole ? whole[0][0] : this.now - 59;
    const to = whole ? whole[1][0] : this.now + 1;
    const seconds = (to - from) * this.bucketS;
    text(caption, whole ? `Step ${whole[0][1]}, ${duration(seconds)}` : "The last minute: no whole step is in sight");
    while (body.children.length > this.lanes.length) body.lastElementChild.remove();
    this.lanes.forEach((lane, i) => this.row(body.children[i] ?? newRow(), lane, from, to));
  }

  row(row, lane, from, to) {
    let rows = 0;
    let busy = 0;
    let waited = 0;
    let known = 0;
    for (let bucket = from; bucket < to; bucket++) {
      const rate = lane.rate.get(bucket);
      if (rate !== rate) continue;
      known += 1;
      rows += rate * this.bucketS;
      if (lane.waiting.get(bucket) > 0) waited += 1;
      if (rate > 0) busy += 1;
    }
    const share = (part) => (known ? Math.round((100 * part) / known) : 0);
    const [name, total, rate, time, moving, waiting] = row.children;
    text(name, lane.name);
    text(total, number(Math.round(rows)));
    text(rate, number(known ? rows / (known * this.bucketS) : null));
    const [moves, waits] = time.firstElementChild.children;
    moves.style.width = `${share(busy)}%`;
    waits.style.width = `${share(waited)}%`;
    waits.className = lane.blocks ? "k-block" : "k-wait";
    text(moving, `${share(busy)} %`);
    text(waiting, `${share(waited)} %`);
  }
}

function newRow() {
  const shares = element("div", { class: "shares", "aria-hidden": "true" }, element("i", { class: "k-busy" }), element("i", { class: "k-wait" }));
  const row = element("tr", {}, element("th", { scope: "row" }), element("td", { class: "n" }), element("td", { class: "n" }), element("td", { class: "wide" }, shares), element("td", { class: "n" }), element("td", { class: "n" }));
  body.append(row);
  return row;
}
