// A run at a glance. Every bar and every number leads to the rows behind it.

import {
  html, NONE, useEffect, useState, useApi, useStream, useKeys, Pending, Interval, getJSON, to, go, withQuery, count,
  short, figure, seconds, moment, percent, segment,
} from "./core.js";
import { visible } from "./text.js";
import { Bars, Lines, Shares, Curves } from "./charts.js";
import { between, both, clause } from "./filter.js";
import { State } from "./sources.js";
import { Table } from "./table.js";

const TABS = [["glance", [], "Overview"], ["rows", ["rows"], "Rollouts"], ["groups", ["groups"], "Groups"]];

export function RunTabs({ id, at }) {
  useKeys(TABS.map(([, path, title], n) => [String(n + 1), title.toLowerCase(), () => go(to(["run", id, ...path]))]));
  return html`<nav class="tabs" aria-label="views of the run">${TABS.map(([name, path, title]) => html`<a key=${name}
    href=${to(["run", id, ...path])} aria-current=${at === name ? "page" : undefined}>${title}</a>`)}</nav>`;
}

const TITLES = { reward: "Reward", tokens: "Length, tokens", turns: "Turns, with prompt" };

function Histogram({ id, name, data, base }) {
  const [source, setSource] = useState("");
  const column = name === "turns" ? "num_turns" : name;
  const sources = Object.keys(data.by_source || {});
  const counts = (source && data.by_source[source]) || data.counts;
  const narrowed = source && clause("data_source", "=", source);
  const edges = data.edges;
  const filled = [...counts.keys()].filter((at) => counts[at] > 0);
  const bars = counts.map((n, at) => {
    const [low, high, last] = [edges[at], edges[at + 1] ?? edges[at], at === counts.length - 1];
    const part = !source && data.truncated ? data.truncated[at] : 0;
    return {
      label: String(at), count: n, part, title: `${figure(low)} to ${figure(high)}: ${count(n)}${part
        ? `, ${count(part)} truncated` : ""}`,
      href: to(["run", id, "rows"], { filter: both(between(column, low, high, last), narrowed, base) }),
    };
  });
  return html`<div class="panel"><div class="line"><h2>${TITLES[name] || name}</h2>
    ${sources.length > 1 && html`<select aria-label="data source" value=${source}
      onChange=${(event) => setSource(event.target.value)}>
      <option value="">all sources</option>${sources.map((it) =>
        html`<option key=${it} value=${it}>${visible(it)}</option>`)}</select>`}
    ${data.truncated?.some((n) => n > 0) && html`<a class="legend"
      href=${to(["run", id, "rows"], { filter: both("finish_reason = length", base) })}>
      <span class="swatch part"></span>truncated</a>`}</div>
    ${filled.length === 1 && edges[filled[0] + 1] - edges[filled[0]] <= 1
      ? html`<p><a href=${bars[filled[0]].href}>All ${count(counts[filled[0]])}</a> have ${
        figure(edges[filled[0]])}.</p>` : counts.length ? html`<${Bars} bars=${bars} label=${TITLES[name] || name} from=${figure(edges[0])}
      until=${figure(edges.at(-2))} />`
      : html`<p class="muted">No values.</p>`}</div>`;
}

/** A setting in few characters. */
export const setting = (value) => (value === null || value === undefined ? NONE : value === "" ? '""'
  : visible(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 60));

/** All that decides a run's data. */
function Settings({ settings }) {
  const names = Object.keys(settings || {}).sort();
  if (!names.length) return null;
  return html`<details class="panel wide"><summary><b>Settings</b> <span class="muted">all that decides the data
    </span></summary><dl class="settings">${names.map((name) => html`<div key=${name}><dt>${visible(name)}</dt><dd>${
    visible(typeof settings[name] === "string" ? settings[name] : JSON.stringify(settings[name]))}</dd></div>`)}</dl>
    </details>`;
}

const SAMPLES = [["Best", { sort: "-reward" }], ["Worst", { sort: "reward" }], ["Longest", { sort: "-tokens" }]];

