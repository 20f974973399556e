// Elements that follow a list by its keys: made once, kept, moved only where the order has changed.

/** Set a text where it is another. */
export function text(node, value) {
  if (node.lastValue !== value) {
    node.lastValue = value;
    node.textContent = value;
  }
}

export function flag(node, name, on) {
  if (node.classList.contains(name) !== on) node.classList.toggle(name, on);
}

export function element(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const row = entry.target.row;
      if (row) {
        row.visible = entry.isIntersecting;
        if (row.visible && row.last) row.show(...row.last);
      }
    }
  },
  { rootMargin: "120px" },
);

/** Rows that are not seen follow at every so many updates: they are read aloud, and searched for, all the same. */
const UNSEEN = 5;

/** Rows are objects with an `element`, made by `make(item)`, and a `show(item, ...more)`, which draws where `visible`. */
export class Rows {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.rows = new Map();
    this.turn = 0;
  }

  update(items, key, ...more) {
    const left = new Set(this.rows.keys());
    let turn = this.turn++;
    let next = this.parent.firstElementChild;
    for (const item of items) {
      const name = key(item);
      left.delete(name);
      let row = this.rows.get(name);
      if (!row) {
        row = this.make(item);
        row.element.row = row;
        row.visible = false;
        this.rows.set(name, row);
        seen.observe(row.element);
      }
      if (row.element !== next) this.parent.insertBefore(row.element, next);
      else next = next.nextElementSibling;
      row.last = [item, ...more];
      if (row.visible || !row.shown || turn++ % UNSEEN === 0) row.show(item, ...more);
      row.shown = true;
    }
    for (const name of left) {
      const row = this.rows.get(name);
      seen.unobserve(row.element);
      row.element.remove();
      this.rows.delete(name);
    }
  }

  remeasure() {
    for (const row of this.rows.values()) for (const spark of row.sparks ?? []) spark.width = 0;
  }
}

/** The first of a list, and a button for all of it. */
export class Folded {
  constructor(button, most, one, many) {
    this.button = button;
    this.most = most;
    this.open = false;
    this.words = [one, many];
    button.addEventListener("click", () => {
      this.open = !this.open;
      this.changed();
    });
    this.changed = () => {};
  }

  shown(items) {
    const folds = items.length > this.most;
    this.button.hidden = !folds;
    if (folds) text(this.button, this.open ? `Show the first ${this.most}` : `Show all ${items.length} ${this.words[1]}`);
    return folds && !this.open ? items.slice(0, this.most) : items;
  }
}
