// Requests, polling, and the address of a view. All URLs are relative to the page, which may be below a prefix.
import { useEffect, useState } from "./vendor/preact.module.js";

export const server = () => new URL(".", location.href).href.replace(/\/$/, "");

/** An error with the server's own words, and its progress while it counts or reads. */
class Problem extends Error {
  constructor(status, body) {
    super(body.detail || `The server answered with status ${status}.`);
    Object.assign(this, { status, done: body.done, total: body.total, secondsLeft: body.seconds_left });
  }
}

export async function get(path, signal) {
  let response;
  try {
    response = await fetch(path, { signal, headers: { Accept: "application/json" } });
    if (response.ok) return await response.json();
    if (response.status === 401) location.reload(); // the login takes the place of the page
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it running, and is the network up?");
  }
  throw new Problem(response.status, await response.json().catch(() => ({})));
}

const POLL_TIMEOUT = 10_000; // ms

/** Polls a path while the page is visible: {data, error}; the last data stays when a request fails. */
export function usePoll(path, seconds) {
  const [state, setState] = useState({});
  useEffect(() => {
    const controller = new AbortController();
    let timer;
    const poll = async () => {
      clearTimeout(timer);
      if (!document.hidden) {
        try {
          // Without a timeout, a server that hangs would leave the page as it was, perhaps green, for minutes.
          const data = await get(path, AbortSignal.any([controller.signal, AbortSignal.timeout(POLL_TIMEOUT)]));
          setState({ data });
        } catch (error) {
          if (controller.signal.aborted) return;
          setState((before) => ({ ...before, error }));
        }
      }
      timer = setTimeout(poll, 1000 * seconds);
    };
    const onVisible = () => document.hidden || poll();
    document.addEventListener("visibilitychange", onVisible);
    poll();
    return () => {
      controller.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
    };
  }, [path, seconds]);
  return state;
}

/** Gets paths together, again after a second while the server is not ready: {data, error, isStale}. No paths: nothing. */
export function useGet(...paths) {
  const [state, setState] = useState({});
  const key = paths.join("\n");
  useEffect(() => {
    if (!paths[0]) return setState({});
    const controller = new AbortController();
    let timer;
    setState((before) => ({ ...before, isStale: true }));
    const load = async () => {
      try {
        setState({ data: await Promise.all(paths.map((path) => get(path, controller.signal))) });
      } catch (error) {
        if (controller.signal.aborted) return;
        setState({ error });
        if (error.status === 503) timer = setTimeout(load, 1000);
      }
    };
    timer = setTimeout(load, 150); // a key that is held down asks once
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [key]);
  return state;
}

/** The view that the fragment names, drawn again when it changes. */
export function useRoute() {
  const [route, setRoute] = useState(currentRoute);
  useEffect(() => {
    const onChange = () => setRoute(currentRoute());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return route;
}

/** The view that the fragment names now: {view, names, query}. */
export function currentRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [view, ...names] = path.split("/").map(decodeOrKeep);
  return { view, names, query: Object.fromEntries(new URLSearchParams(query)) };
}

function decodeOrKeep(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The fragment of a view. Parameters without a value are left out. */
export const link = (view, names = [], query = {}) => `#/${[view, ...names.map(encodeURIComponent)].join("/")}${queryOf(query)}`;

export function queryOf(query) {
  const pairs = Object.entries(query).filter(([, value]) => value != null && value !== "");
  return pairs.length ? `?${new URLSearchParams(pairs)}` : "";
}

export const datasetPath = (dataset) => `v1/datasets/${encodeURIComponent(dataset)}`;

const OF_VIEW = ["epoch", "rank", "step", "line", "tokens"];

/** The parameters of the spec in the query of a view. */
export const specOf = (query) => Object.fromEntries(Object.entries(query).filter(([name]) => !OF_VIEW.includes(name)));
