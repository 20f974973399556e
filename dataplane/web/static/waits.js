// Who waits for whom, and for what.

import { duration, number } from "./format.js";
import { Folded, Rows, element, text } from "./rows.js";

class WaitRow {
  constructor() {
    this.who = element("th", { scope: "row" });
    this.whom = element("td");
    this.what = element("td", { class: "wide" });
    this.since = element("td", { class: "n" });
    this.element = element("tr", {}, this.who, this.whom, this.what, this.since);
  }

  show(wait) {
    const many = wait.count > 1 && wait.stream ? `${number(wait.count)} × ` : "";
    text(this.who, `${many}${wait.who}${wait.stream ? ` of ${wait.stream}` : ""}`);
    text(this.whom, wait.whom);
    text(this.what, wait.what);
    text(this.since, wait.since_s < 1 ? "now" : duration(Math.round(wait.since_s)));
  }
}

const rows = new Rows(document.getElementById("wait-rows"), () => new WaitRow());
const none = document.getElementById("no-waits");
const scroll = document.getElementById("waits-scroll");

export const folded = new Folded(document.getElementById("more-waits"), 8, "wait", "waits");

export function showWaits(waits) {
  rows.update(folded.shown(waits), (wait) => `${wait.stream}\u0000${wait.who}\u0000${wait.whom}\u0000${wait.what.split(":")[0]}`);
  none.hidden = waits.length > 0;
  scroll.hidden = !waits.length;
}
