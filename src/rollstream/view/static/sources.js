// What there is to look at.

import { html, useState, useApi, useKeys, useEffect, Pending, Interval, to, go, count, short, moment,
  percent } from "./core.js";
import { visible } from "./text.js";

export const home = (source) => to([{ training: "training", buffer: "buffer" }[source.kind] || "run", source.id]);

const isRun = (source) => source.kind === "run" || source.kind === "parquet";
const comparable = (source) => isRun(source) || source.kind === "training";
const share = (source) => (source.total ? source.done / source.total : null);
const COLUMNS = [
  ["name", (source) => source.name], ["state", (source) => source.state], ["mean reward", (source) => source.reward_mean, 1],
  ["done", (source) => source.done, 1], ["of all", share, 1], ["failed", (source) => source.failed, 1],
  ["unscored", (source) => source.unscored, 1], ["tokens", (source) => source.tokens, 1],
  ["prompts × n", (source) => source.prompts, 1], ["started", (source) => source.started],
  ["kind", (source) => source.kind], ["model", (source) => source.model],
];

const folder = (source) => source.name.split("/").slice(0, -1).join("/");

/** Sources whose name or model has all words, in the order of a column; folder by folder where none is named. */
function listed(sources, words, { column, down }) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = sources.filter((source) => wanted.every((word) =>
    `${source.name} ${source.model || ""} ${source.state || ""}`.toLowerCase().includes(word)));
  const value = COLUMNS.find(([name]) => name === column)?.[1];
  if (!value) return [...found].sort((a, b) => (folder(a) < folder(b) ? -1 : folder(a) > folder(b) ? 1 : 0));
  const missing = (it) => it === null || it === undefined;
  return [...found].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
  });
}

/** The interval of a mean between 0 and 1, or the least and the most of all that are listed. */
function Whisker({ source: { reward_mean: mean, reward_interval: range }, edges: [low, high] }) {
  if (mean === null || mean === undefined || !(high > low)) return null;
  const at = (value) => 100 * Math.max(0, Math.min(1, (value - low) / (high - low)));
  const [from, until] = range && range[0] !== null ? range.map(at) : [at(mean), at(mean)];
  return html`<span class="whisker" aria-hidden="true"><span style=${{ left: `${from}%`, width: `${until - from}%` }}>
    </span><b style=${{ left: `${at(mean)}%` }}></b></span>`;
}

/** A training's store has no total, and so is never finished. */
export function State({ state, total }) {
  const stopped = state === "unfinished" && total === null;
  return html`<span class="state ${stopped ? "" : state}">${stopped ? "not running" : state}</span>`;
}

