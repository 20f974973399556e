// The page: a snapshot, then ticks as server-sent events. Each tick is all of a moment, so one that is missed costs nothing.

import { flagged, showAlerts, summary } from "./alerts.js";
import { showCauses } from "./causes.js";
import { readColours } from "./draw.js";
import { Hosts } from "./hosts.js";
import { Partitions } from "./partitions.js";
import { text } from "./rows.js";
import { Book } from "./series.js";
import { Steps } from "./steps.js";
import { Streams } from "./streams.js";
import { remeasureTotals, showTotals, totalsOf } from "./totals.js";
import { folded as foldedWaits, showWaits } from "./waits.js";

const STALE_MS = 6000;
const FILLED = 3; // buckets between two looks
const SECTIONS = ["streams", "step", "waits", "hosts", "partitions"];
const byId = (id) => document.getElementById(id);
const steps = new Steps();
const streams = new Streams(choose);
const hosts = new Hosts();
const partitions = new Partitions();
let book = new Book(5, 120);
let tick = null;
let chosen = null;
let paused = false;
let heardMs = performance.now();
let lost = false;

function choose(name) {
  chosen = name;
  steps.choose(name).catch(() => {});
  show();
}

/** Keep what a tick measured, also while nothing is drawn. */
function keep(now) {
  const sample = now.sample;
  if (!sample || now.down) return;
  const bucket = Math.floor(sample.at / book.bucketS);
  const fresh = bucket > book.now;
  book.now = Math.max(book.now, bucket);
  const totals = totalsOf(sample);
  for (const of of ["rows", "put", "crossed", "memory", "waiting"]) book.of("cluster", of).spread(bucket, totals[of], FILLED);
  for (const host of sample.hosts) {
    if (host.silent) continue;
    book.of("host", host.node, "memory").spread(bucket, host.memory_used, FILLED);
    book.of("host", host.node, "put").spread(bucket, host.put, FILLED);
  }
  for (const stream of sample.streams) {
    book.of("stream", stream.name, "rate").spread(bucket, stream.rate, FILLED);
    for (const task of stream.tasks) book.of("task", stream.name, task.name, "rate").spread(bucket, task.rate, FILLED);
  }
  if (fresh) book.trim();
}

function show() {
  if (!tick || document.hidden) return;
  const lists = tick.sample ?? { hosts: [], streams: [] };
  const alerts = lost ? [{ level: "critical", tag: "not live", kind: "cluster", of: "page", text: "The page has lost its server, and tries again. What follows is from before", since: tick.at }, ...tick.alerts] : tick.alerts;
  const flags = flagged(alerts);
  showAlerts(alerts);
  showCauses(tick.causes);
  text(byId("summary"), summary(tick));
  text(byId("address"), tick.address);
  text(byId("version"), `dataplane ${tick.version}`);
  if (tick.sample) showTotals(totalsOf(lists), book);
  streams.show(lists.streams, book, flags, chosen);
  hosts.show(lists.hosts, book, flags);
  showWaits(tick.waits);
  partitions.show(tick);
  byId("step").hidden = !lists.streams.length;
}

/** The stream that is shown until one is chosen: one that needs attention, else the one that most goes through. */
function first(now) {
  const ill = now.alerts.find((alert) => alert.kind === "task" || alert.kind === "stream");
  const named = ill && now.sample.streams.find((stream) => ill.of === stream.name || ill.of.startsWith(`${stream.name}/`));
  const busiest = [...now.sample.streams].sort((a, b) => (b.rate ?? 0) - (a.rate ?? 0))[0];
  return (named ?? busiest)?.name ?? null;
}

function took(now) {
  const sample = now.sample;
  if (sample && !now.down) {
    keep(now);
    if (!sample.streams.some((stream) => stream.name === chosen)) {
      chosen = first(now);
      if (chosen) steps.choose(chosen).catch(() => {});
    }
  }
  if (paused) return;
  tick = now;
  if (sample && !now.down) steps.took(sample.streams.find((stream) => stream.name === chosen), sample.at);
  show();
}

function state() {
  const stale = performance.now() - heardMs > STALE_MS + 1000 * (tick?.every_s ?? 1);
  const now = lost || stale ? "lost" : paused ? "paused" : tick && tick.down ? "lost" : "live";
  const words = { lost: tick && tick.down && !lost && !stale ? "no answer" : "not live", paused: "paused", live: "live" };
  if (byId("live").dataset.state !== now) byId("live").dataset.state = now;
  text(byId("live-text"), words[now]);
}

function listen() {
  const source = new EventSource("/events");
  source.onmessage = (event) => {
    heardMs = performance.now();
    lost = false;
    took(JSON.parse(event.data));
    state();
  };
  source.onerror = () => {
    lost = true;
    state();
    show();
    if (source.readyState === EventSource.CLOSED) {
      source.close();
      setTimeout(begin, 2000);
    }
  };
}

async function begin() {
  try {
    const answer = await fetch("/snapshot");
    if (answer.status === 401) {
      location.reload();
      return;
    }
    if (!answer.ok) throw new Error(String(answer.status));
    const told = await answer.json();
    book = new Book(told.history.bucket_s, told.history.buckets);
    book.load(told.history, told.history.end);
    lost = false;
    took(told.tick);
    state();
    listen();
  } catch {
    lost = true;
    state();
    setTimeout(begin, 2000);
  }
}

function pause() {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  text(byId("pause"), paused ? "Go on" : "Pause");
  state();
}

function step(by) {
  const names = streams.listed.map((stream) => stream.name);
  if (!names.length) return;
  const at = Math.min(names.length - 1, Math.max(0, names.indexOf(chosen) + by));
  choose(names[at]);
  streams.rows.rows.get(names[at])?.name.focus({ preventScroll: false });
}

function help() {
  byId("help").showModal();
}

const KEYS = {
  "/": () => byId("filter").focus(),
  "?": help,
  p: pause,
  j: () => step(1),
  k: () => step(-1),
};
SECTIONS.forEach((id, i) => {
  KEYS[String(i + 1)] = () => {
    byId(id).scrollIntoView();
    byId(id).focus({ preventScroll: true });
  };
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (event.target instanceof HTMLInputElement) {
    if (event.key === "Escape") {
      event.target.value = "";
      event.target.blur();
      show();
    }
    return;
  }
  const act = KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

function again() {
  readColours();
  remeasureTotals();
  streams.rows.remeasure();
  hosts.rows.remeasure();
  steps.draw();
  partitions.draw();
  show();
}

let resizing = 0;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(again, 120);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
document.addEventListener("visibilitychange", show);
byId("pause").addEventListener("click", pause);
byId("help-open").addEventListener("click", help);
byId("filter").addEventListener("input", show);
streams.folded.changed = hosts.folded.changed = foldedWaits.changed = show;
setInterval(state, 1000);
readColours();
begin();
