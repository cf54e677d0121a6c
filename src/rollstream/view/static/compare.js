// Two runs over the prompts that both have, and any of these prompts side by side.

import { html, useApi, useKeys, Pending, Interval, getJSON, to, go, withQuery, count, figure, signed,
  segment } from "./core.js";
import { visible, Message } from "./text.js";
import { Shares } from "./charts.js";
import { Table } from "./table.js";
import { Columns } from "./groups.js";
import { setting } from "./run.js";

const MOST_SETTINGS = 12;

const number = (name, title, show, width = "100px") => ({ name, title, number: true, width, show });

export function Compare({ a, b, query }) {
  const sources = useApi("/api/sources", {});
  const state = useApi("/api/compare", { a, b, limit: 1 });
  const { sort = "difference", outcome } = query;
  if (!state.data) return html`<${Pending} state=${state} />`;
  const name = (id) => visible(sources.data?.sources.find((it) => it.id === id)?.name ?? id);
  const it = state.data;
  const only = (which, by) => withQuery({ outcome: which, sort: by });
  const compared = it.won + it.lost + it.tied;
  const load = async (offset, limit, signal) => {
    const answer = await getJSON("/api/compare", { a, b, sort, outcome, offset, limit }, { signal });
    return { total: answer.total ?? answer.prompts, rows: answer.rows };
  };
  const columns = [
    number("difference", "B − A", (row) =>
      html`<b class=${row.difference > 0 ? "up" : row.difference < 0 ? "down" : ""}>${signed(row.difference)}</b>`),
    number("mean_a", "mean A", (row) => figure(row.mean_a)), number("mean_b", "mean B", (row) => figure(row.mean_b)),
    number("index_a", "prompt", (row) => (row.index_a === row.index_b ? String(row.index_a)
      : `${row.index_a} / ${row.index_b}`)),
    { name: "prompt", title: "prompt", sortable: false, width: "minmax(300px, 1fr)", show: (row) =>
      visible((row.prompt || "").replace(/\s+/g, " ")) }];
  return html`<section class="page">
    <div class="line"><h1>Comparison</h1><span>A <a href=${to(["run", a])}>${name(a)}</a></span>
      <span>B <a href=${to(["run", b])}>${name(b)}</a></span>
      <a class="button" href=${to(["compare", b, a])}>swap</a></div>
    <div class="line"><b>Settings that differ</b>${it.differs.length === 0 ? html`<span class="muted">none</span>`
      : it.differs.slice(0, MOST_SETTINGS).map(([key, mine, other]) => html`<span class="tag" key=${key}>${
        visible(key)} <b>${setting(mine)}</b> → <b>${setting(other)}</b></span>`)}${it.differs.length > MOST_SETTINGS
        && html`<span class="muted">and ${count(it.differs.length - MOST_SETTINGS)} more</span>`}</div>
    <dl class="facts"><div><dt>prompts in both</dt><dd>${count(it.prompts)}</dd></div>
      ${it.unscored > 0 && html`<div><dt>of them unscored</dt><dd>${count(it.unscored)}</dd></div>`}
      <div><dt>only in A</dt><dd>${count(it.only_a)}</dd></div><div><dt>only in B</dt><dd>${count(it.only_b)}</dd></div>
      <div><dt>mean A</dt><dd>${figure(it.mean_a)}</dd></div><div><dt>mean B</dt><dd>${figure(it.mean_b)}</dd></div>
      <div><dt>B − A</dt><dd><b><${Interval} value=${it.difference} range=${it.interval} /></b></dd></div></dl>
    <p class="note">${it.interval?.[0] > 0 ? "B is better: the interval lies above 0." : it.interval?.[1] < 0
      ? "B is worse: the interval lies below 0."
      : "No difference is shown: the interval holds 0."}</p>
    ${compared > 0 && html`<${Shares} label="won, tied, lost" parts=${[
      { label: "B lost", count: it.lost, tone: "wrong", href: only("lost", "difference") },
      { label: "tied", count: it.tied, tone: "mixed2", href: only("tied", "difference") },
      { label: "B won", count: it.won, tone: "right", href: only("won", "-difference") }]} />`}
    ${outcome && html`<p><a class="chip" href=${withQuery({ outcome: null })}>${
      visible(outcome === "tied" ? outcome : `B ${outcome}`)} ✕</a></p>`}
    <${Table} label="prompts" columns=${columns} load=${load} of=${`${a}|${b}|${sort}|${outcome}`} sort=${sort}
      onSort=${(column) => go(withQuery({ sort: column }))}
      address=${(row) => to(["compare", a, b], { sort, outcome, index_a: row.index_a, index_b: row.index_b })} />
  </section>`;
}

export function ComparePrompt({ a, b, query }) {
  const left = useApi(`/api/runs/${segment(a)}/groups/${segment(query.index_a)}`, {});
  const right = useApi(`/api/runs/${segment(b)}/groups/${segment(query.index_b)}`, {});
  const back = to(["compare", a, b], { sort: query.sort, outcome: query.outcome });
  useKeys([["u", "to the comparison", () => go(back)]]);
  if (!left.data || !right.data) return html`<${Pending} state=${left.error ? left : right} />`;
  const mean = (group) => {
    const rewards = group.rollouts.map((it) => it.reward).filter((it) => it !== null && it !== undefined);
    return rewards.length ? rewards.reduce((x, y) => x + y, 0) / rewards.length : null;
  };
  return html`<section><div class="line"><h1>One prompt in both runs</h1><a href=${back}>comparison</a></div>
    <details class="prompt" open><summary>Prompt</summary>${(left.data.prompt || []).map((message, n) =>
      html`<${Message} message=${message} key=${n} />`)}</details>
    <h2>A <a href=${to(["run", a, "group",
      String(query.index_a)])}>prompt ${query.index_a}</a>, mean reward ${figure(mean(left.data))}</h2>
    <${Columns} id=${a} group=${left.data} />
    <h2>B <a href=${to(["run", b, "group",
      String(query.index_b)])}>prompt ${query.index_b}</a>, mean reward ${figure(mean(right.data))}</h2>
    <${Columns} id=${b} group=${right.data} />
  </section>`;
}
