// The filter language's texts: the server reads them, here they are put together and taken apart at their `and`s.

import { html, useEffect, useState } from "./core.js";
import { visible } from "./text.js";

/** A value as the language writes it. */
export function quoted(value) {
  if (value === null) return "null";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  const text = String(value);
  if (/^[A-Za-z_][\w.\/-]*$/.test(text) && !/^(and|or|not|in|null|true|false)$/i.test(text)) return text;
  return `"${text.replace(/[\\"]/g, "\\$&")}"`;
}

export const clause = (name, operator, value) => `${quoted(name)} ${operator} ${quoted(value)}`;
/** A bin's rows; the last bin has its upper edge, too. */
export const between = (name, low, high, last) => (low === high ? `${name} = ${low}`
  : `${name} >= ${low} and ${name} ${last ? "<=" : "<"} ${high}`);
export const both = (...texts) => texts.filter(Boolean).map((text, at, all) => (
  all.length > 1 && clauses(text).length === 1 && /\bor\b/i.test(text) ? `(${text})` : text)).join(" and ");

/** The parts of a filter that all have to hold; a filter with an outer `or` is one part. */
export function clauses(text) {
  const parts = [];
  let depth = 0, quote = "", from = 0;
  for (let at = 0; at < text.length; at += 1) {
    const character = text[at];
    if (quote) {
      if (character === "\\") at += 1;
      else if (character === quote) quote = "";
    } else if (character === '"' || character === "'") quote = character;
    else if (character === "(") depth += 1;
    else if (character === ")") depth -= 1;
    else if (depth === 0 && /\s/.test(character)) {
      const word = /^\s+(and|or)(?=[\s(])/i.exec(text.slice(at));
      if (word?.[1].toLowerCase() === "or") return [text.trim()];
      if (word) {
        parts.push(text.slice(from, at).trim());
        at += word[0].length - 1;
        from = at + 1;
      }
    }
  }
  parts.push(text.slice(from).trim());
  return parts.filter(Boolean);
}

const OPERATORS = { number: ["<", "<=", "=", "!=", ">=", ">"], text: ["=", "!=", "~"], bool: ["=", "!="] };

/** The filter as text, each part to take away, and a form that adds one. `columns` as the run has them. */
export function Filter({ filter, columns, onFilter, error }) {
  const [text, setText] = useState(filter);
  const [name, setName] = useState("reward");
  const [operator, setOperator] = useState("<");
  const [value, setValue] = useState("");
  useEffect(() => setText(filter), [filter]);
  const type = columns.find((column) => column.name === name)?.type || "number";
  const operators = OPERATORS[type] || OPERATORS.number;
  const parts = clauses(filter);
  const add = (event) => {
    event.preventDefault();
    const given = value.trim();
    const typed = given === "null" ? null : type === "text" ? given : type === "bool" ? given !== "false"
      && given !== "0" : Number(given);
    if (given === "" || Number.isNaN(typed)) return;
    onFilter(both(filter, clause(name, operators.includes(operator) ? operator : operators[0], typed)));
    setValue("");
  };
  return html`<div class="filter">
    <form class="line" role="search" onSubmit=${(event) => { event.preventDefault(); onFilter(text.trim()); }}>
      <label class="grow">Filter <input id="filter" class="wide" value=${text} spellcheck=${false} autocomplete="off"
        placeholder="reward < 0.5 and finish_reason = length and num_turns > 3" aria-invalid=${Boolean(error)}
        onInput=${(event) => setText(event.target.value)} /></label>
      <button type="submit">Apply</button>
      ${filter && html`<button type="button" onClick=${() => onFilter("")}>Clear</button>`}
    </form>
    <form class="line" onSubmit=${add}>
      <label>Add <select value=${name} onChange=${(event) => setName(event.target.value)} aria-label="column">
        ${columns.map((column) => html`<option value=${column.name} key=${column.name}
          title=${column.title}>${visible(column.name)}</option>`)}</select></label>
      <select value=${operators.includes(operator) ? operator : operators[0]} aria-label="comparison"
        onChange=${(event) => setOperator(event.target.value)}>
        ${operators.map((it) => html`<option key=${it} value=${it}>${it === "~" ? "contains" : it}</option>`)}</select>
      <input value=${value} size="12" aria-label="value" placeholder=${type === "bool" ? "true" : "value"}
        onInput=${(event) => setValue(event.target.value)} />
      <button type="submit">Add</button>
      ${parts.map((part, at) => html`<button type="button" class="chip" key=${part} title="take this part away"
        onClick=${() => onFilter(parts.filter((_, other) => other !== at).join(" and "))}>
        ${visible(part)} ✕</button>`)}
    </form>
    ${error && html`<p class="problem" role="alert">${error.message}${
      error.position !== null && html`<br /><code>${visible(filter.slice(0, error.position))}<mark>${
        visible(filter.slice(error.position)) || "…"}</mark></code>`}</p>`}
  </div>`;
}
