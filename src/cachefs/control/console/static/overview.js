// The tiles, the tiers, the origin, and the mounts of the node.
import { $, fillTable, make, meter, setFigure, setText } from "./dom.js";
import { bytes, bytesParts, count, percent, printable, rate, short, time, timeParts } from "./format.js";
import { all, at, one, sum } from "./history.js";

const RECENT_ERROR_S = 300;
const TONES = { normal: "good", unstable: "warn", down: "bad" };
const WORDS = { normal: "Normal", unstable: "Unstable", down: "Down" };

export function showTiles(snapshot, row) {
  const [number, unit] = bytesParts(row.read ?? null);
  setFigure($("t-read"), [number, unit && `${unit}/s`]);
  setText($("t-read-more"), row.read === undefined ? "\u00a0" : `${rate(row.origin)} from the origin`);
  setFigure($("t-hit"), [percent(row.ratio), ""]);
  setText($("t-hit-more"), row.ratio === undefined || row.ratio === null ? "nothing was read" : `of ${count(row.blocks, "block")}`);
  setFigure($("t-late"), timeParts(row.p50));
  setText($("t-late-more"), row.p50 ? `median; 99 % within ${time(row.p99)}` : "nothing was read");
  setFigure($("t-flight"), [short(row.waiting), ""]);
  setText($("t-flight-more"), `${short(row.inFlight)} of ${short(one(snapshot, "cachefs_origin_request_limit"))} to the origin`);
  const used = sum(snapshot, "cachefs_tier_used_bytes");
  const quota = sum(snapshot, "cachefs_tier_quota_bytes");
  setFigure($("t-used"), bytesParts(used));
  setText($("t-used-more"), quota ? `${percent(used / quota)} of ${bytes(quota)}` : "no tier");
}

