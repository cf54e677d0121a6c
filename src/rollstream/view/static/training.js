// A training over its steps, with the groups behind each, and a rollout buffer.

import { html, useEffect, useMemo, useState, useApi, useKeys, Pending, getJSON, to, go, withQuery, count, figure,
  plural, segment } from "./core.js";
import { visible, plain, Message, Text } from "./text.js";
import { Curves, Lines } from "./charts.js";

/** Records of a table at most. */
const SHOWN = 200;

const FIRST = ["reward", "reward_std", "loss", "length", "kl", "entropy", "staleness", "idle", "teach_nothing"];
const place = (key) => (key === "reward" ? -1 : FIRST.findIndex((word) => key.includes(word)));
const isMain = (key) => key === "reward" || place(key) >= 0;

/** Series that belong into one picture: those whose names differ after the last slash or underscore only. */
function pictures(series) {
  const found = new Map();
  for (const [name, values] of Object.entries(series)) {
    const known = values.filter((value) => value !== null);
    if (known.every((value) => value === known[0]) && known.length > 1) continue; // a number says it
    const key = name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : name;
    found.set(key, [...(found.get(key) || []), { label: name, values }]);
  }
  const all = [...found].flatMap(([key, it]) => (it.length <= 5 ? [[key, it]] : it.map((one) => [one.label, [one]])));
  return all.sort(([a], [b]) => (isMain(b) - isMain(a)) || place(a) - place(b));
}

/** `[name, value]` of the series that never change. */
const constants = (series) => Object.entries(series).map(([name, values]) => [name,
  values.filter((value) => value !== null)]).filter(([, known]) => known.length > 1
    && known.every((value) => value === known[0])).map(([name, known]) => [name, known[0]]);

/** Pictures, the main ones first and the rest when they are asked for, and what to find one by its name. */
function Pictures({ x, charts, same = [], onPick, sync }) {
  const [sought, setSought] = useState("");
  const [unfolded, unfold] = useState(false);
  useKeys([["/", "to the search of curves", () => document.getElementById("curves")?.focus()]]);
  const constant = same.filter(([name]) => name.includes(sought));
  const matching = charts.filter(([key]) => key.includes(sought));
  const main = matching.filter(([key]) => isMain(key));
  const shown = unfolded || sought || !main.length ? matching : main;
  return html`<div class="line"><label>Curves <input id="curves" type="search" value=${sought} placeholder="reward"
      onInput=${(event) => setSought(event.target.value)} /></label>
      ${onPick && html`<span class="muted">click a curve for the groups behind a step</span>`}</div>
    ${constant.length > 0 && html`<details open=${Boolean(sought)}><summary class="muted">${
      plural(constant.length, "figure")} that never changed</summary><dl class="facts">${constant.map(([name, value]) =>
      html`<div key=${name}><dt>${visible(name)}</dt><dd>${figure(value)}</dd></div>`)}</dl></details>`}
    <div class="panels">${shown.map(([key, series]) => html`<div class="panel" key=${key}>
      <${Curves} x=${x} series=${series} title=${key.replaceAll("_", " ")} onPick=${onPick} sync=${sync} /></div>`)}</div>
    ${shown.length < matching.length && html`<p><button type="button" onClick=${() => unfold(true)}>${
      plural(matching.length - shown.length, "more curve")}</button></p>`}`;
}

/** `[steps, pictures]` of several trainings, `[[name, {steps, series}], …]`: a line for each of them. */
function overlaid(trainings) {
  const steps = [...new Set(trainings.flatMap(([, data]) => data.steps))].sort((a, b) => a - b);
  const names = [...new Set(trainings.flatMap(([, data]) => Object.keys(data.series)))];
  const charts = names.map((name) => [name, trainings.map(([label, data]) => {
    const values = new Map(data.steps.map((step, at) => [step, data.series[name]?.[at] ?? null]));
    return { label, values: steps.map((step) => values.get(step) ?? null) };
  })]).filter(([, lines]) => new Set(lines.flatMap((line) => line.values).filter((value) => value !== null)).size > 1);
  return [steps, charts.sort(([a], [b]) => (isMain(b) - isMain(a)) || place(a) - place(b))];
}

