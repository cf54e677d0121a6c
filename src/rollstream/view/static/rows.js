// All rollouts of a run: filter, sort, choose columns, search their messages. The address is the view.

import {
  html, useEffect, useMemo, useRef, useState, useKeys, Pending, getJSON, events, to, go, withQuery, count, figure,
  seconds, percent, segment, decoded,
} from "./core.js";
import { visible } from "./text.js";
import { Table, TotalLine } from "./table.js";
import { Filter } from "./filter.js";
import { RunTabs, Live, useFollow, useRun } from "./run.js";

const DEFAULT = ["index", "repeat", "reward", "prompt", "answer", "truth", "finish_reason", "tokens", "num_turns",
  "total_s"];
const TEXTS = [
  { name: "prompt", type: "text", title: "the last message of the prompt" },
  { name: "answer", type: "text", title: "the last answer of the model" },
  { name: "truth", type: "text", title: "ground truth" }];
const isText = (name) => TEXTS.some((column) => column.name === name);

const show = (value, column) => (value === null || value === undefined ? html`<span class="muted">–</span>`
  : column.type === "bool" ? (value ? "yes" : "no") : column.name.endsWith("_s") ? seconds(value)
    : typeof value === "number" ? (["index", "repeat", "trajectory", "version"].includes(column.name)
      ? String(value) : figure(value))
      : visible(String(value)));

const WIDTHS = { index: "70px", repeat: "70px", reward: "110px", prompt: "minmax(180px, 4fr)",
  answer: "minmax(180px, 3fr)", truth: "minmax(80px, 1fr)", finish_reason: "120px", prompt_key: "290px" };

/** The columns of a table, of their names in the run's list. */
function tableColumns(names, known) {
  const asked = names.filter((name) => !isText(name));
  return names.map((name) => known.find((column) => column.name === name)).filter(Boolean).map((column) => ({
    name: column.name,
    title: column.name.replace(/_s$/, "").replaceAll("_", " "),
    number: column.type !== "text",
    sortable: !isText(column.name),
    at: asked.indexOf(column.name),
    width: WIDTHS[column.name] || (column.type === "text" ? "minmax(90px, 1fr)" : "96px"),
  }));
}

/** `(row, name) => text`: texts of the rows that are on the screen; undefined until they have come. */
function useTexts(id, of) {
  const it = useRef({ of: null, timer: 0 }).current;
  const [, redraw] = useState(0);
  if (it.of !== of) Object.assign(it, { of, found: new Map(), wanted: new Set() });
  useEffect(() => () => clearTimeout(it.timer), []);
  const ask = () => {
    const { found, wanted } = it;
    const rows = [...wanted].slice(-200);
    it.timer = 0;
    wanted.clear();
    getJSON(`/api/runs/${segment(id)}/texts`, { rows: rows.join(",") }).then(({ texts }) => {
      for (const row of rows) found.set(row, texts[row] || {});
      redraw((n) => n + 1);
    }, () => { for (const row of rows) found.delete(row); }); // asked for again when they are drawn again
    for (const row of rows) found.set(row, undefined); // asked for
  };
  return (row, name) => {
    if (!it.found.has(row)) {
      it.wanted.add(row);
      it.timer ||= setTimeout(ask, 60);
    }
    return it.found.get(row)?.[name];
  };
}

/** A reward, and where it stands between the least and the most of the run. */
function Reward({ value, range: [low, high] }) {
  if (value === null || value === undefined) return html`<span class="muted">–</span>`;
  const share = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 1;
  return html`<span class="meter"><span class="track"><span class="fill"
    style=${{ width: `${100 * share}%` }}></span></span>${figure(value)}</span>`;
}

function Columns({ known, chosen, onChoose }) {
  return html`<details class="columns"><summary>Columns</summary>
    <div class="menu">${known.map((column) => html`<label key=${column.name}
    title=${column.title}><input type="checkbox" checked=${chosen.includes(column.name)}
      onChange=${() => onChoose(chosen.includes(column.name)
      ? chosen.filter((name) => name !== column.name) : [...chosen, column.name])} /> ${visible(column.name)}
      <span class="muted">${column.title !== column.name && visible(column.title || "")}</span></label>`)}</div>
        </details>`;
}

