// One trajectory: its conversation, its tokens, and everything as JSON.

import {
  html, NONE, useEffect, useState, useApi, useKeys, Pending, Copy, getJSON, getBytes, to, go, withQuery, count, figure,
  plural, seconds, segment,
} from "./core.js";
import { visible, Message, Text } from "./text.js";
import { Shares } from "./charts.js";
import { Tokens, parseTokens } from "./tokens.js";

const TABS = [["conversation", "Conversation"], ["tokens", "Tokens"], ["json", "JSON"]];

/** A value in few words; the whole of it is in the JSON. */
function text(value) {
  if (typeof value === "number") return figure(value);
  if (Array.isArray(value) && value.length > 12) return `${count(value.length)} values`;
  const whole = typeof value === "string" ? value : JSON.stringify(value);
  return visible(whole.length > 400 ? `${whole.slice(0, 400)}…` : whole);
}

const nested = (value) => value !== null && typeof value === "object"
  && (Array.isArray(value) ? value.some(nested) && value.length <= 50 : Object.keys(value).length > 0);

/** A text that is JSON of a list or an object, as what it says. */
function read(value) {
  if (typeof value !== "string" || !/^\s*[[{]/.test(value)) return value;
  try { return JSON.parse(value); } catch { return value; }
}

/** Names and values, and what is in them one step further in. */
function Tree({ values }) {
  const entries = Object.entries(values).map(([name, value]) => [name, read(value)]).filter(([, value]) => value !== null && value !== undefined);
  return html`<dl>${entries.map(([name, value]) => (nested(value)
    ? html`<details key=${name} open><summary>${visible(name.replaceAll("_", " "))}</summary><${Tree} values=${value} /></details>`
    : html`<div key=${name}><dt>${visible(name.replace(/_s$/, "").replaceAll("_", " "))}</dt><dd>${
      name.endsWith("_s") && typeof value === "number" ? seconds(value) : text(value)}</dd></div>`))}</dl>`;
}

function Figures({ title, values }) {
  if (!Object.values(values || {}).some((value) => value !== null && value !== undefined)) return null;
  return html`<details class="figures" open><summary>${title}</summary><${Tree} values=${values} /></details>`;
}

const PARTS = ["queue", "generate", "tool", "reward"];
const TONES = { queue: "queue", generate: "generate", tool: "tools", reward: "reward" };

/** Where the rollout's time went. */
function Times({ metrics }) {
  const parts = PARTS.map((name) => ({ label: name === "tool" ? "tool or program" : name, tone: TONES[name],
    count: metrics?.[`${name}_s`] || 0, value: seconds(metrics?.[`${name}_s`] ?? null) }));
  return parts.some((part) => part.count > 0) && html`<div class="figures"><${Shares} label="time" parts=${parts} /></div>`;
}

const SEEN_S = 0.0005; // what took less is "0 ms"
const isTime = (it) => Array.isArray(it) && Number.isFinite(it[1]) && (it[2] >= SEEN_S || it[0] === "generate");

/**
 * When the rollout's calls of the model and its tools ran, on one clock from its dispatch: those that led to its answer
 * first, then those of its other trajectories. Null where that was not noted: one call, or an older run.
 */
function waterfall(it) {
  const { queue_s: queue, reward_s: reward, total_s: total } = it.metrics || {};
  const lists = Object.entries(it.call_times || {}).map(([row, times]) => ({ row: Number(row), times: times.filter(isTime)
    .map(([kind, start, seconds]) => ({ kind, from: (queue || 0) + start, seconds })) }))
    .filter((list) => list.times.length > 0).sort((a, b) => it.siblings.indexOf(b.row) - it.siblings.indexOf(a.row));
  if (!lists.length) return null;
  const bars = lists.flatMap((list) => list.times);
  const end = Math.max(total || 0, ...bars.map((bar) => bar.from + bar.seconds));
  if (queue >= SEEN_S) lists[0].times.unshift({ kind: "queue", from: 0, seconds: queue });
  if (reward >= SEEN_S) lists[0].times.push({ kind: "reward", from: Math.max(0, end - reward), seconds: reward });
  return { lists, end };
}

/** What a trajectory of the rollout is, with its number. */
const named = (it, row) => `${it.siblings.indexOf(row) + 1} ${it.side_calls?.includes(row) ? "side call"
  : row === it.siblings.at(-1) ? "final" : "snapshot"}`;

/** A line for each call with its place in time; what the model said there is a click away. */
function Waterfall({ id, it, lists, end }) {
  const answers = it.messages.flatMap((message, n) => (message.role === "assistant" ? [n] : []));
  const share = (value) => `${Math.min(100, (100 * value) / (end || 1))}%`;
  const line = (bar, n, at) => {
    const title = `${bar.kind}: ${seconds(bar.seconds)} from ${seconds(bar.from)}`;
    return html`<li key=${n} title=${title}>${Number.isInteger(at) ? html`<button type="button" onClick=${() =>
      document.getElementById(`message-${at}`)?.scrollIntoView({ block: "center" })}>${visible(bar.kind)}</button>`
      : html`<span>${visible(bar.kind)}</span>`}<span class="track"><span class=${TONES[bar.kind] ?? "queue"}
      style=${{ left: share(bar.from), width: share(bar.seconds) }}></span></span>
      <span class="number">${seconds(bar.seconds)}</span></li>`;
  };
  return html`<div class="figures falls"><b>Timeline</b> <span class="muted">${seconds(end)}${
    it.extra?.gateway && "; between calls the program works"}</span>${lists.map((list) => {
    const calls = list.times.filter((bar) => bar.kind === "generate");
    const own = list.row === it.row && calls.length === answers.length;
    return html`<div key=${list.row}>${lists.length > 1 && html`<a
      href=${to(["run", id, "trajectory", String(list.row)])}>${named(it, list.row)}</a>`}<ol aria-label="calls in time">${list.times.map((bar, n) => line(bar, n,
      own ? answers[calls.indexOf(bar)] : undefined))}</ol></div>`;
  })}</div>`;
}

/** Everything of a trajectory, its token arrays, too, each on one line. */
async function everything(id, trajectory) {
  const tokens = parseTokens(await getBytes(`/api/runs/${segment(id)}/trajectories/${trajectory.row}/tokens`));
  const arrays = Object.entries(tokens.columns).filter(([name]) => !name.startsWith("text"))
    .map(([name, values]) => `  ${JSON.stringify(name)}: ${JSON.stringify(Array.from(values,
      (value) => (Number.isNaN(value) ? null : value)))}`);
  const body = JSON.stringify(trajectory, null, 2).replace(/\n\}$/, "");
  return `${body},\n  "tokens": {\n    "prompt": ${tokens.prompt},\n${arrays.map((line) =>
    `  ${line}`).join(",\n")}\n  }\n}\n`;
}

/** The rows before and after in the list that one came from: its filter and sort are in the address. */
function useNeighbours(id, trajectory, query) {
  const [found, setFound] = useState({});
  const listed = Boolean(query.filter || query.sort) && /^\d+$/.test(query.at);
  const at = Number(query.at);
  useEffect(() => {
    if (!trajectory || !listed) return undefined;
    const stop = new AbortController();
    const { filter, sort } = query;
    const asked = { filter, sort, columns: "index", offset: Math.max(0, at - 1), limit: at ? 3 : 2 };
    getJSON(`/api/runs/${segment(id)}/rows`, asked, { signal: stop.signal }).then((answer) => {
      const rows = answer.rows.map(([row]) => row);
      const here = at ? 1 : 0;
      setFound({ of: `${query.filter}|${query.sort}|${at}`, before: at ? rows[0] : null,
        after: rows[here + 1] ?? null });
    }, () => {});
    return () => stop.abort();
  }, [id, trajectory?.row, query.filter, query.sort, query.at]);
  if (!listed) return { before: trajectory?.previous_row, after: trajectory?.next_row, listed };
  return found.of === `${query.filter}|${query.sort}|${at}` ? { ...found, listed } : { listed };
}

export function Trajectory({ id, row, query, theme }) {
  const state = useApi(`/api/runs/${segment(id)}/trajectories/${segment(row)}`, {});
  const it = state.data && String(state.data.row) === String(row) ? state.data : null;
  const { before, after, listed } = useNeighbours(id, it, query);
  const [json, setJson] = useState(null);
  const tab = query.tab || "conversation";
  const open = (other, by = 0) => Number.isInteger(other)
    && go(to(["run", id, "trajectory", String(other)], { ...query, at: listed ? Number(query.at) + by : undefined }));
  const choose = (name) => go(withQuery({ tab: name }), { replace: true });
  useEffect(() => setJson(null), [row]);
  useEffect(() => {
    if (tab !== "json" || !it || json !== null) return;
    everything(id, it).then(setJson, (error) => setJson(`${JSON.stringify(it, null, 2)}\n// ${error.message}`));
  }, [tab, it, json]);
  const sibling = (by) => it && open(it.siblings[it.siblings.indexOf(it.row) + by]);
  useKeys([
    ["j", "next trajectory of the list", () => open(after, 1)], ["k", "trajectory before", () => open(before, -1)],
    ...TABS.map(([name, title], n) => [String(n + 1), title, () => choose(name)]),
    ["]", "next trajectory of the rollout", () => sibling(1)],
    ["[", "trajectory of the rollout before", () => sibling(-1)],
    ["g", "its group", () => it && go(to(["run", id, "group", String(it.index)]))],
    ["u", "to the list", () => go(to(["run", id, "rows"], { filter: query.filter, sort: query.sort }))],
    ["t", "unfold or fold thinking", () => {
      const all = [...document.querySelectorAll("details.thinking")];
      const open_ = !all.every((element) => element.open);
      for (const element of all) element.open = open_;
    }],
  ]);
  if (!it) return html`<${Pending} state=${state} />`;
  const step = (name, other, by) => html`<button type="button" disabled=${!Number.isInteger(other)}
    onClick=${() => open(other, by)}>${name}</button>`;
  const versions = it.policy_versions.map((run, _, all) => (
    all.length > 1 ? `${run.version} from ${run.start}` : run.version));
  const list = to(["run", id, "rows"], { filter: query.filter, sort: query.sort });
  const group = to(["run", id, "group", String(it.index)]);
  const falls = waterfall(it);
  return html`<section>
    <div class="line"><h1>Prompt <a href=${group}>${it.index}</a>, repeat ${it.repeat}</h1>
      ${step("◀ k", before, -1)}${step("j ▶", after, 1)}<a href=${list}>list</a><a href=${group}>group</a>
      <a href=${to(["run", id])}>run</a></div>
    ${it.of > 1 && html`<nav class="line" aria-label="trajectories of the rollout">
      <span class="muted">Trajectories of this rollout, in order:</span>
      ${it.siblings.map((other) => html`<a key=${other} class="button"
        aria-current=${other === it.row ? "page" : undefined}
        href=${to(["run", id, "trajectory", String(other)], query)}>
        ${named(it, other)}</a>`)}</nav>`}
    <dl class="facts">
      <div><dt>reward</dt><dd><b>${it.reward === null ? "not scored" : figure(it.reward)}</b></dd></div>
      <div><dt>ground truth</dt><dd class="clip">${it.ground_truth === null ? NONE : text(it.ground_truth)}</dd></div>
      <div><dt>ended by</dt><dd class=${it.finish_reason === "length" ? "warn" : ""}>${
        visible(it.finish_reason)}</dd></div>
      <div><dt>tokens</dt><dd>${count(it.prompt_tokens)} + ${count(it.response_tokens)}</dd></div>
      <div><dt>turns</dt><dd>${count(it.num_turns)}</dd></div>
      <div><dt>versions</dt><dd>${versions.join(", ") || "–"}</dd></div>
      <div><dt>row</dt><dd>${it.row}${it.is_snapshot ? ", snapshot" : ""}</dd></div>
    </dl>
    ${(it.notes || []).map((note) => html`<p class="note" key=${note}>${visible(note)}</p>`)}
    <div role="tablist" class="tabs">${TABS.map(([name, title]) => html`<button type="button" role="tab" key=${name}
      aria-selected=${tab === name} onClick=${() => choose(name)}>${title}</button>`)}</div>
    ${tab === "tokens" ? html`<${Tokens} id=${id} row=${it.row} colour=${query.colour} theme=${theme} />`
      : tab === "json" ? html`<div><${Copy} text=${() => json ?? everything(id, it)}>Copy all</${Copy}>${json === null
        ? html`<p class="muted">Loading…</p>` : html`<${Text} text=${json} className="code" />`}</div>`
        : html`<div class="talk"><div class="messages">
          ${(it.removed || []).length > 0 && html`<details class="removed">
            <summary>${plural(it.removed.length, "message")} of the snapshot before: not here any more</summary>
            ${it.removed.map((message, n) =>
              html`<${Message} message=${message} key=${n} removed=${true} />`)}</details>`}
          ${it.messages.map((message, n) => html`<${Message} message=${message} id=${`message-${n}`} key=${n} />`)}
        </div><aside>${falls ? html`<${Waterfall} id=${id} it=${it} lists=${falls.lists} end=${falls.end} />`
          : html`<${Times} metrics=${it.metrics} />`}<${Figures} title="Reward says" values=${it.reward_extra} />
          <${Figures} title="Metrics" values=${{ ...it.metrics,
            ...(falls ? {} : Object.fromEntries(PARTS.map((name) => [`${name}_s`]))) }} />
          <${Figures} title="Extra" values=${it.extra} />
          <${Figures} title="Identity" values=${{ prompt_key: it.prompt_key, data_source: it.data_source }} /></aside></div>`}
  </section>`;
}
