// Hot and slow paths: a profile of some seconds, taken only when the user wants one.
import { act } from "./client.js";
import { $, fillTable, say } from "./dom.js";
import { bytes, count, printable, short, time } from "./format.js";

let report = null;

function show() {
  if (!report) return;
  fillTable($("hottest"), report.hottest[$("rank").value].map((row) => ({
    key: row.path,
    cells: [
      { text: printable(row.path) }, { text: short(row.requests), kind: "number" },
      { text: bytes(row.bytes), kind: "number" }, { text: time(row.seconds), kind: "number" },
    ],
  })));
  fillTable($("slowest"), report.slowest.map((row, at) => ({
    key: String(at),
    cells: [
      { text: printable(row.path) }, { text: time(row.seconds), kind: "number" }, { text: row.operation },
      { text: row.outcome }, { text: row.uid === null ? "–" : String(row.uid), kind: "number" },
    ],
  })));
}

async function watch(event) {
  event.preventDefault();
  const seconds = Number($("seconds").value);
  const button = $("profile-form").querySelector("button");
  button.disabled = true;
  say($("profile-said"), `Watching for ${seconds} seconds…`);
  try {
    report = await act("/v1/profile", { seconds, top: 10 });
    $("profile-result").hidden = report.requests === 0;
    show();
    say($("profile-said"), report.requests ? `${count(report.requests, "request")} in ${seconds} seconds.` : "Nobody read during this time.");
  } catch (error) {
    say($("profile-said"), error.message, true);
  } finally {
    button.disabled = false;
  }
}

export function prepareProfile() {
  $("profile-form").addEventListener("submit", watch);
  $("rank").addEventListener("change", show);
}

export function clearProfile() {
  report = null;
  $("profile-result").hidden = true;
  $("hottest").replaceChildren();
  $("slowest").replaceChildren();
}
