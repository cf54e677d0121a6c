// The groups of a run, and one of them: the rollouts of a prompt side by side.

import {
  html, useEffect, useMemo, useRef, useState, useApi, useKeys, Pending, getJSON, to, go, withQuery, count, figure,
  percent, plural, segment,
} from "./core.js";
import { visible, plain, Message } from "./text.js";
import { Table, TotalLine } from "./table.js";
import { Filter } from "./filter.js";
import { RunTabs, useRun } from "./run.js";

const number = (name, title, text = (group) => figure(group[name])) => ({ name, title, number: true, width: "88px",
  show: text });
const COLUMNS = [
  { ...number("index", "prompt", (group) => String(group.index)), width: "96px" },
  number("solved", "solved", (group) => `${group.solved} / ${group.scored}`), number("mean", "mean"),
  number("spread", "spread"), number("min", "lowest"), number("max", "highest"), number("size", "rollouts"),
  number("mean_tokens", "tokens"),
  number("truncated", "truncated", (group) => count(group.truncated)),
  { name: "data_source", title: "data source", width: "140px", sortable: false, show: (group) =>
    visible(group.data_source || "") },
  { name: "prompt", title: "prompt", width: "minmax(300px, 1fr)", sortable: false, show: (group) =>
    visible((group.prompt || "").replace(/\s+/g, " ")) },
];

export function Groups({ id, query }) {
  const run = useRun(id);
  const [totals, setTotals] = useState({ total: null });
  const [error, setError] = useState(null);
  const filter = query.filter || "", sort = query.sort || "index";
  useKeys([["/", "to the filter", () => document.getElementById("filter")?.focus()]]);
  if (!run.data) return html`<${Pending} state=${run} />`;
  const load = async (offset, limit, signal) => {
    try {
      const answer = await getJSON(`/api/runs/${segment(id)}/groups`, { filter, sort, offset, limit }, { signal });
      setError(null);
      return { total: answer.total, rows: answer.groups };
    } catch (problem) {
      if (problem.position === null) throw problem;
      if (!signal.aborted) setError(problem);
      return { total: 0, rows: [] };
    }
  };
  return html`<section class="page">
    <div class="line"><h1><a href=${to(["run", id])}>${visible(run.data.name)}</a></h1>
      <${RunTabs} id=${id} at="groups" />
      <${TotalLine} total=${totals.total} all=${null} what="groups" /></div>
    <${Filter} filter=${filter} columns=${run.data.columns} error=${error}
      onFilter=${(text) => go(withQuery({ filter: text }))} />
    <${Table} label="groups" columns=${COLUMNS} load=${load} of=${`${id}|${filter}|${sort}`} sort=${sort}
      onTotal=${setTotals}
      onSort=${(name) => go(withQuery({ sort: name }))}
        address=${(group) => to(["run", id, "group", String(group.index)])} />
  </section>`;
}

/** Characters that all texts begin with. */
function shared(texts) {
  if (texts.length < 2) return 0;
  let n = Math.min(...texts.map((text) => text.length));
  for (const text of texts.slice(1)) {
    let at = 0;
    while (at < n && text[at] === texts[0][at]) at += 1;
    n = at;
  }
  return n;
}

/** `[message, character, whether there is one]` at which the rollouts' conversations begin to differ. */
function firstDifference(rollouts) {
  const whole = (message) => `${message.role}\n${plain(message)}`;
  const all = rollouts.filter((it) => it.messages?.length).map((it) => it.messages.map(whole));
  const longest = Math.max(0, ...all.map((texts) => texts.length));
  let fork = 0;
  while (fork < longest && all.every((texts) => texts[fork] === all[0][fork])) fork += 1;
  const texts = all.map((messages) => messages[fork] ?? "").map((text) => text.slice(text.indexOf("\n") + 1));
  return [fork, shared(texts), all.length > 1 && fork < longest];
}

/** Rewards of one group share a scale: its own lowest and highest. */
function RewardBar({ reward, low, high }) {
  const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  if (reward === null) return html`<span></span>`;
  return html`<span class="track"><span class="fill" style=${{ width: `${Math.max(2, 100 * share)}%` }}></span></span>`;
}

const BRIEF = 300; // characters of JSON: such answers are wrapped, instead of scrolled sideways

