// What `dataplane diagnose` found, where the server tells of it: the most costly cause first.

import { element } from "./rows.js";

const section = document.getElementById("causes");
const list = document.getElementById("cause-list");
let shown = "";

export function showCauses(causes) {
  section.hidden = !causes || !causes.length;
  const now = JSON.stringify(causes ?? []);
  if (now === shown) return;
  shown = now;
  list.replaceChildren(
    ...(causes ?? []).map((cause) =>
      element(
        "li",
        {},
        element("span", { class: "what" }, cause.what),
        element("span", { class: "cost" }, cause.cost),
        element("span", { class: "where" }, cause.where),
        element("span", { class: "chain" }, cause.chain),
        element("span", { class: "chain" }, cause.change),
      ),
    ),
  );
}
