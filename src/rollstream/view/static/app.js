// The frame around the views: which one the address asks for, light and dark, and the list of keys.

import { html, render, useEffect, useState, useAddress, useKeys, activeKeys, takeToken, to, go } from "./core.js";
import { visible } from "./text.js";
import { Sources } from "./sources.js";
import { Run, Failures } from "./run.js";
import { Rows } from "./rows.js";
import { Groups, Group } from "./groups.js";
import { Trajectory } from "./trajectory.js";
import { Compare, ComparePrompt } from "./compare.js";
import { Training, Trainings, Buffer } from "./training.js";
import { exported, readFile } from "./file.js";

const THEMES = ["", "light", "dark"];
const THEME = "rollstream.theme";
const PARTS = new Map([[undefined, Run], ["failures", Failures], ["rows", Rows], ["groups", Groups]]);

function useTheme() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) || "");
  const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setDark(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  const shown = theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = shown;
  const next = () => {
    const after = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, after);
    setTheme(after);
  };
  return [theme, shown, next];
}

function Keys({ onClose }) {
  const lists = activeKeys().filter((list) => list.length);
  return html`<dialog class="keys" ref=${(element) => element && !element.open && element.showModal()}
    onClose=${onClose} onClick=${onClose}>
    <h2>Keys</h2><dl>${lists.flat().map(([keys, what]) => html`<div key=${keys + what}>
      <dt>${keys.split(" ").map((key) => html`<kbd key=${key}>${
      key.replace("Arrow", "")}</kbd> `)}</dt><dd>${what}</dd></div>`)}</dl></dialog>`;
}

function View({ path, query, theme }) {
  const [kind, id, part, which] = path;
  if (kind === undefined) {
    return exported() ? html`<${Run} id=${exported().run} query=${query} />` : html`<${Sources} />`;
  }
  if (kind === "run" && id) {
    const Part = PARTS.get(part);
    if (Part) return html`<${Part} id=${id} query=${query} theme=${theme} key=${id} />`;
    if (part === "group" && which !== undefined) return html`<${Group} id=${id} index=${which} query=${query}
      key=${id} />`;
    if (part === "trajectory" && which !== undefined) return html`<${Trajectory} id=${id} row=${which}
      query=${query} theme=${theme} key=${id} />`;
  }
  if (kind === "compare" && id && part) {
    return query.index_a !== undefined ? html`<${ComparePrompt} a=${id} b=${part} query=${query}
      key=${`${id} ${part} ${query.index_a}`} />`
      : html`<${Compare} a=${id} b=${part} query=${query} key=${`${id} ${part}`} />`;
  }
  if (kind === "training" && id) return html`<${Training} id=${id} query=${query} theme=${theme} key=${id} />`;
  if (kind === "trainings" && id) return html`<${Trainings} ids=${path.slice(1)} key=${path.join("/")} />`;
  if (kind === "buffer" && id) return html`<${Buffer} id=${id} query=${query} key=${id} />`;
  return html`<p class="problem">There is no such view. <a href=${to([])}>All sources</a></p>`;
}

function App() {
  const { path, query } = useAddress();
  const [theme, shown, nextTheme] = useTheme();
  const [keys, setKeys] = useState(false);
  useKeys([
    ["?", "these keys", () => setKeys(true)],
    ["h", "all sources", () => go(to([]))],
    ["T", "light, dark, or as the system has it", nextTheme],
  ]);
  useEffect(() => { document.title = visible(["rollstream", ...path].join(" · ")); }, [path.join("/")]);
  return html`<header class="top"><a href=${to([])} class="brand">rollstream</a>
      <span class="muted">${exported()?.note}</span><span class="grow"></span><button type="button" onClick=${nextTheme}
        title="light, dark, or as the system has it">${
        { "": "◐ system", light: "○ light", dark: "● dark" }[theme]}</button>
      <button type="button" onClick=${() => setKeys(true)} title="keys">?</button></header>
    <main><${View} path=${path} query=${query} theme=${shown} /></main>
    ${keys && html`<${Keys} onClose=${() => setKeys(false)} />`}`;
}

takeToken();
await readFile();
render(html`<${App} />`, document.getElementById("app"));