export function Sources() {
  const [again, setAgain] = useState(0);
  const state = useApi("/api/sources", {}, again);
  const [chosen, setChosen] = useState([]);
  const [picked, setPicked] = useState(0);
  const [words, setWords] = useState("");
  const [order, setOrder] = useState({ column: null, down: false });
  const all = state.data?.sources || [];
  const sources = listed(all, words, order);
  const edges = sources.flatMap((source) => [source.reward_mean, ...(source.reward_interval || [])])
    .filter((value) => Number.isFinite(value));
  const range = [Math.min(0, ...edges), Math.max(1, ...edges)];
  const folders = order.column === null && new Set(all.map(folder)).size > 1;
  const running = all.some((source) => source.state === "running");
  useEffect(() => { // sources may also be new
    const timer = setInterval(() => document.hidden || setAgain((n) => n + 1), running ? 5000 : 15_000);
    return () => clearInterval(timer);
  }, [running]);
  const pick = (by) => setPicked((at) => Math.max(0, Math.min(sources.length - 1, at + by)));
  useKeys([
    ["j ArrowDown", "next source", () => pick(1)], ["k ArrowUp", "source before", () => pick(-1)],
    ["Enter o", "open the source", () => sources[picked] && go(home(sources[picked]))],
    ["/", "to the search", () => document.getElementById("words")?.focus()],
    ["x", "choose it for a comparison", () => comparable(sources[picked] ?? {}) && choose(sources[picked])],
  ]);
  // Two runs, or any number of trainings.
  const choose = (source) => setChosen((before) => (before.includes(source.id) ? before.filter((it) => it !== source.id)
    : [...before.filter((it) => isRun(all.find(({ id }) => id === it) ?? {}) === isRun(source)), source.id]
      .slice(isRun(source) ? -2 : 0)));
  const chooses = all.filter((source) => chosen.includes(source.id));
  const trainings = all.filter((source) => source.kind === "training");
  if (!state.data) return html`<${Pending} state=${state} />`;
  return html`<section>
    <div class="line"><h1>Sources</h1><span class="muted">${count(sources.length)}${
      sources.length < all.length && ` of ${count(all.length)}`}</span>
      ${all.length > 5 && html`<label>Find <input id="words" type="search" value=${words}
        placeholder="name, model, state" onInput=${(event) => setWords(event.target.value)} /></label>`}
      ${chooses.length > 1 ? html`<a class="button" href=${to([isRun(chooses[0]) ? "compare" : "trainings",
        ...chosen])}>${chooses.length === 2 ? "Compare the two" : `Compare the ${chooses.length}`}</a>`
        : (all.filter(isRun).length > 1 || trainings.length > 1)
          && html`<span class="muted">choose two runs${trainings.length > 1 && ", or several trainings,"} to compare them</span>`}</div>
    <div class="scroll"><table class="sources">
      <thead><tr><th></th>${COLUMNS.map(([name, , number]) => html`<th key=${name} class=${number ? "number" : ""}
        aria-sort=${order.column === name ? (order.down ? "descending" : "ascending") : undefined}><button type="button"
        onClick=${() => setOrder(order.column !== name ? { column: name, down: Boolean(number) }
    : order.down === Boolean(number) ? { column: name, down: !order.down } : { column: null, down: false })}>${name}${
  order.column === name ? (order.down ? " ▼" : " ▲") : ""}</button></th>`)}</tr></thead>
      <tbody>${sources.map((source, at) => {
        const run = isRun(source);
        const number = (value, path, query, tone) => html`<td class="number">${run && value
          ? html`<a class=${tone} href=${to(["run", source.id, ...path], query)}>${count(value)}</a>` : count(value)}</td>`;
        const first = folders && (at === 0 || folder(sources[at - 1]) !== folder(source));
        return html`${first && html`<tr class="folder" key=${`folder ${source.id}`}><th></th>
          <th colspan=${COLUMNS.length}>${visible(folder(source)) || "here"}</th></tr>`}<tr key=${source.id} class=${at === picked ? "picked" : ""}>
          <td>${comparable(source) && html`<input type="checkbox" checked=${chosen.includes(source.id)}
            onChange=${() => choose(source)} aria-label=${`compare ${source.name}`} />`}</td>
          <td><a href=${home(source)} title=${source.path}>${
            visible(folders ? source.name.split("/").at(-1) : source.name)}</a>${
            source.error && html`<div class="problem">${visible(source.error)}</div>`}</td>
          <td>${source.state && html`<${State} state=${source.state} total=${source.total} />`}</td>
          <td class="number"><${Whisker} source=${source} edges=${range} />
            <${Interval} value=${source.reward_mean} range=${source.reward_interval} /></td>
          ${number(source.done, ["rows"])}
          <td class="number muted">${percent(source.done, source.total)}</td>
          ${number(source.failed, ["failures"], {}, "warn")}
          ${number(source.unscored, ["rows"], { filter: "reward = null" }, "warn")}
          <td class="number">${short(source.tokens)}</td>
          <td class="number">${source.prompts === null ? "–" : `${count(source.prompts)} × ${source.n ?? "?"}`}</td>
          <td>${moment(source.started)}</td><td>${source.kind}</td>
          <td class="model" title=${source.model}>${visible((source.model || "").split("/").slice(-2).join("/"))}</td></tr>`;
      })}</tbody>
    </table></div>
    ${all.length > 0 && sources.length === 0 && html`<p class="muted">None has these words.</p>`}
    ${all.length === 0 && html`<p class="muted">No runs, files, buffers or training logs were found here.</p>`}
  </section>`;
}
