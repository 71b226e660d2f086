// The limits of the mount. They last until it ends.
import { act } from "./client.js";
import { $, say, setText } from "./dom.js";
import { rate } from "./format.js";

const MIB = 1024 * 1024;

function show(settings) {
  $("download-limit").value = String(settings.download_limit / MIB);
  $("max-downloads").value = String(settings.max_downloads);
  const users = Object.entries(settings.limit_uid).filter(([, value]) => value);
  setText($("uid-limits"), users.length ? `Limited users: ${users.map(([uid, value]) => `${uid} to ${rate(value)}`).join(", ")}.` : "No user is limited.");
}

export async function readLimits() {
  try {
    show(await act("/v1/settings"));
  } catch (error) {
    say($("limits-said"), error.message, true);
  }
}

async function set(event) {
  event.preventDefault();
  const changes = {
    download_limit: Math.round(Number($("download-limit").value) * MIB),
    max_downloads: Number($("max-downloads").value),
  };
  const uid = $("uid").value;
  if (uid !== "") changes.limit_uid = { [uid]: Math.round(Number($("uid-limit").value) * MIB) };
  try {
    show((await act("/v1/settings", changes)).after);
    $("uid").value = "";
    say($("limits-said"), "The limits are set until the mount ends.");
  } catch (error) {
    say($("limits-said"), error.message, true);
  }
}

export function prepareLimits() {
  $("limits-form").addEventListener("submit", set);
}