/** A rollout of each kind to read. */
function Samples({ id, again, base }) {
  const [rows, setRows] = useState([]);
  useEffect(() => {
    const stop = new AbortController();
    const ask = (name, params) => getJSON(`/api/runs/${segment(id)}/${name}`, params, { signal: stop.signal });
    (async () => {
      const found = await Promise.all(SAMPLES.map(([, query]) => ask("rows",
        { ...query, filter: both("reward != null", base), limit: 1, columns: "index,repeat,reward,tokens" })));
      const first = found.map((it) => it.rows[0]).filter(Boolean);
      if (!first.length) return;
      const { texts } = await ask("texts", { rows: first.map(([row]) => row).join(",") });
      setRows(first.map((row) => [...row, texts[row[0]] || {}]));
    })().catch(() => {});
    return () => stop.abort();
  }, [id, again]);
  if (!rows.length) return null;
  return html`<div class="panel wide"><h2>To read</h2><div class="samples">${rows.map(
    ([row, index, repeat, reward, tokens, texts], at) => html`<a key=${at}
      href=${to(["run", id, "trajectory", String(row)])}><b>${SAMPLES[at][0]}</b> <span class="muted">${
        index}/${repeat} · reward ${figure(reward)} · ${count(tokens)} tokens</span>
      <span class="clamp muted" dir="auto">${visible(texts.prompt || "")}</span>
      <span class="clamp" dir="auto">${visible(texts.answer || "")}</span></a>`)}</div></div>`;
}

const tone = (solved, scored) => (!scored ? "none" : solved === 0 ? "wrong" : solved === scored ? "right"
  : solved / scored <= 1 / 3 ? "mixed1" : solved / scored <= 2 / 3 ? "mixed2" : "mixed3");

function SolveStrip({ id, data }) {
  const [bySolved, setBySolved] = useState(false);
  const groups = data.groups;
  const strip = bySolved ? [...data.solve_strip].sort((a, b) => a[1] / (a[2] || 1) - b[1] / (b[2] || 1)
    || a[0] - b[0]) : data.solve_strip;
  const list = (filter) => to(["run", id, "groups"], filter);
  return html`<div class="panel wide"><div class="line"><h2>Prompts: how often each is solved</h2>
      ${Number.isFinite(data.solved_at) && html`<span class="muted">reward ≥ ${figure(data.solved_at)}</span>`}
      <label><input type="checkbox" checked=${bySolved}
        onChange=${() => setBySolved(!bySolved)} /> in order of solve rate</label>
      ${groups.total > strip.length
        && html`<span class="muted">${count(strip.length)} of ${count(groups.total)}, evenly picked</span>`}</div>
    <${Shares} label="groups" parts=${[
      { label: "all wrong", count: groups.all_wrong, tone: "wrong", href: list({ sort: "solved" }) },
      { label: "mixed", count: groups.mixed, tone: "mixed2", href: list({ sort: "-spread" }) },
      { label: "all right", count: groups.all_right, tone: "right", href: list({ sort: "-solved" }) },
      { label: "unscored", count: groups.unscored, tone: "none", href: to(["run", id, "rows"],
        { filter: "reward = null" }) }]} />
    <div class="solve">${strip.map(([index, solved, scored, size]) => html`<a key=${index} class=${tone(solved, scored)}
      href=${to(["run", id, "group", String(index)])}
        title=${`prompt ${index}: ${solved} of ${scored} scored solved, ${size} rollouts`}
      aria-label=${`prompt ${index}: ${solved} of ${scored}`}></a>`)}</div>
    <p><a href=${list({ sort: "spread" })}><b>${count(groups.no_signal)}</b> of ${count(groups.total)} groups (${
      percent(groups.no_signal, groups.total)})</a> have equal rewards throughout: they teach nothing.</p></div>`;
}

