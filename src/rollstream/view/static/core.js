// What every view uses: rendering, the API, the address, keys, and how figures are written.

import { h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { answerOf, exported } from "./file.js";

export { h, render, useEffect, useLayoutEffect, useMemo, useRef, useState };
export const html = htm.bind(h);

// --- the API ---------------------------------------------------------------------------------------------------

const TOKEN = "rollstream.token";

/** Moves the token from the address into the tab's storage: an address that is copied carries none. */
export function takeToken() {
  const url = new URL(location.href);
  const token = url.searchParams.get("token");
  if (!token) return;
  sessionStorage.setItem(TOKEN, token);
  url.searchParams.delete("token");
  history.replaceState(null, "", url);
}

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.code = error.code;
    this.position = error.code === "bad_filter" && /^\d+$/.test(error.where) ? Number(error.where) : null;
  }
}

/** A piece of an address as one segment of a path. */
export const segment = encodeURIComponent;

async function ask(path, params, { signal, headers } = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {})) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  const token = sessionStorage.getItem(TOKEN);
  const url = path + (query.size ? `?${query}` : "");
  const response = await fetch(url, {
    signal,
    headers: { ...headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) },
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error || {});
}

function held(path, params) {
  const answer = answerOf(path, params);
  if (answer !== undefined) return answer;
  throw new ApiError(404, { message: "This file does not hold it: rollstream view DIR shows the whole run.",
    ...(params?.filter ? { code: "bad_filter", where: "0" } : {}) });
}

export const getJSON = async (path, params, options) => (exported() ? held(path, params)
  : (await ask(path, params, options)).json());
export const getBytes = async (path, params, options) => (exported() ? held(path, params)
  : (await ask(path, params, options)).arrayBuffer());

/** Server-sent events, read by fetch so that the token can be sent: yields `{id, event, data}`. */
export async function* events(path, params, signal) {
  if (exported()) held(path, params);
  const response = await ask(path, params, { signal, headers: { Accept: "text/event-stream" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const found = { id: null, event: "message", data: "" };
      for (const line of block.split(/\r?\n/)) {
        const [, name, text] = /^(\w+): ?(.*)$/.exec(line) || [];
        if (name === "data") found.data += text;
        else if (name) found[name] = text;
      }
      if (found.data) yield { ...found, data: JSON.parse(found.data) };
    }
  }
}

/** Whether the page is seen: a browser has few connections, and a page that nobody sees should hold none. */
function useSeen() {
  const [, changed] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    document.addEventListener("visibilitychange", () => changed((n) => n + 1), { signal: stop.signal });
    return () => stop.abort();
  }, []);
  return !document.hidden;
}

/**
 * Follows a stream for as long as the component lives and is seen; after a lost connection it goes on from the last
 * cursor. It begins when there is a first one: "" for all that there is.
 */
export function useStream(path, onEvent, first) {
  const [lost, setLost] = useState(false);
  const handler = useRef(onEvent);
  const at = useRef(null);
  handler.current = onEvent;
  const enabled = useSeen() && first !== undefined && !exported();
  useEffect(() => {
    if (!enabled) return undefined;
    const stop = new AbortController();
    (async () => {
      let cursor = at.current ?? first;
      let wait = 500;
      while (!stop.signal.aborted) {
        try {
          for await (const event of events(path, { cursor }, stop.signal)) {
            if (event.id) at.current = cursor = event.id;
            wait = 500;
            setLost(false);
            handler.current(event);
          }
        } catch (error) {
          if (stop.signal.aborted) return;
          if (error instanceof ApiError && error.status < 500) cursor = "";
          setLost(true);
        }
        await new Promise((resolve) => setTimeout(resolve, wait));
        wait = Math.min(wait * 2, 10_000);
      }
    })();
    return () => stop.abort();
  }, [path, enabled]);
  return lost;
}

