// Lines and cells on canvases, in the colours of the page. Nothing is drawn that is not seen.

export const colours = {};

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "faint", "hair", "fill", "line", "area", "wait", "block", "warn-edge", "crit-edge", "paper"])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
}

/** The canvas's context, cleared, of its size on the screen; null where it has none. */
export function prepared(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const w = Math.round(width * ratio);
  const h = Math.round(height * ratio);
  if (w < 2 || h < 2) return null;
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** A sparkline of a series that ends now. `most`: what its height stands for at least. */
export class Spark {
  constructor(parent, most = 0) {
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    parent.append(this.canvas);
    this.most = most;
    this.width = 0;
    this.height = 0;
  }

  measure() {
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
  }

  draw(series, now) {
    if (!this.width) this.measure();
    const context = prepared(this.canvas, this.width, this.height);
    if (!context) return;
    const n = series.values.length;
    const first = now - n + 1;
    let top = this.most;
    for (let i = 0; i < n; i++) {
      const value = series.get(first + i);
      if (value > top) top = value;
    }
    const dx = (this.width - 3) / (n - 1);
    const scale = top > 0 ? (this.height - 3) / top : 0;
    const base = this.height - 1;
    context.strokeStyle = colours.hair;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(0, base + 0.5);
    context.lineTo(this.width, base + 0.5);
    context.stroke();
    if (!(top > 0)) return;
    const line = new Path2D();
    const area = new Path2D();
    let from = -1;
    for (let i = 0; i <= n; i++) {
      const value = i < n ? series.get(first + i) : NaN;
      if (value === value) {
        const x = i * dx;
        const y = base - value * scale;
        if (from < 0) {
          line.moveTo(x, y);
          area.moveTo(x, base);
          from = i;
        }
        line.lineTo(x, y);
        area.lineTo(x, y);
      } else if (from >= 0) {
        area.lineTo((i - 1) * dx, base);
        area.closePath();
        from = -1;
      }
    }
    context.fillStyle = colours.area;
    context.fill(area);
    context.strokeStyle = colours.line;
    context.lineWidth = 1.2;
    context.lineJoin = "round";
    context.stroke(line);
    const last = series.get(now);
    if (last === last) {
      context.fillStyle = colours.line;
      context.beginPath();
      context.arc((n - 1) * dx, base - last * scale, 1.8, 0, 7);
      context.fill();
    }
  }
}