function Failure({ id, failure }) {
  const example = failure.example || {};
  return html`<details class="failure"><summary><a href=${to(["run", id, "failures"], { cause: failure.cause })}><b>${
      count(failure.count)}</b> ${visible(failure.cause)}</a>${" "}<span class="muted">${visible(example.stage
        || "")}</span></summary>
    <p>For example <a href=${to(["run", id, "group",
      String(example.index)])}>prompt ${example.index}, repeat ${example.repeat}</a>:
      ${visible(example.error || "")}</p>
    ${example.traceback && html`<pre class="text code">${visible(example.traceback)}</pre>`}</details>`;
}

/** Calls and errors of each tool; a name leads to where it stands in messages. */
function Tools({ id, calls }) {
  const state = useApi(calls > 0 && `/api/runs/${segment(id)}/tools`, {}, calls);
  const behind = (tool, n, column) => (n ? html`<a href=${to(["run", id, "rows"], {
    filter: `${column} > 0`, sort: `-${column}`, text: tool.name })}>${count(n)}</a>` : count(n));
  if (!calls) return null;
  return html`<div class="panel"><h2>Tools</h2>${!state.data ? html`<${Pending} state=${state} />` : html`<table><thead><tr><th>tool</th>
      <th class="number">calls</th><th class="number">errors</th></tr></thead>
      <tbody>${state.data.tools.map((tool) => html`<tr key=${tool.name}>
        <td>${tool.name === null ? "name not noted" : visible(tool.name) || "no such tool"}</td>
        <td class="number">${behind(tool, tool.calls, "tool_calls")}</td>
        <td class="number">${behind(tool, tool.errors, "tool_errors")} <span class="muted">${
          percent(tool.errors, tool.calls)}</span></td></tr>`)}</tbody></table>`}</div>`;
}

/** Where prompts come from several sources (`data.sources`): how each does. */
function BySource({ id, settings, done }) {
  const state = useApi(settings?.["data.rows.sources"] && `/api/runs/${segment(id)}/sources`, {}, done);
  return state.data && html`<div class="panel"><h2>Mean reward by source</h2>
    <${Lines} label="sources" lines=${Object.entries(state.data).map(([name, it]) => ({
    label: name || "not known", count: Math.max(0, it.mean_reward ?? 0), value: figure(it.mean_reward),
    detail: `${count(it.completed)}${it.failed ? `, ${count(it.failed)} failed` : ""}` }))} /></div>`;
}

const known = new Map();

/** A run's overview; that of a run which has ended is asked for when something is new, whichever views need it. */
export function useRun(id, again = 0) {
  const held = known.get(id);
  const state = useApi(held && !again && held.state !== "running" ? null : `/api/runs/${segment(id)}`, {}, again);
  if (state.data?.id === id) known.set(id, state.data);
  return known.has(id) ? { ...state, data: known.get(id) } : state;
}

/** Counts of a run as they change since its overview was made: one that has ended may be resumed. */
export function useFollow(id, run, onChange) {
  const [live, setLive] = useState(null);
  const lost = useStream(`/api/runs/${segment(id)}/follow`, ({ event, data }) => {
    if (event !== "change") return;
    setLive(data);
    onChange?.(data);
  }, run?.state === "running" ? "" : run?.cursor);
  return [live, lost];
}

export function Live({ live, lost }) {
  if (lost) return html`<span class="state damaged" role="status">connection lost, trying again</span>`;
  if (live?.state !== "running") return null;
  return html`<span class="state running" role="status">live: ${count(live.done)}${
    live.total === null ? "" : ` of ${count(live.total)}`}</span>`;
}

