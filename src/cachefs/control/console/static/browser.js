// The tree, one directory at a time, and what can be done with its files.
import { act } from "./client.js";
import { $, fillTable, make, meter, say } from "./dom.js";
import { bytes, count, percent, printable } from "./format.js";

let here = "";
let names = [];
let turn = 0;
const chosen = new Set();

const join = (name) => (here ? `${here}/${name}` : name);

/** Open a directory: its names so far, and where the rest begins. */
export async function openDirectory(path, focus = false) {
  const mine = ++turn;
  say($("files-said"), "Loading…");
  try {
    const answer = await act("/v1/cache/names", { path, limit: 200 });
    if (mine !== turn) return;
    here = path;
    names = answer.names;
    chosen.clear();
    show(answer, "");
    if (focus) $("crumbs").querySelector("[aria-current]").focus();
  } catch (error) {
    if (mine === turn) say($("files-said"), error.message, true);
  }
}

async function more() {
  const mine = ++turn;
  try {
    const answer = await act("/v1/cache/names", { path: here, after: names.at(-1).name, limit: 200 });
    if (mine !== turn) return;
    names = [...names, ...answer.names];
    show(answer, `${count(names.length, "name")} shown`);
  } catch (error) {
    say($("files-said"), error.message, true);
  }
}

/** Read the names again that are shown. */
async function refresh(text) {
  const mine = ++turn;
  const wanted = Math.min(500, Math.max(200, names.length));
  const answer = await act("/v1/cache/names", { path: here, limit: wanted });
  if (mine !== turn) return;
  names = answer.names;
  show(answer, text);
}

function show(answer, text) {
  $("more").hidden = !answer.has_more;
  $("files-empty").hidden = names.length > 0;
  say($("files-said"), answer.problem ? `Some names may be missing: ${answer.problem}` : text, Boolean(answer.problem));
  showCrumbs();
  const rows = names.map((entry) => {
    const cells = [
      { is: "", make: () => box(entry) },
      { is: entry.kind, make: () => label(entry) },
      { text: size(entry), kind: "number" },
      { is: `${entry.cached_bytes} ${entry.size_bytes} ${entry.is_whole}`, kind: "wide", make: () => cached(entry) },
      { text: entry.pinned_bytes ? bytes(entry.pinned_bytes) : "–", kind: "number" },
    ];
    cells.headerAt = 1;
    return { key: `${here}/${entry.name}`, cells };
  });
  fillTable($("files"), rows);
  for (const input of $("files").querySelectorAll("input")) input.checked = chosen.has(input.value);
  showChoice();
}

function box(entry) {
  return make("input", { type: "checkbox", value: entry.name, "aria-label": `Select ${printable(entry.name)}`, onchange: (event) => {
    if (event.target.checked) chosen.add(entry.name);
    else chosen.delete(entry.name);
    showChoice();
  } });
}

function label(entry) {
  const name = printable(entry.name);
  if (entry.kind === "file") return name;
  return make("button", { type: "button", class: "link", onclick: () => openDirectory(join(entry.name), true) }, `${name}/`);
}

function size(entry) {
  if (entry.kind === "directory" && entry.files === 0 && !entry.is_whole) return "not listed yet";
  return (entry.is_whole ? "" : "≥ ") + bytes(entry.size_bytes);
}

function cached(entry) {
  if (!entry.size_bytes) return "–";
  const ratio = entry.cached_bytes / entry.size_bytes;
  const text = entry.is_whole ? percent(ratio) : `${percent(ratio)} of ${count(entry.files, "known file")}`;
  return meter(ratio, text);
}

function showCrumbs() {
  const parts = here ? here.split("/") : [];
  const items = ["Top", ...parts].map((part, at) => {
    const path = parts.slice(0, at).join("/");
    const name = at ? printable(part) : "Top";
    if (at === parts.length) return make("li", {}, make("span", { tabindex: "-1", "aria-current": "page" }, name));
    return make("li", {}, make("button", { type: "button", class: "link", onclick: () => openDirectory(path, true) }, name));
  });
  $("crumbs").replaceChildren(make("ol", {}, ...items));
}

function showChoice() {
  $("selected").textContent = chosen.size ? `${chosen.size} selected` : "Nothing selected";
  for (const button of document.querySelectorAll("[data-action]")) button.disabled = chosen.size === 0;
  const all = $("all");
  all.checked = names.length > 0 && chosen.size === names.length;
  all.indeterminate = chosen.size > 0 && chosen.size < names.length;
}

/** Add what could not be done. */
const told = (text, done) => [text, ...done.failures.slice(0, 1).map((failure) => `Not all of it: ${failure}`)].join(" ");

const ACTIONS = {
  async load(paths) {
    const job = await act("/v1/jobs/create", { paths });
    await act("/v1/jobs/start", { id: job.id });
    return `Load job ${job.id} has started.`;
  },
  async pin(paths) {
    const done = await act("/v1/cache/pin", { paths });
    const refused = done.refused_bytes ? ` ${bytes(done.refused_bytes)} could not be pinned.` : "";
    return told(`${bytes(done.pinned_bytes)} in ${count(done.files, "file")} are pinned.${refused}`, done);
  },
  async unpin(paths) {
    const done = await act("/v1/cache/unpin", { paths });
    return told(`${bytes(done.size_bytes)} are unpinned.`, done);
  },
  async evict(paths) {
    const plan = await act("/v1/cache/evict", { paths, dry_run: true });
    if (!plan.blocks) return plan.pinned_blocks ? "All of it is pinned, and stays." : "Nothing of it is cached.";
    const kept = plan.pinned_bytes ? ` ${bytes(plan.pinned_bytes)} are pinned and stay.` : "";
    const what = `${bytes(plan.size_bytes)} of ${count(plan.files, "file")} go from the cache. The origin keeps them, and the next read fetches them again.${kept}`;
    if (!(await confirmed(what))) return "Nothing was evicted.";
    const done = await act("/v1/cache/evict", { paths });
    return told(`${bytes(done.size_bytes)} were evicted.`, done);
  },
};

function confirmed(text) {
  const dialog = $("confirm");
  $("confirm-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

async function run(name) {
  const paths = [...chosen].map(join);
  say($("files-said"), "Working…");
  try {
    await refresh(await ACTIONS[name](paths));
    $("all").focus();
  } catch (error) {
    say($("files-said"), error.message, true);
  }
}

export function prepareBrowser() {
  $("more").addEventListener("click", more);
  $("all").addEventListener("change", (event) => {
    chosen.clear();
    if (event.target.checked) for (const entry of names) chosen.add(entry.name);
    for (const input of $("files").querySelectorAll("input")) input.checked = event.target.checked;
    showChoice();
  });
  for (const button of document.querySelectorAll("[data-action]")) button.addEventListener("click", () => run(button.dataset.action));
}

/** Forget all names: the session has ended. */
export function clearBrowser() {
  turn += 1;
  [here, names] = ["", []];
  chosen.clear();
  $("files").replaceChildren();
  $("crumbs").replaceChildren();
  say($("files-said"), "");
}
