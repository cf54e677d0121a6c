// Bars that are links, shares in a line, and curves by uPlot.

import { html, useEffect, useRef, count, figure, percent, seconds } from "./core.js";
import { visible } from "./text.js";

/**
 * Bars of counts side by side. Each is a link to its rows.
 * @param bars `[{label, title, count, part, href, partHref}]`; `part` of the count is drawn in the second colour
 */
export function Bars({ bars, label, from, until }) {
  const most = Math.max(1, ...bars.map((bar) => bar.count));
  const height = (n) => `${n ? Math.max(2, (100 * n) / most) : 0}%`;
  return html`<figure class="bars" aria-label=${label}>
    <div class="plot">${bars.map((bar) => html`<a class="bar" href=${bar.href} key=${bar.label} title=${bar.title}
        aria-label=${bar.title}><span class="fill" style=${{ height: height(bar.count) }}>${
        bar.part > 0 && html`<span class="part" style=${{ height: `${(100 * bar.part) / bar.count}%` }}>
          </span>`}</span></a>`)}</div>
    <figcaption><span>${from}</span><span class="muted">highest ${count(most)}</span><span>${until}</span></figcaption>
  </figure>`;
}

/** Lines with a bar each, for categories. `[{label, count, title, href, detail}]` */
export function Lines({ lines, label }) {
  if (!lines.length) return html`<p class="muted">None.</p>`;
  const most = Math.max(1e-12, ...lines.map((line) => line.count));
  return html`<ul class="lines" aria-label=${label}>${lines.map((line) => html`<li key=${line.label}>
    <a href=${line.href} title=${line.title}>
    <span class="name">${visible(line.label)}</span><span class="track"><span class="fill ${line.tone || ""}"
      style=${{ width: `${(100 * line.count) / most}%` }}></span></span>
        <span class="number">${line.value ?? count(line.count)}</span>
    ${line.detail !== undefined && html`<span class="number muted">${line.detail}</span>`}</a></li>`)}</ul>`;
}

/** Shares of one whole. `[{label, count, tone, href, value}]` */
export function Shares({ parts, label }) {
  const all = parts.reduce((sum, part) => sum + part.count, 0);
  return html`<div class="shares" aria-label=${label}>
    <div class="whole">${parts.map((part) => part.count > 0
      && html`<a key=${part.label} href=${part.href} class=${part.tone}
      style=${{ width: `${(100 * part.count) / all}%` }}
        title=${`${part.label}: ${part.value ?? count(part.count)}, ${percent(part.count, all)}`}
      aria-label=${`${part.label}: ${part.value ?? count(part.count)}`}></a>`)}</div>
    <div class="legend">${parts.map((part) => html`<a href=${part.href} key=${part.label}>
      <span class="swatch ${part.tone}"></span>${
      part.label} <b>${part.value ?? count(part.count)}</b> <span class="muted">${percent(part.count, all)}</span>
        </a>`)}</div>
  </div>`;
}

let library;
/** uPlot, when the first curve is drawn. */
function uPlotClass() {
  library ??= globalThis.uPlot ? Promise.resolve(globalThis.uPlot) : new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "vendor/uPlot.iife.min.js";
    script.onload = () => resolve(globalThis.uPlot);
    script.onerror = () => reject(new Error("vendor/uPlot.iife.min.js could not be loaded"));
    document.head.append(script);
  });
  return library;
}

const SHORT_S = 300; // less is shown as seconds since the begin
const clock = (unix) => (unix === null ? "–" : new Date(unix * 1000).toLocaleTimeString("sv-SE"));
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3], [1, 5]];

/**
 * Curves over one x. `series`: `[{label, values, axis}]`; `onPick(index)`: a point of x was clicked.
 * Each has a colour and a dash of its own, so that it can be told without its colour.
 */
export function Curves({ x, series, title, time = false, height = 180, onPick, sync }) {
  const box = useRef(null);
  const theme = document.documentElement.dataset.theme || "";
  const since = time && x.at(-1) - x[0] < SHORT_S;
  const moment = since ? (after) => (after === null ? "–" : seconds(after)) : clock;
  useEffect(() => {
    let plot = null, gone = false;
    const watch = new ResizeObserver(([it]) => plot?.setSize({ width: Math.floor(it.contentRect.width), height }));
    uPlotClass().then((UPlot) => {
      if (gone) return;
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(name).trim();
      const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 },
        ticks: { stroke: colour("--line") }, font: "11px system-ui" };
      plot = new UPlot({
        width: Math.max(200, Math.floor(box.current.clientWidth)), height, cursor: sync ? { sync: { key: sync } } : {},
        scales: { x: { time: time && !since } },
        axes: [{ ...axis, size: 32, ...(time && { values: (_, ticks) => ticks.map(moment) }) }, { ...axis, size: 70 }],
        legend: { live: true },
        series: [{ label: time ? "time" : "step", ...(time && { value: (_, it) => moment(it) }) },
          ...series.map((it, at) => ({
          label: it.label, stroke: colour(`--curve${at % 5}`), width: 1.5, dash: DASHES[at % 5], spanGaps: true,
          points: { show: x.length < 60, size: 4 },
          value: (_, value) => figure(value) }))],
      }, [since ? x.map((at) => at - x[0]) : x, ...series.map((it) => it.values)], box.current);
      watch.observe(box.current);
      if (onPick) plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null) onPick(plot.cursor.idx); });
    }).catch((error) => { if (box.current) box.current.textContent = error.message; });
    return () => { gone = true; watch.disconnect(); plot?.destroy(); };
  }, [x, series, theme]);
  return html`<figure class="curves"><figcaption>${title}</figcaption><div ref=${box}></div></figure>`;
}