export function Run({ id, query }) {
  const [again, setAgain] = useState(0);
  const [due] = useState({ timer: 0 });
  const state = useRun(id, again);
  const [live, lost] = useFollow(id, state.data, () => {
    // At most a tenth of the server's time goes into figures that nobody may be looking at.
    due.timer ||= setTimeout(() => { due.timer = 0; setAgain((n) => n + 1); }, Math.max(3000, 10 * state.took));
  });
  const ready = Boolean(state.data);
  useEffect(() => { if (ready && query.at) document.getElementById(query.at)?.scrollIntoView(); }, [ready, query.at]);
  if (!state.data) return html`<${Pending} state=${state} />`;
  const run = { ...state.data, ...(live ? { done: live.done, failed: live.failed, total: live.total,
    tokens: live.tokens ?? state.data.tokens } : {}) };
  const rows = (query) => to(["run", id, "rows"], query);
  const has = (name) => run.columns.some((column) => column.name === name);
  const sorted = (name) => (has(name) ? rows({ sort: `-${name}` }) : rows());
  const reasons = Object.entries(run.finish_reasons || {});
  const sources = Object.entries(run.sources || {});
  const time = run.time || {};
  const line = run.timeline;
  const steps = line ? line.finished.map((_, at) => line.start + at * line.step_s) : [];
  const active = line?.in_flight.filter((n, at) => n > 0 || line.finished[at] > 0).length * line?.step_s;
  const rate = (values) => values && values.reduce((sum, n) => sum + n, 0) / active;
  const finished = (at) => go(rows({ filter: between("finished_at", steps[at], steps[at] + line.step_s, false) }));
  const fact = (title, body, href) => html`<div><dt>${title}</dt><dd>${href ? html`<a href=${href}>${body}</a>`
    : body}</dd></div>`;
  return html`<section>
    <div class="line"><h1>${visible(run.name)}</h1><${State} state=${live?.state ?? run.state} total=${run.total} />
      <${Live} live=${live} lost=${lost} />
      <span class="muted">${visible(run.path || "")}</span></div>
    <${RunTabs} id=${id} at="glance" />
    ${(run.damage || []).map((text) => html`<p class="problem" key=${text}>${visible(text)}</p>`)}
    ${run.error && !run.damage?.length && html`<p class="problem" role="alert">${visible(run.error)}</p>`}
    <dl class="facts">
      ${fact("model", html`<span title=${run.model}>${visible((run.model || NONE).split("/").slice(-2).join("/"))}</span>`)}
      ${["engine", "rollout.temperature"].map((name) => run.settings?.[name] !== undefined
        && fact(name.split(".").at(-1), setting(run.settings[name])))}
      ${fact("prompts × n", run.prompts === null ? NONE : `${count(run.prompts)} × ${run.n ?? "?"}`,
        to(["run", id, "groups"]))}
      ${fact("done", run.total === null ? count(run.done) : `${count(run.done)} of ${count(run.total)}`, rows())}
      ${fact("failed", count(run.failed), run.failed ? to(["run", id, "failures"]) : undefined)}
      ${fact("unscored", count(run.unscored), rows({ filter: "reward = null" }))}
      ${fact("mean reward", html`<${Interval} value=${run.reward_mean} range=${run.reward_interval} />`,
        rows({ sort: "-reward" }))}
      ${run.scores && fact("scored anew", visible(run.scores))}
      ${fact(run.base_filter ? "sampled tokens, snapshots' too" : "sampled tokens", short(run.tokens),
        sorted("sampled"))}
      ${fact("rollouts/s", figure(rate(line?.finished)), withQuery({ at: "timeline" }))}
      ${fact("tokens/s", figure(rate(line?.tokens)), withQuery({ at: "timeline" }))}
      ${run.logprobs && fact("log-probs", visible(run.logprobs))}
      ${fact("started", moment(run.started))}
    </dl>
    <div class="panels fill-rows">
      ${(run.failures || []).length > 0 && html`<div class="panel wide failed" id="failures"><h2>Failures by cause</h2>${
        run.failures.map((failure) => html`<${Failure} key=${failure.cause} id=${id}
          failure=${failure} />`)}</div>`}
      ${Object.keys(run.reward_failures || {}).length > 0 && html`<div class="panel wide failed"><h2>Rewards that failed, by
        cause</h2><${Lines} label="rewards that failed" lines=${Object.entries(run.reward_failures).map(([cause, n]) => ({
        label: cause, title: cause, count: n, href: rows({ filter: both("reward = null", run.base_filter) }) }))} /></div>`}
      <${SolveStrip} id=${id} data=${run} />
      <${Samples} id=${id} again=${again} base=${run.base_filter} />
      ${Object.entries(run.histograms || {}).map(([name, data]) => data
        && html`<${Histogram} key=${name} id=${id} name=${name} data=${data} base=${run.base_filter} />`)}
      <div class="panel"><h2>Why rollouts ended</h2>
        <${Lines} label="finish reasons" lines=${reasons.map(([reason, n]) => ({
        label: reason, count: n, detail: percent(n, reasons.reduce((sum, [, it]) => sum + it, 0)),
          tone: reason === "length" ? "part" : "",
        href: rows({ filter: both(clause("finish_reason", "=", reason), run.base_filter) }) }))} /></div>
      <div class="panel"><h2>Mean reward by data source</h2>
        <${Lines} label="data sources" lines=${sources.map(([name, it]) => ({
        label: name, count: Math.max(0, it.reward_mean ?? 0), value: figure(it.reward_mean), detail: count(it.count),
        title: `${name}: ${count(it.count)} rollouts, mean reward ${figure(it.reward_mean)}`,
        href: rows({ filter: both(clause("data_source", "=", name), run.base_filter) }) }))} /></div>
      <${BySource} id=${id} settings=${run.settings} done=${run.done} />
      <${Tools} id=${id} calls=${run.tool_calls} />
      <div class="panel"><h2>Where a rollout's time goes, mean</h2><${Shares} label="time" parts=${
        [["queue", "queue_s"], ["generate", "generate_s"], ["tools", "tool_s", "tools or program"],
          ["reward", "reward_s"]].map(([tone, name, label = tone]) => ({
          label, count: time[name] || 0, value: seconds(time[name] ?? null), tone,
            href: sorted(name) }))} /></div>
      ${steps.length > 1 && html`<div class="panel wide" id="timeline">
        <h2>Over time <span class="muted">a click leads to the rollouts that finished then</span></h2>
        ${[[run.state === "running" ? "in flight, of those that have finished" : "in flight", line.in_flight, 1], ["rollouts finished per second", line.finished, line.step_s],
          ["tokens per second", line.tokens, line.step_s]]
          .map(([name, values, by]) => values && html`<${Curves} key=${name} x=${steps} time=${true} title=${name}
            sync=${id} height=${130} onPick=${finished}
            series=${[{ label: name, values: values.map((n) => (n === null ? null : n / by)) }]} />`)}</div>`}
      <${Settings} settings=${run.settings} />
    </div>
  </section>`;
}

