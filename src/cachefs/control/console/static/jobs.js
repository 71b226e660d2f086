// Load jobs and their progress. Their paths are shown in a session only.
import { act, session } from "./client.js";
import { $, fillTable, make, meter, say } from "./dom.js";
import { bytes, printable, short } from "./format.js";
import { dot } from "./overview.js";

const FINAL = new Set(["done", "incomplete", "failed", "cancelled"]);
const TONES = { done: "good", incomplete: "warn", failed: "bad" };
const paths = new Map();
let asking = false;

/** Remember the paths of jobs that are not known yet. */
async function learn(jobs) {
  if (asking || !session() || jobs.every((job) => paths.has(job.id))) return;
  asking = true;
  try {
    for (const job of (await act("/v1/jobs")).jobs) {
      const names = job.spec.paths.map((path) => path || "the whole mount");
      paths.set(job.id, names.slice(0, 3).join(", ") + (names.length > 3 ? `, and ${names.length - 3} more` : ""));
    }
  } catch { /* the next snapshot tries again */ } finally {
    asking = false;
  }
}

/** How much of the work is done: looking, fetching, verifying. */
function progress(job) {
  if (job.state === "done") return [1, `${bytes(job.verified_bytes || job.bytes)} are cached`];
  if (job.mode !== "load") return [FINAL.has(job.state) ? 1 : 0, bytes(job.bytes)];
  if (job.state === "new" || job.state === "queued") return [0, "Waiting"];
  if (job.state === "expanding") return [0, `Looking: ${bytes(job.bytes)} found`];
  if (job.state === "verifying") return [job.bytes ? job.verified_bytes / job.bytes : 1, `Verifying: ${bytes(job.verified_bytes)} of ${bytes(job.bytes)}`];
  return [job.wanted_bytes ? job.fetched_bytes / job.wanted_bytes : 0, `${bytes(job.fetched_bytes)} of ${bytes(job.wanted_bytes)}`];
}

export function showJobs(jobs) {
  learn(jobs);
  $("jobs-empty").hidden = jobs.length > 0;
  $("jobs-scroll").hidden = jobs.length === 0;
  fillTable($("jobs"), [...jobs].reverse().map((job) => {
    const [ratio, text] = progress(job);
    const names = (session() && paths.get(job.id)) || "";
    const ended = FINAL.has(job.state);
    return {
      key: job.id,
      cells: [
        { is: names, make: () => [job.id, ...(names ? [make("span", { class: "sub" }, printable(names))] : [])] },
        { is: job.state, kind: "state-cell", make: () => dot(TONES[job.state], job.state[0].toUpperCase() + job.state.slice(1)) },
        { is: `${ratio} ${text}`, kind: "wide", make: () => meter(ratio, text) },
        { text: short(job.files), kind: "number" },
        { text: short(job.failed_files), kind: "number" },
        { is: job.state, kind: "owner", make: () => job.state === "done" || job.state === "new" ? "–" : button(job.id, ended) },
      ],
    };
  }));
}

function button(id, ended) {
  const [word, route] = ended ? ["Resume", "resume"] : ["Cancel", "cancel"];
  return make("button", { type: "button", "aria-label": `${word} job ${id}`, onclick: async () => {
    try {
      await act(`/v1/jobs/${route}`, { id });
    } catch (error) {
      say($("files-said"), error.message, true);
    }
  } }, word);
}