/** The rollouts of a group as columns. `id`: the run they are of. */
export function Columns({ id, group, sorted = false }) {
  const rollouts = sorted ? [...group.rollouts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity))
    : group.rollouts;
  const rewards = rollouts.map((it) => it.reward).filter((it) => it !== null && it !== undefined);
  const [low, high] = [Math.min(0, ...rewards), Math.max(0, ...rewards)];
  const [fork, same, compared] = useMemo(() => firstDifference(rollouts), [group, sorted]);
  const brief = rollouts.every((it) => JSON.stringify(it.messages || []).length < BRIEF);
  return html`<div class="side ${brief ? "brief" : ""}" tabindex="0" aria-label="rollouts side by side">${rollouts.map((it) =>
    html`<section class="rollout" key=${it.repeat}>
    <header>
      ${Number.isInteger(it.row) ? html`<a href=${to(["run", id, "trajectory", String(it.row)])}>
        <b>${it.repeat}</b></a>` : html`<b>${it.repeat}</b>`}
      <span class="reward">reward <b>${figure(it.reward)}</b></span><${RewardBar} reward=${it.reward ?? null}
        low=${low} high=${high} />
      <div class="muted">${count(it.response_tokens)} tokens · ${count(it.num_turns)} turns · <span
        class=${it.finish_reason === "length" ? "warn" : ""}>${
        visible(it.finish_reason || "")}</span>${it.trajectories?.length > 1
          && html` · ${it.trajectories.map((row, n) => html` <a key=${row}
        href=${to(["run", id, "trajectory", String(row)])}>${n + 1}</a>`)}`}</div>
      ${Object.entries(it.reward_extra || {}).slice(0, 6).map(([name, value]) =>
        html`<div class="extra" key=${name}><span class="muted">${visible(name)}</span> ${
        visible(typeof value === "number" ? figure(value) : typeof value === "string" ? value.slice(0, 200)
          : JSON.stringify(value).slice(0, 200))}</div>`)}
    </header>
    ${it.failed && html`<details class="problem"><summary>failed in ${visible(String(it.failed.stage ?? "?"))}: ${
      visible(String(it.failed.error ?? ""))}</summary>
        <pre class="text">${visible(String(it.failed.traceback ?? ""))}</pre></details>`}
    ${(it.messages || []).map((message, n) => html`<${Message} message=${message} key=${n}
      mark=${!compared || n > fork ? null : n < fork ? Infinity : same} />`)}</section>`)}</div>`;
}

export function Group({ id, index, query }) {
  const state = useApi(`/api/runs/${segment(id)}/groups/${segment(index)}`, {});
  const [sorted, setSorted] = useState(false);
  const [opened, setOpened] = useState(true);
  const top = useRef(null);
  const group = state.data;
  const step = (other) => Number.isInteger(other) && go(to(["run", id, "group", String(other)], query));
  useEffect(() => { top.current?.scrollIntoView({ block: "start" }); }, [index]);
  useKeys([
    ["j ArrowRight", "next group", () => group && step(group.next)],
    ["k ArrowLeft", "group before", () => group && step(group.previous)],
    ["r", "rollouts in order of reward, or of repeat", () => setSorted((it) => !it)],
    ["p", "show or hide the prompt", () => setOpened((it) => !it)],
    ["u", "to all groups", () => go(to(["run", id, "groups"]))],
  ]);
  if (!group || String(group.index) !== String(index)) return html`<${Pending} state=${state} />`;
  const rewards = group.rollouts.map((it) => it.reward).filter((it) => it !== null && it !== undefined);
  const rewarded = rewards.filter((it) => it > 0).length;
  const equal = rewards.length > 1 && rewards.every((it) => it === rewards[0]);
  const button = (name, other) => html`<a class="button ${Number.isInteger(other) ? "" : "off"}"
    href=${Number.isInteger(other) ? to(["run", id, "group", String(other)], query) : undefined}>${name}</a>`;
  return html`<section ref=${top}>
    <div class="line"><h1>Prompt ${group.index}</h1>${button("◀ k", group.previous)}${button("j ▶", group.next)}
      <a href=${to(["run", id])}>run</a><a href=${to(["run", id, "groups"])}>all groups</a>
      <a href=${to(["run", id, "rows"], { filter: `index = ${group.index}` })}>its rows</a>
      <label><input type="checkbox" checked=${sorted}
        onChange=${() => setSorted(!sorted)} /> in order of reward</label></div>
    <dl class="facts"><div><dt>rollouts</dt><dd>${count(group.rollouts.length)}</dd></div>
      <div><dt>mean reward</dt><dd>${figure(rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length
        : null)}</dd></div>
      <div><dt>rewarded</dt><dd>${rewarded} of ${rewards.length} (${percent(rewarded, rewards.length)})</dd></div>
      <div><dt>data source</dt><dd>${visible(group.data_source || "–")}</dd></div>
      <div><dt>ground truth</dt><dd class="clip">${visible(typeof group.ground_truth === "string"
        ? group.ground_truth : JSON.stringify(group.ground_truth ?? null))}</dd></div>
      <div><dt>prompt key</dt><dd><code>${group.prompt_key}</code></dd></div></dl>
    ${equal && html`<p class="note">All rewards are ${figure(rewards[0])}: this group teaches nothing.</p>`}
    ${group.prompt?.length > 0 && html`<details class="prompt" open=${opened}
      onToggle=${(event) => setOpened(event.target.open)}>
      <summary>Prompt, ${plural(group.prompt.length, "message")}</summary>
      ${group.prompt.map((message, n) => html`<${Message} message=${message} key=${n} />`)}</details>`}
    <${Columns} id=${id} group=${group} sorted=${sorted} />
  </section>`;
}