const FAILED = [
  { name: "index", title: "prompt", number: true, width: "80px", show: (it) => String(it.index) },
  { name: "repeat", title: "repeat", number: true, width: "70px", show: (it) => String(it.repeat) },
  { name: "error", title: "error", width: "minmax(200px, 1fr)", show: (it) => visible(it.error || "") },
  { name: "stage", title: "stage", width: "90px", show: (it) => visible(it.stage || "") },
  { name: "attempts", title: "attempts", number: true, width: "90px", show: (it) => count(it.attempts) },
  { name: "failed_at", title: "at", width: "160px", show: (it) => moment(it.failed_at) },
].map((column) => ({ ...column, sortable: false }));

/** The rollouts that failed, of one cause or of all. */
export function Failures({ id, query: { cause } }) {
  const load = async (offset, limit, signal) => {
    const answer = await getJSON(`/api/runs/${segment(id)}/failures`, { cause, offset, limit }, { signal });
    return { total: answer.total, rows: answer.failures };
  };
  return html`<section class="page"><div class="line"><h1>Failed rollouts</h1><${RunTabs} id=${id} at="failures" />
      ${cause && html`<a class="chip" href=${withQuery({ cause: null })}>${visible(cause)} ✕</a>`}</div>
    <${Table} label="failures" columns=${FAILED} load=${load} of=${`${id}|${cause}`}
      address=${(it) => to(["run", id, "group", String(it.index)])} /></section>`;
}
