// Four charts, each with a table of the same values beside it. The charts are pictures for the eye
// only; the tables are for everybody.
import { $, make, setText } from "./dom.js";
import { percent, printable, rate, short, time } from "./format.js";

const LEAST_SPAN_S = 60;
const DASHES = [[], [], [6, 3], [2, 3], [8, 3, 2, 3], [4, 4]];
const color = (at) => getComputedStyle(document.documentElement).getPropertyValue(at).trim();
const tiers = (snapshot) => snapshot.metrics.cachefs_tier_hit_bytes_total || [];
const last = (values) => values.findLast((value) => value !== null && value !== undefined) ?? null;

/** What each chart shows: `series(snapshot)` are label and reader of a row. */
const CHARTS = [
  {
    id: "throughput", title: "Throughput", unit: "bytes per second", show: rate, fill: true,
    series: (snapshot) => [
      ["To readers", (row) => row.read],
      ...tiers(snapshot).map(([[path, medium]]) => [
        tiers(snapshot).filter(([labels]) => labels[1] === medium).length > 1 ? `From ${medium} ${printable(path)}` : `From ${medium}`,
        (row) => row.tiers?.[path]]),
      ...(snapshot.metrics.cachefs_shared_hit_bytes_total ? [["From the shared tier", (row) => row.shared]] : []),
      ["From the origin", (row) => row.origin],
    ],
  },
  {
    id: "ratio", title: "Hit ratio", unit: "of the blocks read", show: percent, range: [0, 1], fill: true,
    series: () => [["Hit ratio", (row) => row.ratio]],
  },
  {
    id: "latency", title: "Read latency", unit: "of READs", show: time, log: true,
    series: () => [["Median", (row) => row.p50], ["95 %", (row) => row.p95], ["99 %", (row) => row.p99]],
  },
  {
    id: "flight", title: "Requests in flight", unit: "at a time", show: short, whole: true,
    series: () => [
      ["Requests of the kernel", (row) => row.waiting],
      ["Reads that wait for the origin", (row) => row.readers],
      ["Requests to the origin", (row) => row.inFlight],
      ["Queued for the origin", (row) => row.queued],
    ],
  },
];

class Chart {
  constructor(about) {
    this.about = about;
    this.plotted = null;
    this.labels = "";
    this.cells = [];
    this.place = make("div", { class: "plot", "aria-hidden": "true" }, make("p", { class: "waiting quiet" }, "Waiting for figures"));
    this.body = make("tbody");
    this.head = make("th", { scope: "col", class: "number" }, "Now");
    this.root = make("figure", { class: "chart", id: `chart-${about.id}` },
      make("figcaption", {}, about.title, make("span", { class: "quiet" }, about.unit)),
      this.place,
      make("table", {},
        make("caption", { class: "hidden" }, `${about.title}, ${about.unit}`),
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Series"), this.head,
          make("th", { scope: "col", class: "number" }, "Mean"), make("th", { scope: "col", class: "number" }, "Most"))),
        this.body));
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  resize() {
    this.plotted?.setSize({ width: this.place.clientWidth, height: this.place.clientHeight });
  }

  build(series) {
    const { about } = this;
    this.body.replaceChildren();
    this.cells = series.map(([label], at) => {
      const cells = [0, 1, 2].map(() => make("td", { class: "number" }, "–"));
      this.body.append(make("tr", {},
        make("th", { scope: "row" }, make("span", { class: `key c${this.color(at, series)}${this.dash(at).length ? " dashed" : ""}`, "aria-hidden": "true" }), label), ...cells));
      return cells;
    });
    this.plotted?.destroy();
    this.place.replaceChildren();
    const axis = { stroke: () => color("--quiet"), font: "12px system-ui, sans-serif", grid: { stroke: () => color("--grid"), width: 1 }, ticks: { show: false } };
    this.plotted = new uPlot({
      width: this.place.clientWidth, height: this.place.clientHeight, padding: [10, 26, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "time" }, points: { size: 6 } },
      hooks: { setCursor: [(plot) => this.point(plot.cursor.idx)] },
      scales: {
        y: about.log ? { distr: 3, range: (_, low, high) => low > 0 ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high * 1.001))] : [1e-5, 1] }
          : { range: about.range ? () => about.range : (_, low, high) => [0, Math.max(about.whole ? 4 : 1024, high * 1.08)] },
      },
      axes: [
        { ...axis, size: 28, space: 90, values: (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB")) },
        { ...axis, size: 74, space: 34,
          splits: about.log || about.range || about.whole ? undefined : (_, __, low, high) => byteSplits(high),
          incrs: about.whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000] : undefined,
          values: (_, ticks) => ticks.map((tick) => tick === null ? "" : about.log && !isPowerOfTen(tick) ? "" : about.show(tick)) },
      ],
      series: [{}, ...series.map((_, at) => ({
        stroke: () => color(`--c${this.color(at, series)}`), width: at === 0 && series.length > 1 ? 2.25 : 1.75,
        dash: this.dash(at), spanGaps: false, points: { show: false },
        fill: about.fill && at === 0 ? () => `${color(`--c${this.color(at, series)}`)}1c` : undefined,
      }))],
    }, [[], ...series.map(() => [])], this.place);
  }

  color(at, series) {
    return series.length === 1 ? 1 : at % 6;
  }

  dash(at) {
    return DASHES[at % DASHES.length];
  }

  point(at) {
    const known = at !== null && at !== undefined && this.values?.[0][at] !== undefined;
    setText(this.head, known ? new Date(this.values[0][at] * 1000).toLocaleTimeString("en-GB") : "Now");
    this.cells.forEach((cells, i) => {
      const values = this.values?.[i + 1] || [];
      setText(cells[0], this.about.show(known ? values[at] : last(values.slice(-3))));
    });
  }

  draw(snapshot, rows, seconds) {
    const series = this.about.series(snapshot);
    const labels = series.map(([label]) => label).join("\n");
    if (labels !== this.labels) {
      this.labels = labels;
      this.build(series);
    }
    this.values = [rows.map((row) => row.at), ...series.map(([, read]) => rows.map((row) => read(row) ?? null))];
    // While the page knows less than the user wants to see, show what it knows.
    const span = Math.max(LEAST_SPAN_S, Math.min(seconds, snapshot.at - rows[0].at));
    this.plotted.batch(() => {
      this.plotted.setData(this.values, false);
      this.plotted.setScale("x", { min: snapshot.at - span, max: snapshot.at });
    });
    this.point(this.plotted.cursor.left >= 0 ? this.plotted.cursor.idx : null);
    this.values.slice(1).forEach((values, i) => {
      const known = values.filter((value) => value !== null);
      const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
      setText(this.cells[i][1], this.about.show(mean));
      setText(this.cells[i][2], this.about.show(known.length ? known.reduce((a, b) => Math.max(a, b)) : null));
    });
  }
}

const isPowerOfTen = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;

/** Round numbers of KiB, MiB, ... */
function byteSplits(high) {
  let step = 256;
  while (high / step > 4) step *= 2;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

export class Charts {
  constructor() {
    this.charts = CHARTS.map((about) => new Chart(about));
    $("charts").replaceChildren(...this.charts.map((chart) => chart.root));
  }

  draw(snapshot, rows, seconds) {
    const shown = rows.filter((row) => row.at >= snapshot.at - seconds);
    for (const chart of this.charts) chart.draw(snapshot, shown, seconds);
  }

  recolor() {
    for (const chart of this.charts) chart.plotted?.redraw(false);
  }
}