/** Several trainings over one another. */
export function Trainings({ ids }) {
  const sources = useApi("/api/sources", {});
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    Promise.all(ids.map((id) => getJSON(`/api/training/${segment(id)}`, {}))).then(
      (data) => setState({ data, error: null }), (error) => setState({ data: null, error }));
  }, [ids.join("/")]);
  const name = (id) => visible(sources.data?.sources.find((it) => it.id === id)?.name ?? id);
  const [steps, charts] = useMemo(() => overlaid(state.data && sources.data ? state.data.map((data, at) =>
    [name(ids[at]), data]) : []), [state.data, sources.data]);
  if (!state.data || !sources.data) return html`<${Pending} state=${state} />`;
  return html`<section><div class="line"><h1>${plural(ids.length, "training")}</h1>${ids.map((id) => html`<a key=${id}
      href=${to(["training", id])}>${name(id)}</a>`)}</div>
    <${Pictures} x=${steps} charts=${charts} sync="trainings" /></section>`;
}

export function Training({ id, query }) {
  const sources = useApi("/api/sources", {});
  const state = useApi(`/api/training/${segment(id)}`, {});
  const data = state.data;
  const charts = useMemo(() => (data ? pictures(data.series) : []), [data]);
  const at = data && query.step !== undefined ? data.steps.indexOf(Number(query.step)) : -1;
  const behind = useApi(at >= 0 && `/api/training/${segment(id)}/groups`, { after: data?.steps[at - 1],
    step: data?.steps[at], limit: SHOWN });
  const choose = (n) => data && data.steps[n] !== undefined && go(withQuery({ step: data.steps[n] }),
    { replace: true });
  useKeys([
    ["j ArrowRight", "next step", () => choose(at + 1)], ["k ArrowLeft", "step before", () =>
      choose(Math.max(0, at - 1))],
  ]);
  if (!data) return html`<${Pending} state=${state} />`;
  const groups = behind.data?.groups || [];
  return html`<section>
    <div class="line"><h1>Training ${visible(sources.data?.sources.find((it) => it.id === id)?.name)}</h1><span class="muted">${count(data.steps.length)} steps</span></div>
    ${at >= 0 && html`<div class="panel wide"><div class="line"><h2>Step ${data.steps[at]}</h2>
      <button type="button" onClick=${() => choose(at - 1)} disabled=${at === 0}>◀ k</button>
      <button type="button" onClick=${() => choose(at + 1)}
        disabled=${at === data.steps.length - 1}>j ▶</button></div>
      <dl class="facts">${Object.entries(data.series).map(([name, values]) => values[at] !== null
        && html`<div key=${name}><dt>${visible(name)}</dt><dd>${figure(values[at])}</dd></div>`)}</dl>
      ${groups.length ? html`<${Records} title="Groups" records=${groups} total=${behind.data.total} />`
        : behind.data && html`<p class="muted">The log does not say which groups this step was made of.</p>`}</div>`}
    <${Pictures} x=${data.steps} charts=${charts} same=${constants(data.series)} onPick=${choose} sync=${id} />
  </section>`;
}

const clipped = (text) => visible(text.length > 200 ? `${text.slice(0, 200)}…` : text);
const cell = (value) => (typeof value === "number" ? figure(value) : value === null || value === undefined ? "–"
  : clipped(typeof value === "string" ? value : JSON.stringify(value)));

function Records({ title, records, total = records?.length }) {
  if (!records?.length) return html`<div class="panel"><h2>${title}</h2><p class="muted">None.</p></div>`;
  const names = [...new Set(records.flatMap((it) => Object.keys(it)))].filter((name) => name !== "runs").slice(0, 8);
  const shown = (it, name) => [name === "index" ? String(it.index ?? "–") : cell(it[name]), name === "index" && it.runs?.map((run) => html` <a key=${run.id}
    href=${to(["run", run.id, "group", String(run.index)])}>in ${visible(run.name)}</a>`)];
  return html`<div class="panel"><h2>${title} <span class="muted">${count(total)}</span></h2>
    <div class="scroll"><table>
    <thead><tr>${names.map((name) => html`<th key=${name}>${visible(name)}</th>`)}</tr></thead>
    <tbody>${records.slice(0, SHOWN).map((record, n) =>
      html`<tr key=${n}>${names.map((name) => html`<td key=${name}>${shown(record, name)}</td>`)}</tr>`)}</tbody>
  </table></div></div>`;
}