/** Hits in the messages, as the server finds them. */
function Search({ id, text, filter }) {
  const [state, setState] = useState({ hits: [], progress: null, done: false, error: null });
  const stop = useRef(null);
  const [at, setAt] = useState(-1);
  useEffect(() => {
    const abort = new AbortController();
    stop.current = abort;
    const found = { hits: [], progress: null, done: false, error: null };
    const tell = () => setState({ ...found });
    tell();
    setAt(-1);
    (async () => {
      let told = 0;
      try {
        for await (const { event, data } of events(`/api/runs/${segment(id)}/search`, { text, filter }, abort.signal)) {
          if (event === "hit") found.hits = [...found.hits, data];
          else if (event === "progress") found.progress = data;
          else if (event === "done") {
            found.cut = data.cut;
            break;
          } else if (event === "error") throw new Error(data.message);
          if (performance.now() - told > 100) { told = performance.now(); tell(); }
        }
      } catch (error) {
        if (!abort.signal.aborted) found.error = error;
      }
      found.done = true;
      found.stopped = abort.signal.aborted;
      tell();
    })();
    return () => abort.abort();
  }, [id, text, filter]);
  const { hits, progress, done, error } = state;
  const open = (hit) => to(["run", id, "trajectory", String(hit.row)], { tab: "conversation" });
  useKeys([
    ["j ArrowDown", "next hit", () => setAt((n) => Math.min(hits.length - 1, n + 1))],
    ["k ArrowUp", "hit before", () => setAt((n) => Math.max(0, n - 1))],
    ["Enter o", "open the hit", () => hits[at] && go(open(hits[at]))],
  ]);
  return html`<div class="search">
    <div class="line" role="status">${!done
      && html`<progress max=${progress?.total || 1} value=${progress?.scanned || 0} aria-label="searched"></progress>
      <button type="button" onClick=${() => stop.current.abort()}>Stop</button>`}
      <span>${count(progress?.hits ?? hits.length)} hits${progress
        && html` <span class="muted">in ${count(progress.scanned)} of ${
        count(progress.total)} searched${state.stopped ? ", stopped" : ""}${
        state.cut ? ", then stopped: no more are shown" : ""}</span>`}</span></div>
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
    <ol class="hits">${hits.map((hit, n) => html`<li key=${n} class=${n === at ? "picked" : ""}><a href=${open(hit)}>
      <span class="muted">${hit.index}/${hit.repeat} ${visible(hit.role
        || "")} reward ${figure(hit.reward)}</span>${" "}
      <span dir="auto">${visible(hit.before)}<mark>${visible(hit.match)}</mark>${visible(hit.after)}</span></a>
        </li>`)}</ol>
    ${done && !error && hits.length === 0 && html`<p class="muted">Nothing found.</p>`}
  </div>`;
}

export function Rows({ id, query }) {
  const run = useRun(id);
  const [totals, setTotals] = useState({ total: null, all: null });
  const [error, setError] = useState(null);
  const [words, setWords] = useState(query.text || "");
  const [more, setMore] = useState(0);
  const [live, lost] = useFollow(id, run.data, () => setMore((n) => n + 1));
  useEffect(() => setWords(query.text || ""), [query.text]);
  useKeys([
    ["/", "to the filter", () => document.getElementById("filter")?.focus()],
    ["s", "to the text search", () => document.getElementById("words")?.focus()],
  ]);
  const known = useMemo(() => [...TEXTS, ...(run.data?.columns || [])], [run.data?.columns]);
  const chosen = useMemo(() => {
    const given = query.columns ? query.columns.split(",").map(decoded) : DEFAULT;
    return given.filter((name) => known.some((column) => column.name === name));
  }, [query.columns, known]);
  const filter = query.filter || "", sort = query.sort || "";
  const load = (offset, limit, signal) => getJSON(`/api/runs/${segment(id)}/rows`,
    { filter, sort, offset, limit, columns: chosen.filter((name) => !isText(name)).map(segment).join(",") },
    { signal }).then(
    (answer) => { setError(null); return answer; },
    (problem) => {
      if (problem.position === null) throw problem;
      if (!signal.aborted) setError(problem);
      return { total: 0, all: null, rows: [] };
    });
  const textOf = useTexts(id, `${id}|${more}`);
  if (!run.data) return html`<${Pending} state=${run} />`;
  const edges = run.data.histograms?.reward?.edges || [];
  const range = [Math.min(0, edges[0] ?? 0), Math.max(1, edges.at(-2) ?? 1)];
  const text = (value) => html`<span title=${visible(value || "")}>${value === undefined ? "…" : visible(value)}</span>`;
  const columns = tableColumns(chosen, known).map((column) => ({
    ...column,
    show: (row) => (isText(column.name) ? text(textOf(row[0], column.name))
      : column.name === "reward" ? html`<${Reward} value=${row[column.at + 1]} range=${range} />`
        : show(row[column.at + 1], known.find((it) => it.name === column.name))) }));
  const set = (changes) => go(withQuery(changes));
  const place = (n) => (filter || sort ? { filter, sort, at: n } : {});
  const address = (row, n) => to(["run", id, "trajectory", String(row[0])], place(n));
  return html`<section class="page">
    <div class="line"><h1><a href=${to(["run", id])}>${visible(run.data.name)}</a></h1>
      <${Live} live=${live} lost=${lost} />
      <${RunTabs} id=${id} at="rows" /></div>
    <${Filter} filter=${filter} columns=${run.data.columns} error=${error} onFilter=${(text) => set({ filter: text })} />
    <form class="line" onSubmit=${(event) => { event.preventDefault(); set({ text: words }); }}>
      <label class="grow">Text in messages <input id="words" class="wide" type="search" value=${words}
        onInput=${(event) => setWords(event.target.value)} /></label>
      <button type="submit">Search</button>${query.text
        && html`<button type="button" onClick=${() => set({ text: null })}>Back to the table</button>`}
      <${Columns} known=${known} chosen=${chosen}
        onChoose=${(names) => set({ columns: names.map(segment).join(",") })} />
      <${TotalLine} total=${totals.total} all=${totals.all} what="rows" />
      ${totals.all > 0 && totals.total !== totals.all && totals.total !== null
        && html`<span class="muted">${percent(totals.total, totals.all)}</span>`}
    </form>
    ${query.text ? html`<${Search} id=${id} text=${query.text} filter=${filter} />`
      : html`<${Table} label="rollouts" columns=${columns} load=${load} of=${`${id}|${filter}|${sort}|${chosen}`}
        more=${more} sort=${decoded(sort)} onSort=${(name) => set({ sort: segment(name) })} onTotal=${setTotals}
        address=${address} />`}
  </section>`;
}
