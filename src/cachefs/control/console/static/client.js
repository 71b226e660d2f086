// Requests to the daemon. The session is a token in `sessionStorage`, no cookie: no other page can
// make the browser send it.
const KEY = "cachefs-session";
const ANSWER_MS = 10_000;
let onEnd = () => {};

export class Refused extends Error {}

export const session = () => sessionStorage.getItem(KEY);

/** Call `callback(text)` when the session has ended. */
export function whenSessionEnds(callback) {
  onEnd = callback;
}

async function send(path, options) {
  const answer = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw Object.assign(new Refused(said.error || `the daemon answered with ${answer.status}`), { code: answer.status });
}

const post = (body) => ({ method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

/** Ask for something that everybody may see. */
export async function look(path) {
  return (await send(path, { signal: AbortSignal.timeout(ANSWER_MS) })).json();
}

const tokenInAddress = () => new URLSearchParams(location.hash.slice(1)).get("token");

export const hasToken = () => tokenInAddress() !== null;

/** Exchange the token in the address for a session. Return a text if that fails. */
export async function begin() {
  const token = tokenInAddress();
  if (token === null) return null;
  history.replaceState(null, "", location.pathname);
  try {
    const answer = await send("/console/session/begin", post({ token }));
    sessionStorage.setItem(KEY, (await answer.json()).session);
    return null;
  } catch (error) {
    return error.message;
  }
}

export function end() {
  const given = session();
  sessionStorage.removeItem(KEY);
  if (given) send("/console/session/end", post({ session: given })).catch(() => {});
}

/** Send a request that needs the session, and return its last line. */
export async function act(route, body = null, onLine = null) {
  const options = body === null ? {} : post(body);
  options.headers = { ...options.headers, Authorization: `Bearer ${session()}` };
  let answer;
  try {
    answer = await send(`/console/actions${route}`, options);
  } catch (error) {
    if (error.code === 401) {
      sessionStorage.removeItem(KEY);
      onEnd("The session has ended.");
    }
    throw error;
  }
  let last = {};
  const failures = [];
  for (const line of (await answer.text()).split("\n")) {
    if (!line) continue;
    last = JSON.parse(line);
    if (last.error) throw new Refused(last.error);
    if (last.failure) failures.push(last.failure);
    onLine?.(last);
  }
  if (failures.length && last.failure) throw new Refused(failures[0]);
  return { ...last, failures };
}