/** `{data, error, took}` of an address; keeps the data before while new data comes. `again` asks anew. */
export function useApi(path, params, again = 0) {
  const [state, setState] = useState({ data: null, error: null, took: 0, of: null });
  const key = path && JSON.stringify([path, params]);
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    const began = performance.now();
    getJSON(path, params, { signal: stop.signal }).then(
      (data) => setState({ data, error: null, took: performance.now() - began, of: path }),
      (error) => stop.signal.aborted || setState((before) => ({
        ...before, data: before.of === path ? before.data : null, error, of: path })),
    );
    return () => stop.abort();
  }, [key, again]);
  return state;
}

/** What a view shows while it has no data. */
export function Pending({ state }) {
  if (state.error) return html`<p class="problem" role="alert">${state.error.message}</p>`;
  return html`<p class="muted" aria-busy="true">Loading…</p>`;
}

// --- the address -----------------------------------------------------------------------------------------------

/** The address of a view: `to(["run", id], {filter})` is `#/run/ID?filter=…`. */
export function to(path, query = {}) {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") params.set(name, value);
  }
  return `#/${path.map(encodeURIComponent).join("/")}${params.size ? `?${params}` : ""}`;
}

export const decoded = (text) => { try { return decodeURIComponent(text); } catch { return text; } };

function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { path: path.split("/").filter(Boolean).map(decoded), query: Object.fromEntries(new URLSearchParams(query)) };
}

export function useAddress() {
  const [address, setAddress] = useState(readAddress);
  useEffect(() => {
    const changed = () => setAddress(readAddress());
    addEventListener("hashchange", changed);
    addEventListener("popstate", changed);
    return () => { removeEventListener("hashchange", changed); removeEventListener("popstate", changed); };
  }, []);
  return address;
}

export function go(address, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", address);
    dispatchEvent(new PopStateEvent("popstate"));
  } else location.hash = address;
}

/** The same view with some parameters changed; `null` takes one away. */
export function withQuery(changes) {
  const { path, query } = readAddress();
  return to(path, { ...query, ...changes });
}

// --- keys ------------------------------------------------------------------------------------------------------

const keyLists = [];

/** Keys of a view: `[["j", "next group", function], …]`; `?` lists them. A key's later list goes first. */
export function useKeys(list) {
  const current = useRef(list);
  current.current = list;
  useEffect(() => {
    keyLists.push(current);
    return () => { keyLists.splice(keyLists.indexOf(current), 1); };
  }, []);
}

export const activeKeys = () => keyLists.map((list) => list.current);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  for (const list of [...keyLists].reverse()) {
    const found = list.current.find(([keys]) => keys.split(" ").includes(event.key));
    if (found) {
      event.preventDefault();
      found[2](event);
      return;
    }
  }
});

// --- figures ---------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const absent = (value) => value === null || value === undefined;

export const NONE = "–";
export const count = (value) => (absent(value) ? NONE : whole.format(value));
export const short = (value) => (absent(value) ? NONE : value < 10_000 ? whole.format(value) : compact.format(value));
/** Four significant digits, without trailing zeros. */
export function figure(value) {
  if (absent(value)) return NONE;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return whole.format(value);
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
export const signed = (value) => (absent(value) ? NONE : (value > 0 ? "+" : "") + figure(value));
export const percent = (part, all) => (!all ? NONE : part > 0 && part / all < 0.001 ? "< 0.1 %"
  : `${figure(Number(((100 * part) / all).toPrecision(3)))} %`);
export function seconds(value) {
  if (absent(value)) return NONE;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${figure(Number(value.toPrecision(3)))} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${figure(Number((value / 3600).toPrecision(3)))} h`;
}
export const moment = (unix) => (absent(unix) ? NONE
  : new Date(unix * 1000).toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "medium" }));
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** A reward or share with its interval. */
export const Interval = ({ value, range }) => html`<span class="number">${figure(value)}${
  range && !absent(range[0]) && html`<span class="muted"> [${figure(range[0])}, ${figure(range[1])}]</span>`}</span>`;

export function Copy({ text, children }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    const value = typeof text === "function" ? await text() : text;
    try {
      await navigator.clipboard.writeText(value);
    } catch { // not a secure context: the way of older pages
      const area = document.body.appendChild(document.createElement("textarea"));
      area.value = value;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" onClick=${copy}>${done ? "Copied" : children}</button>`;
}
