// What there is to look at.

import { html, useState, useApi, useKeys, useEffect, Pending, Interval, to, go, count, short, moment,
  percent } from "./core.js";
import { visible } from "./text.js";

export const home = (source) => to([{ training: "training", buffer: "buffer" }[source.kind] || "run", source.id]);

const isRun = (source) => source.kind === "run" || source.kind === "parquet";
const NUMBERS = ["mean reward", "done", "of all", "failed", "unscored", "tokens", "prompts × n"];

export function State({ state }) {
  return html`<span class="state ${state}">${state}</span>`;
}

export function Sources() {
  const [again, setAgain] = useState(0);
  const state = useApi("/api/sources", {}, again);
  const [chosen, setChosen] = useState([]);
  const [picked, setPicked] = useState(0);
  const sources = state.data?.sources || [];
  const running = sources.some((source) => source.state === "running");
  useEffect(() => { // sources may also be new
    const timer = setInterval(() => document.hidden || setAgain((n) => n + 1), running ? 5000 : 15_000);
    return () => clearInterval(timer);
  }, [running]);
  const pick = (by) => setPicked((at) => Math.max(0, Math.min(sources.length - 1, at + by)));
  useKeys([
    ["j ArrowDown", "next source", () => pick(1)], ["k ArrowUp", "source before", () => pick(-1)],
    ["Enter o", "open the source", () => sources[picked] && go(home(sources[picked]))],
    ["x", "choose the run for a comparison", () => isRun(sources[picked] ?? {}) && choose(sources[picked].id)],
  ]);
  const choose = (id) => setChosen((ids) => (ids.includes(id) ? ids.filter((it) => it !== id)
    : [...ids, id].slice(-2)));
  if (!state.data) return html`<${Pending} state=${state} />`;
  return html`<section>
    <div class="line"><h1>Sources</h1><span class="muted">${count(sources.length)}</span>
      ${chosen.length === 2 ? html`<a class="button" href=${to(["compare", ...chosen])}>Compare the two</a>`
        : sources.length > 1 && html`<span class="muted">choose two runs to compare them</span>`}</div>
    <div class="scroll"><table class="sources">
      <thead><tr><th></th><th>name</th><th>state</th>
        ${NUMBERS.map((name) => html`<th class="number" key=${name}>${name}</th>`)}
        <th>started</th><th>kind</th><th>model</th></tr></thead>
      <tbody>${sources.map((source, at) => {
        const run = isRun(source);
        const number = (value, path, query) => html`<td class="number">${run && value
          ? html`<a href=${to(["run", source.id, ...path], query)}>${count(value)}</a>` : count(value)}</td>`;
        return html`<tr key=${source.id} class=${at === picked ? "picked" : ""}>
          <td>${run && html`<input type="checkbox" checked=${chosen.includes(source.id)}
            onChange=${() => choose(source.id)} aria-label=${`compare ${source.name}`} />`}</td>
          <td><a href=${home(source)} title=${source.path}>${visible(source.name)}</a>${
            source.error && html`<div class="problem">${visible(source.error)}</div>`}</td>
          <td>${source.state && html`<${State} state=${source.state} />`}</td>
          <td class="number"><${Interval} value=${source.reward_mean} range=${source.reward_interval} /></td>
          ${number(source.done, ["rows"])}
          <td class="number muted">${percent(source.done, source.total)}</td>
          ${number(source.failed, ["failures"])}
          ${number(source.unscored, ["rows"], { filter: "reward = null" })}
          <td class="number">${short(source.tokens)}</td>
          <td class="number">${source.prompts === null ? "–" : `${count(source.prompts)} × ${source.n ?? "?"}`}</td>
          <td>${moment(source.started)}</td><td>${source.kind}</td>
          <td class="model" title=${source.model}>${visible(source.model || "")}</td></tr>`;
      })}</tbody>
    </table></div>
    ${sources.length === 0 && html`<p class="muted">No runs, files, buffers or training logs were found here.</p>`}
  </section>`;
}
