// A ring of buckets of time, as the server keeps them: the mean of what came in each, NaN where nothing did.

export class Series {
  constructor(buckets, values, end) {
    this.values = new Float64Array(buckets).fill(NaN);
    this.end = end;
    this.came = 0;
    if (values) for (let i = 0; i < values.length; i++) this.values[this.at(end - values.length + 1 + i)] = values[i] ?? NaN;
    if (values && values.length && values[values.length - 1] !== null) this.came = 1;
  }

  at(bucket) {
    const n = this.values.length;
    return ((bucket % n) + n) % n;
  }

  push(bucket, value) {
    if (bucket > this.end) {
      const from = Math.max(this.end + 1, bucket - this.values.length + 1);
      for (let each = from; each <= bucket; each++) this.values[this.at(each)] = NaN;
      this.end = bucket;
      this.came = 0;
    }
    if (value === null || value === undefined || bucket < this.end) return;
    const at = this.at(bucket);
    const before = this.came ? this.values[at] : 0;
    this.came += 1;
    this.values[at] = before + (value - before) / this.came;
  }

  /** As `push`, for all buckets since the newest, where those are few: what was measured holds for them too. */
  spread(bucket, value, most) {
    if (bucket - this.end <= most) for (let each = this.end + 1; each < bucket; each++) this.push(each, value);
    this.push(bucket, value);
  }

  /** The value of a bucket that is still kept; NaN else. */
  get(bucket) {
    return bucket > this.end || bucket <= this.end - this.values.length ? NaN : this.values[this.at(bucket)];
  }
}

/** Series by names, such as of("host", node, "put"): from the snapshot's nested lists, then from ticks. */
export class Book {
  constructor(bucketS, buckets) {
    this.bucketS = bucketS;
    this.buckets = buckets;
    this.now = 0;
    this.all = new Map();
  }

  load(nested, end) {
    this.now = end;
    this.all.clear();
    const walk = (inner, names) => {
      if (Array.isArray(inner)) this.all.set(names.join("\u0000"), new Series(this.buckets, inner, end));
      else if (inner && typeof inner === "object") for (const name in inner) walk(inner[name], [...names, name]);
    };
    walk(nested, []);
  }

  of(...names) {
    const key = names.join("\u0000");
    let found = this.all.get(key);
    if (!found) this.all.set(key, (found = new Series(this.buckets, null, this.now)));
    return found;
  }

  /** Forget what has not come for the whole time. */
  trim() {
    for (const [key, series] of this.all) if (series.end < this.now - this.buckets) this.all.delete(key);
  }
}
