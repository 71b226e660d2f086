// Rates and percentiles from the counters of the snapshots. The page keeps 15 minutes.
const KEPT = 900;
const SMOOTH_S = 5;

/** The values of a metric: pairs of labels and value. */
export const all = (snapshot, name) => snapshot.metrics[name] || [];

/** The value of a metric without labels; null if it is not exported. */
export function one(snapshot, name) {
  const found = snapshot.metrics[name];
  return found && found.length ? found[0][1] : null;
}

export const sum = (snapshot, name) => all(snapshot, name).reduce((total, pair) => total + pair[1], 0);

/** The value of a metric with these labels (the first ones); 0 if there is none. */
export function at(snapshot, name, ...labels) {
  const found = all(snapshot, name).find(([has]) => labels.every((label, i) => has[i] === label));
  return found ? found[1] : 0;
}

/** READs that took no longer than each bound, of all outcomes. */
function reads(snapshot) {
  const total = new Array(snapshot.bounds_s.length + 1).fill(0);
  for (const [[operation], histogram] of all(snapshot, "cachefs_fuse_request_seconds")) {
    if (operation === "read") histogram.cumulated.forEach((n, i) => { total[i] += n; });
  }
  return total;
}

/** The time within which a share of the requests were answered, interpolated in its bucket. */
export function quantile(bounds, cumulated, share) {
  const total = cumulated[cumulated.length - 1];
  if (total <= 0) return null;
  const wanted = total * share;
  const place = cumulated.findIndex((n) => n >= wanted);
  if (place >= bounds.length) return bounds[bounds.length - 1];
  const below = place ? cumulated[place - 1] : 0;
  const low = place ? bounds[place - 1] : bounds[0] / 2;
  const part = (wanted - below) / Math.max(1e-9, cumulated[place] - below);
  return low * (bounds[place] / low) ** part;
}

export class History {
  constructor() {
    this.snapshots = [];
    this.rows = [];
  }

  /** Add a snapshot. Return its row, or null if it is known already. */
  add(snapshot) {
    const last = this.latest;
    if (last && last.at === snapshot.at) return null;
    const began = "process_start_time_seconds";
    if (last && (one(last, began) !== one(snapshot, began) || snapshot.at < last.at)) this.snapshots = [];
    this.snapshots.push(snapshot);
    while (this.snapshots.length > 2 && snapshot.at - this.snapshots[1].at >= SMOOTH_S) this.snapshots.shift();
    const row = this.row(snapshot);
    if (this.rows.length && snapshot.at - this.rows.at(-1).at > 3) this.rows.push({ at: snapshot.at - 1 });
    this.rows.push(row);
    if (this.rows.length > KEPT) this.rows.splice(0, this.rows.length - KEPT);
    return row;
  }

  get latest() {
    return this.snapshots.at(-1);
  }

  row(now) {
    const count = this.snapshots.length;
    const row = { at: now.at, tiers: {}, waiting: one(now, "cachefs_fuse_requests_waiting"),
      readers: one(now, "cachefs_cache_readers_waiting"), inFlight: one(now, "cachefs_origin_requests_in_flight"),
      queued: one(now, "cachefs_origin_requests_queued") };
    if (count < 2) return row;
    const before = this.snapshots[count - 2];
    const seconds = now.at - before.at;
    const perSecond = (value) => Math.max(0, value) / seconds;
    const total = (name) => perSecond(sum(now, name) - sum(before, name));
    row.read = total("cachefs_user_read_bytes_total");
    row.origin = total("cachefs_origin_received_bytes_total");
    row.shared = total("cachefs_shared_hit_bytes_total");
    for (const [[path], value] of all(now, "cachefs_tier_hit_bytes_total")) {
      row.tiers[path] = perSecond(value - at(before, "cachefs_tier_hit_bytes_total", path));
    }
    const first = this.snapshots[0];
    const grown = (name) => sum(now, name) - sum(first, name);
    const hits = grown("cachefs_cache_hits_total");
    const blocks = hits + grown("cachefs_cache_misses_total");
    row.ratio = blocks > 0 ? hits / blocks : null;
    row.blocks = blocks;
    const earlier = reads(first);
    const spread = reads(now).map((n, i) => n - earlier[i]);
    row.readsPerSecond = spread.at(-1) / (now.at - first.at);
    [row.p50, row.p95, row.p99] = [0.5, 0.95, 0.99].map((share) => quantile(now.bounds_s, spread, share));
    return row;
  }
}