export function showTiers(snapshot, row) {
  const state = (path) => all(snapshot, "cachefs_tier_health").find(([has, is]) => has[0] === path && is === 1)?.[0][2];
  fillTable($("tiers"), all(snapshot, "cachefs_tier_quota_bytes").map(([[path, medium], quota]) => {
    const value = (name) => at(snapshot, `cachefs_tier_${name}`, path);
    const [used, pinned, health] = [value("used_bytes"), value("pinned_bytes"), state(path)];
    const text = `${bytes(used)} of ${bytes(quota)} (${percent(quota ? used / quota : 0)})`;
    return {
      key: path,
      cells: [
        { is: path, make: () => [medium, make("span", { class: "sub" }, printable(path))] },
        { is: health, kind: "state-cell", make: () => dot(TONES[health], WORDS[health] || "Unknown") },
        { is: text, kind: "wide", make: () => meter(used / quota, text) },
        { text: pinned ? bytes(pinned) : "–", kind: "number" },
        { text: rate(row.tiers[path] ?? null), kind: "number" },
        { text: bytes(value("admitted_bytes_total")), kind: "number" },
        { text: `${short(value("evicted_blocks_total"))}`, kind: "number" },
        { text: short(value("read_errors_total") + value("write_errors_total")), kind: "number" },
        { text: short(value("bad_blocks_total")), kind: "number" },
      ],
    };
  }));
  const down = one(snapshot, "cachefs_origin_breaker_open");
  const facts = [
    ["Origin", down ? "Does not answer" : "Answers"],
    ["Requests", short(sum(snapshot, "cachefs_origin_requests_total"))],
    ["Received", bytes(one(snapshot, "cachefs_origin_received_bytes_total"))],
    ["Failed requests", short(one(snapshot, "cachefs_origin_errors_total"))],
    ["Sent again", short(one(snapshot, "cachefs_origin_retries_total"))],
  ];
  const members = all(snapshot, "cachefs_shared_members");
  if (members.length) facts.push(["Shared tier", members.map(([[name], n]) => `${n} ${name}`).join(", ")]);
  const unsent = all(snapshot, "cachefs_unsent_files");
  if (unsent.length) facts.push(["Unsent files", short(sum(snapshot, "cachefs_unsent_files"))]);
  facts.push(["Memory of the daemon", bytes(one(snapshot, "process_resident_memory_bytes"))]);
  const place = $("origin");
  if (place.children.length !== facts.length) {
    place.replaceChildren(...facts.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  facts.forEach(([name, value], i) => {
    setText(place.children[i].firstChild, name);
    setText(place.children[i].lastChild, value);
  });
}

export function dot(tone, text) {
  const root = make("span", { class: tone || "" }, make("span", { class: "dot", "aria-hidden": "true" }), text);
  return root;
}

export function showHead(snapshot) {
  const [[version, source, mountpoint]] = all(snapshot, "cachefs_info")[0];
  setText($("mountpoint"), printable(mountpoint));
  setText($("source"), source);
  setText($("version"), `cachefs ${version}, data path ${snapshot.data_path}`);
  setText($("command"), `cachefs console ${/^[\w/.-]+$/.test(mountpoint) ? mountpoint : `'${printable(mountpoint).replaceAll("'", "'\\''")}'`}`);
  document.title = `${printable(mountpoint)} – cachefs console`;
  const unhealthy = all(snapshot, "cachefs_tier_health").some(([has, is]) => is === 1 && has[2] !== "normal");
  if (snapshot.unready) showState("bad", "Not ready");
  else if (one(snapshot, "cachefs_origin_breaker_open")) showState("warn", "Origin away");
  else if (unhealthy) showState("warn", "Disk trouble");
  else if (snapshot.problem) showState("warn", "Unsent files");
  else showState("good", "Serving");
}

export function showState(tone, text) {
  $("state").className = `pill ${tone}`;
  setText($("state-text"), text);
}

/** What the notice says of a mount that answers; "" if all is well. */
export function troubleOf(snapshot) {
  if (snapshot.unready) return `The mount is not ready: ${snapshot.unready}.`;
  if (one(snapshot, "cachefs_origin_breaker_open")) return "The origin does not answer. The mount serves what is cached.";
  if (snapshot.problem) return `${snapshot.problem}.`;
  const recent = snapshot.errors.filter((error) => snapshot.at - error.last_at < RECENT_ERROR_S);
  if (recent.length) {
    const said = recent.map((error) => `${error.operation}: ${error.errno}, ${error.count} times`).join("; ");
    return `Programs got errors (${said}). \`cachefs status\` with the mountpoint and the log say why.`;
  }
  return "";
}

export function showMounts(rows, open) {
  fillTable($("mounts"), rows.map((row) => {
    const asked = (row.hits || 0) + (row.misses || 0);
    const tone = row.state !== "serving" || row.is_healthy === false || row.is_down ? "warn" : "good";
    const text = row.is_down ? "Origin away" : row.is_healthy === false ? "Disk trouble" : row.state === "serving" ? "Serving" : row.state[0].toUpperCase() + row.state.slice(1);
    const name = printable(row.mountpoint);
    return {
      key: row.mountpoint,
      cells: [
        { is: `${row.is_this} ${row.address}`, make: () => [
          row.is_this || !row.address ? name : make("a", { href: `http://${reachable(row.address)}/`, onclick: (event) => open(event, row) }, name),
          make("span", { class: "sub" }, row.is_this ? `${row.source} (this page)` : row.source)] },
        { is: text, kind: "state-cell", make: () => dot(tone, text) },
        { text: row.is_this ? percent(row.ratio) : asked ? percent(row.hits / asked) : "–", kind: "number" },
        row.quota_bytes ? { is: row.used_bytes, kind: "wide", make: () => meter(row.used_bytes / row.quota_bytes, `${bytes(row.used_bytes)} of ${bytes(row.quota_bytes)}`) } : { text: "–", kind: "wide" },
      ],
    };
  }));
}

/** An address without a host of its own is reached as this page was. */
function reachable(address) {
  return address.replace(/^(0\.0\.0\.0|\[::\])(?=:)/, location.hostname);
}
