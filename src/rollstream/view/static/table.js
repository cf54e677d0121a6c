// A table of any number of rows: those on the screen are in the page, with the pages around them in memory.

import { html, useEffect, useLayoutEffect, useRef, useState, useKeys, go, count } from "./core.js";

const ROW = 26;
const TALLEST = 8_000_000; // browsers draw nothing beyond some 17 or 33 million pixels
const PAGE = 200;
const KEPT = 40;

/**
 * @param columns `[{name, title, width, number, sortable, show(row)}]`; `show` gives text or a node
 * @param load `(offset, limit, signal) => Promise<{total, rows}>`
 * @param of what the rows depend on: another text forgets them
 * @param more rises when rows may have been added: the visible ones are asked for again
 */
export function Table({ columns, load, of, more = 0, sort, onSort, address, onTotal, label }) {
  const box = useRef(null);
  const state = useRef({ pages: new Map(), total: null, first: 0, settle: 0, quiet: -1, of: null, picked: -1 });
  const [, redraw] = useState(0);
  const [error, setError] = useState(null);
  const [height, setHeight] = useState(600);
  const it = state.current;
  if (it.of !== of) {
    for (const entry of it.pages.values()) entry.stop.abort();
    Object.assign(it, { pages: new Map(), first: 0, of, picked: -1, fresh: true });
  }
  const total = it.total ?? 0;
  const tall = Math.min(total * ROW, TALLEST);
  const visible = Math.ceil(height / ROW);
  const last = Math.max(0, total - Math.floor((height - ROW) / ROW));

  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setHeight(entry.contentRect.height));
    watch.observe(box.current);
    return () => { watch.disconnect(); clearTimeout(it.settle); };
  }, []);

  // A new list begins at its top.
  useLayoutEffect(() => { if (it.fresh) { it.fresh = false; it.quiet = 0; box.current.scrollTop = 0; } }, [of]);

  const fetchPage = (page) => {
    const before = it.pages.get(page);
    const stop = new AbortController();
    const entry = { rows: before?.rows, stop, more };
    it.pages.set(page, entry);
    load(page * PAGE, PAGE, stop.signal).then(
      (answer) => {
        if (it.pages.get(page) !== entry) return;
        entry.rows = answer.rows;
        it.total = answer.total;
        setError(null);
        onTotal?.(answer);
        redraw((n) => n + 1);
      },
      (problem) => {
        if (it.pages.get(page) !== entry || stop.signal.aborted) return;
        it.total ??= 0;
        setError(problem);
      },
    );
  };

  useEffect(() => {
    const from = Math.floor(Math.floor(it.first) / PAGE);
    const until = Math.floor((Math.floor(it.first) + visible) / PAGE);
    for (let page = from; page <= until; page += 1) {
      if (page * PAGE >= Math.max(total, 1)) break;
      const held = it.pages.get(page);
      if (!held || held.more !== more) fetchPage(page);
    }
    for (const [page, entry] of it.pages) {
      if ((page < from - 1 || page > until + 1) && !entry.rows) { entry.stop.abort(); it.pages.delete(page); }
    }
    while (it.pages.size > KEPT) it.pages.delete(it.pages.keys().next().value);
  });

  // Small movements go row by row, though the bar stands for more rows than pixels; far ones go where the bar says.
  const scrolled = () => {
    if (!box.current) return; // the event comes a frame later: another view may be shown by then
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    if (Math.abs(scrollTop - it.quiet) < 1) { it.quiet = -1; it.top = scrollTop; return; }
    const moved = scrollTop - (it.top ?? 0);
    it.top = scrollTop;
    const range = Math.max(1, scrollHeight - clientHeight);
    if (total * ROW <= TALLEST) it.first = scrollTop / ROW;
    else if (Math.abs(moved) < 3 * clientHeight && scrollTop > 0 && scrollTop < range) it.first += moved / ROW;
    else it.first = (scrollTop / range) * last;
    it.first = Math.max(0, Math.min(last, it.first));
    clearTimeout(it.settle);
    if (total * ROW > TALLEST) it.settle = setTimeout(() => place(it.first), 200);
    redraw((n) => n + 1);
  };
  const place = (first) => {
    it.first = Math.max(0, Math.min(last, first));
    const range = Math.max(1, box.current.scrollHeight - box.current.clientHeight);
    const top = Math.round(total * ROW <= TALLEST ? it.first * ROW : (it.first / Math.max(1, last)) * range);
    if (Math.abs(box.current.scrollTop - top) >= 1) { it.quiet = top; box.current.scrollTop = top; }
    redraw((n) => n + 1);
  };
  const rowAt = (n) => it.pages.get(Math.floor(n / PAGE))?.rows?.[n % PAGE];
  const pick = (n) => {
    it.picked = Math.max(0, Math.min(total - 1, n));
    const shown = Math.floor((height - ROW) / ROW);
    if (it.picked < it.first) place(it.picked);
    else if (it.picked >= it.first + shown) place(it.picked - shown + 1);
    else redraw((x) => x + 1);
  };
  useKeys([
    ["j ArrowDown", "next row", () => pick(it.picked < 0 ? Math.ceil(it.first) : it.picked + 1)],
    ["k ArrowUp", "row before", () => pick(it.picked - 1)],
    ["PageDown", "rows further down", () => pick(Math.max(it.picked, it.first) + visible - 2)],
    ["PageUp", "rows further up", () => pick(Math.max(it.picked, it.first) - visible + 2)],
    ["Home", "first row", () => pick(0)],
    ["End", "last row", () => pick(total - 1)],
    ["Enter o", "open the row", () => rowAt(it.picked) && go(address(rowAt(it.picked), it.picked))],
  ]);

  const widths = columns.map((column) => column.width || (column.number ? "90px" : "minmax(150px, 1fr)")).join(" ");
  const sorted = (column) => (sort === column.name ? "ascending" : sort === `-${column.name}` ? "descending" : "none");
  const head = columns.map((column) => html`<span role="columnheader" class=${column.number ? "number" : ""}
      aria-sort=${sorted(column)} key=${column.name}>${column.sortable === false ? column.title
        : html`<button type="button"
      title=${`sort by ${column.title}`} onClick=${() => onSort(sort === `-${column.name}` ? column.name
        : `-${column.name}`)}>
      ${column.title}${{ ascending: " ▲", descending: " ▼", none: "" }[sorted(column)]}</button>`}</span>`);
  const start = Math.floor(it.first);
  const rows = [];
  for (let n = start; n < Math.min(total, start + visible + 1); n += 1) {
    const row = rowAt(n);
    rows.push(html`<div role="row" class="row ${n === it.picked ? "picked" : ""}" aria-rowindex=${n + 2} key=${n}
        onClick=${(event) => row && !event.target.closest("a") && go(address(row, n))}>
      ${columns.map((column, at) => html`<span role="cell" class=${column.number ? "number" : ""} key=${column.name}>${
        !row ? "·" : at === 0 ? html`<a href=${address(row, n)}>${column.show(row)}</a>`
          : column.show(row)}</span>`)}</div>`);
  }
  const y = total * ROW <= TALLEST ? start * ROW : (it.top ?? 0) - (it.first - start) * ROW;
  return html`<div class="table" ref=${box} onScroll=${scrolled} role="table" aria-label=${label} tabindex="0"
      aria-rowcount=${total + 1} style=${{ "--widths": widths }}>
    <div class="row head" role="row">${head}</div>
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
    ${it.total === 0 && !error && html`<p class="muted empty">Nothing here.</p>`}
    ${it.total === null && !error && html`<p class="muted empty" aria-busy="true">Loading…</p>`}
    <div class="tall" style=${{ height: `${tall}px` }}>
      <div class="shown" style=${{ transform: `translateY(${y}px)` }}>${rows}</div></div>
  </div>`;
}

export const TotalLine = ({ total, all, what }) => html`<span class="muted" role="status">${
  total === null ? "" : all === null || all === total ? `${count(total)} ${what}`
    : `${count(total)} of ${count(all)} ${what}`}</span>`;
