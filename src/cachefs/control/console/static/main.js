// The page: polls a snapshot once a second while it is visible, and shows it.
import { clearBrowser, openDirectory, prepareBrowser } from "./browser.js";
import { Charts } from "./charts.js";
import { act, begin, end, hasToken, look, session, whenSessionEnds } from "./client.js";
import { $, setText } from "./dom.js";
import { History, one, sum } from "./history.js";
import { showJobs } from "./jobs.js";
import { prepareLimits, readLimits } from "./limits.js";
import { showHead, showMounts, showState, showTiers, showTiles, troubleOf } from "./overview.js";
import { clearProfile, prepareProfile } from "./profile.js";

const EVERY_MS = 1000;
const MOUNTS_EVERY_MS = 5000;
const MOST_PAUSE_MS = 5000;

const figures = new History();
const charts = new Charts();
let timer = null;
let failures = 0;
let mounts = [];
let mountsAt = -Infinity;
let said = "";
let daemonBegan = null;

/** Show a notice; `said` is one that stays while the mount is well. */
function notice(text) {
  const shown = text || said;
  $("notice").hidden = !shown;
  setText($("notice"), shown);
}

function draw() {
  const snapshot = figures.latest;
  if (snapshot) charts.draw(snapshot, figures.rows, Number($("range").value));
}

function show(snapshot) {
  const row = figures.add(snapshot);
  if (!row) return;
  const began = one(snapshot, "process_start_time_seconds");
  if (daemonBegan !== null && daemonBegan !== began && session()) readLimits(); // is it still valid?
  daemonBegan = began;
  showHead(snapshot);
  showTiles(snapshot, row);
  showTiers(snapshot, row);
  showJobs(snapshot.jobs);
  draw();
  showMounts(mounts.map((mount) => (mount.is_this ? { ...mount, ...ownFigures(snapshot) } : mount)), openMount);
}

function ownFigures(snapshot) {
  const hits = sum(snapshot, "cachefs_cache_hits_total");
  const blocks = hits + sum(snapshot, "cachefs_cache_misses_total");
  return {
    ratio: blocks ? hits / blocks : null,
    used_bytes: sum(snapshot, "cachefs_tier_used_bytes"),
    quota_bytes: sum(snapshot, "cachefs_tier_quota_bytes"),
  };
}

/** Follow a link to the console of another mount; with a session, that page gets one, too. */
async function openMount(event, row) {
  if (!session() || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const { href } = event.currentTarget;
  try {
    const given = await act("/v1/console/token", { mountpoint: row.mountpoint });
    location.assign(`${href}#token=${given.token}`);
  } catch {
    location.assign(href);
  }
}

async function poll() {
  timer = null;
  if (document.hidden) return;
  try {
    const snapshot = await look("/console/snapshot");
    if (performance.now() - mountsAt >= MOUNTS_EVERY_MS) {
      mountsAt = performance.now();
      look("/console/mounts").then((answer) => { mounts = answer.mounts; }).catch(() => {});
    }
    failures = 0;
    document.body.classList.remove("stale");
    notice(troubleOf(snapshot));
    show(snapshot);
    next(EVERY_MS);
  } catch (error) {
    failures += 1;
    if (failures > 1) {
      document.body.classList.add("stale");
      showState("bad", "Not answering");
      notice(`The daemon does not answer${error.code ? ` as it should: ${error.message}` : ""}. The page asks again every few seconds; the figures are those of before.`);
    }
    next(Math.min(MOST_PAUSE_MS, EVERY_MS * failures));
  }
}

function next(pause) {
  if (!document.hidden && timer === null) timer = setTimeout(poll, pause);
}

/** Show what a session shows, or hide it. */
function signedIn(is) {
  document.body.classList.toggle("signed-in", is);
  $("end-session").hidden = !is;
  if (is) {
    openDirectory("");
    readLimits();
  } else {
    clearBrowser();
    clearProfile();
  }
}

function ended(text) {
  said = `${text} Open the page again with: cachefs console`;
  notice("");
  signedIn(false);
}

function prepareTheme() {
  const root = document.documentElement;
  const choice = $("theme");
  choice.value = root.dataset.theme || "auto";
  choice.addEventListener("change", () => {
    if (choice.value === "auto") {
      delete root.dataset.theme;
      localStorage.removeItem("cachefs-theme");
    } else {
      root.dataset.theme = choice.value;
      localStorage.setItem("cachefs-theme", choice.value);
    }
    charts.recolor();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.recolor());
}

async function start() {
  prepareTheme();
  prepareBrowser();
  prepareProfile();
  prepareLimits();
  whenSessionEnds(ended);
  $("range").addEventListener("change", draw);
  $("end-session").addEventListener("click", () => {
    end();
    said = "";
    signedIn(false);
    $("main").focus();
  });
  document.addEventListener("visibilitychange", () => next(0));
  addEventListener("hashchange", () => { if (hasToken()) enter(); }); // the skip link changes it, too
  poll();
  await enter();
}

async function enter() {
  const problem = await begin();
  said = problem ? `No session: ${problem}` : "";
  notice("");
  signedIn(Boolean(session()));
}

start();
