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

/** Names and values, and what is in them one step further in. */
function Tree({ values }) {
  const entries = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
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

/** Where the rollout's time went. */
function Times({ metrics }) {
  const parts = PARTS.map((name) => ({ label: name === "tool" ? "tool or program" : name, tone: name === "tool" ? "tools" : name,
    count: metrics?.[`${name}_s`] || 0, value: seconds(metrics?.[`${name}_s`] ?? null) }));
  return parts.some((part) => part.count > 0) && html`<div class="figures"><${Shares} label="time" parts=${parts} /></div>`;
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
  return html`<section>
    <div class="line"><h1>Prompt <a href=${group}>${it.index}</a>, repeat ${it.repeat}</h1>
      ${step("◀ k", before, -1)}${step("j ▶", after, 1)}<a href=${list}>list</a><a href=${group}>group</a>
      <a href=${to(["run", id])}>run</a></div>
    ${it.of > 1 && html`<nav class="line" aria-label="trajectories of the rollout">
      <span class="muted">Trajectories of this rollout, in order:</span>
      ${it.siblings.map((other, n) => html`<a key=${other} class="button"
        aria-current=${other === it.row ? "page" : undefined}
        href=${to(["run", id, "trajectory", String(other)], query)}>
        ${n + 1} ${n < it.siblings.length - 1 ? "snapshot" : "final"}</a>`)}</nav>`}
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
        </div><aside><${Times} metrics=${it.metrics} /><${Figures} title="Reward says" values=${it.reward_extra} />
          <${Figures} title="Metrics" values=${{ ...it.metrics, ...Object.fromEntries(PARTS.map((name) => [`${name}_s`])) }} />
          <${Figures} title="Extra" values=${it.extra} />
          <${Figures} title="Identity" values=${{ prompt_key: it.prompt_key, data_source: it.data_source }} /></aside></div>`}
  </section>`;
}