/** Items of the buffer's groups, as far as they were asked for: the next ones are found by the last group's id. */
function Items({ id, state }) {
  const [shown, setShown] = useState({ items: [], next: 0, busy: false, error: null });
  const more = async (before) => {
    setShown({ ...before, busy: true });
    try {
      const answer = await getJSON(`/api/buffers/${segment(id)}/items`, { offset: before.next, limit: 50, state });
      const found = answer.groups.flatMap((group) => group.items.map((item) => ({ ...item, group: group.id,
        state: group.state })));
      setShown({ items: [...before.items, ...found], next: answer.groups.at(-1)?.id ?? null, busy: false, error: null });
    } catch (error) {
      setShown({ ...before, busy: false, error });
    }
  };
  useEffect(() => { more({ items: [], next: 0 }); }, [id, state]);
  const last = (item) => (Array.isArray(item.messages) && item.messages.length ? plain(item.messages.at(-1))
    : JSON.stringify(item));
  return html`<div class="panel wide"><h2>Items <span class="muted">${count(shown.items.length)}</span>
      ${state && html`<a class="chip" href=${withQuery({ state: null })}>${visible(state)} ✕</a>`}</h2>
    ${shown.items.map((item, n) => html`<details class="item" key=${n}><summary>
      <span class="muted">group ${cell(item.group)} · ${cell(item.state)} · ${
      cell(item.instance_id)} · reward</span> <b>${cell(item.reward)}</b> ${clipped(last(item).replace(/\s+/g,
        " "))}</summary>
      ${(Array.isArray(item.messages) ? item.messages : []).map((message, at) =>
        html`<${Message} message=${message} key=${at} />`)}
      <${Text} text=${JSON.stringify({ ...item, messages: undefined }, null, 2)} className="code" /></details>`)}
    ${shown.error && html`<p class="problem">${shown.error.message}</p>`}
    ${shown.next !== null && html`<button type="button" disabled=${shown.busy}
      onClick=${() => more(shown)}>More</button>`}</div>`;
}

/** Figures of objects in objects, by their paths. */
const flat = (value, path = []) => Object.entries(value || {}).flatMap(([name, it]) => (
  it && typeof it === "object" && !Array.isArray(it) ? flat(it, [...path, name]) : [[[...path, name].join(" "), it]]));

export function Buffer({ id, query }) {
  const [again, setAgain] = useState(0);
  const state = useApi(`/api/buffers/${segment(id)}`, {}, again);
  useEffect(() => {
    const timer = setInterval(() => setAgain((n) => n + 1), 5000);
    return () => clearInterval(timer);
  }, []);
  if (!state.data) return html`<${Pending} state=${state} />`;
  const { status, leases, dropped } = state.data;
  const { groups, ...store } = status?.store || {};
  return html`<section><div class="line">
    <h1>Buffer</h1>${state.error && html`<span class="problem">${state.error.message}</span>`}</div>
    <dl class="facts">${[...flat(store), ...flat(status?.job)].filter(([, value]) =>
      !Array.isArray(value)).map(([name, value]) => html`<div key=${name}>
      <dt>${visible(name.replaceAll("_", " "))}</dt><dd>${cell(value)}</dd></div>`)}</dl>
    <div class="panels"><div class="panel"><h2>Groups by state</h2>
      <${Lines} label="groups by state" lines=${Object.entries(groups || {}).map(([name, n]) => ({
      label: name, count: n, href: withQuery({ state: query.state === name ? null : name }) }))} /></div>
      <${Records} title="Leases" records=${leases} /><${Records} title="Dropped" records=${dropped} />
      <${Items} id=${id} state=${query.state} key=${query.state} /></div>
  </section>`;
}
