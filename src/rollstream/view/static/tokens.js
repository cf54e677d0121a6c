// The token strip: every token of a trajectory with its text, coloured by what is known of it.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState, useKeys, getBytes, count, figure,
  signed, go, withQuery, segment } from "./core.js";
import { decodeBytes } from "./text.js";

const ARRAYS = { int32: Int32Array, uint32: Uint32Array, float32: Float32Array, uint8: Uint8Array };
const WINDOW = 65_536; // tokens that are in the page at once
const CHUNK = 250; // tokens that the browser lays out, or skips, together

/** The binary answer of `/tokens` as arrays by name, with `count`, `prompt`, `turns`, `has_text`. */
export function parseTokens(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const from = (4 + size + 3) & ~3;
  const found = { ...header, columns: {} };
  for (const { name, dtype, offset, length } of header.columns) {
    const Kind = ARRAYS[dtype];
    const start = from + offset;
    found.columns[name] = start % Kind.BYTES_PER_ELEMENT === 0 ? new Kind(buffer, start, length)
      : new Kind(buffer.slice(start, start + length * Kind.BYTES_PER_ELEMENT));
  }
  return found;
}

const spelled = (value) => (Number.isNaN(value) || value === undefined ? "–" : figure(Number(value.toPrecision(5))));

/** Steps of a scale: a class for each token, and a legend. `steps`: upper limits, the last class has none. */
const scale = (prefix, steps, labels, value) => ({
  classes: labels.map((label, n) => [`${prefix}${n}`, label]),
  of: (at) => {
    const it = value(at);
    if (Number.isNaN(it) || it === undefined) return -1;
    let n = 0;
    while (n < steps.length && it >= steps[n]) n += 1;
    return n;
  },
});

/** The ways to colour, of what the data has: `{name: {title, classes: [[class, label]], of(at)}}`; -1: no class. */
function colourings({ columns, prompt }) {
  const { logprob, mask, version, entropy, trainer_logprob: trainer } = columns;
  const found = {};
  const known = (values) => values && values.some((value) => !Number.isNaN(value));
  const sampled = (values) => (at) => (mask[at] ? values[at] : NaN);
  if (known(logprob)) {
    found.logprob = { title: "log-prob", ...scale("s", [0.105, 0.357, 0.693, 1.609, 2.996, 4.605],
      ["p > 0.9", "0.7 – 0.9", "0.5 – 0.7", "0.2 – 0.5", "0.05 – 0.2", "0.01 – 0.05", "p < 0.01"],
        (at) => (mask[at] ? -logprob[at] : NaN)) };
  }
  if (known(entropy)) {
    found.entropy = { title: "entropy", ...scale("s", [0.1, 0.5, 1, 1.5, 2, 3],
      ["< 0.1 nat", "0.1 – 0.5", "0.5 – 1", "1 – 1.5", "1.5 – 2", "2 – 3", "> 3"], sampled(entropy)) };
  }
  found.mask = { title: "mask", classes: [["m1", "trained on (mask 1)"], ["m0", "given (mask 0)"], ["m2", "prompt"]],
    of: (at) => (at < prompt ? 2 : mask[at] ? 0 : 1) };
  if (version) {
    const names = [...new Set(version.subarray(prompt))].filter((it) => it >= 0).sort((a, b) => a - b);
    const classOf = new Map(names.map((it, n) => [it, n]));
    found.version = { title: "policy version", classes: names.map((it, n) => [`v${n % 8}`, `version ${it}`]),
      of: (at) => (at < prompt || !mask[at] ? -1 : classOf.get(version[at]) ?? -1) };
  }
  const others = Object.keys(columns).filter((name) => columns[name] instanceof Float32Array
    && !["logprob", "entropy"].includes(name));
  for (const name of others) {
    if (/logprob/.test(name) && known(logprob)) {
      found[found.difference ? `difference_${name}` : "difference"] = {
        title: `${name.replaceAll("_", " ")} − sampler`,
        ...scale("d", [-0.5, -0.1, -0.02, 0.02, 0.1, 0.5],
          ["< −0.5", "−0.5 – −0.1", "−0.1 – −0.02", "± 0.02", "0.02 – 0.1", "0.1 – 0.5", "> 0.5"],
          (at) => (mask[at] ? columns[name][at] - logprob[at] : NaN)) };
    } else if (known(columns[name])) {
      const values = columns[name].filter((value, at) => mask[at] && !Number.isNaN(value));
      const sizes = values.map(Math.abs).sort();
      const size = (share) => sizes[Math.floor(share * (sizes.length - 1))] || 1e-9;
      if (values.some((value) => value < 0)) {
        const steps = [-size(0.95), -size(0.75), -size(0.25), size(0.25), size(0.75), size(0.95)];
        found[name] = { title: name.replaceAll("_", " "), ...scale("d", steps,
          [...steps.slice(0, 3).map((step) => `< ${spelled(step)}`), "about 0", ...steps.slice(3).map((step) =>
            `≥ ${spelled(step)}`)], sampled(columns[name])) };
        continue;
      }
      const sorted = values.sort();
      const steps = [0.1, 0.25, 0.5, 0.75, 0.9, 0.97].map((share) => sorted[Math.floor(share * (sorted.length - 1))]);
      found[name] = { title: name.replaceAll("_", " "), ...scale("s", steps, ["lowest", ...steps.map((step) =>
        `≥ ${spelled(step)}`)],
        sampled(columns[name])) };
    }
  }
  return found;
}

const DEFAULTS = ["logprob", "mask"];

/** The value behind each token along the strip; a click goes there. */
function Profile({ data, colouring, onJump, theme }) {
  const canvas = useRef(null);
  const draw = () => {
    const it = canvas.current;
    if (!it?.clientWidth) return;
    const ratio = devicePixelRatio || 1;
    const [width, height] = [Math.floor(it.clientWidth * ratio), Math.floor(it.clientHeight * ratio)];
    Object.assign(it, { width, height });
    const paint = it.getContext("2d");
    const style = getComputedStyle(it);
    const band = Math.round(6 * ratio);
    const levels = Math.max(1, colouring.classes.length - 1);
    for (let x = 0; x < width; x += 1) {
      const [low, high] = [Math.floor((x * data.count) / width),
        Math.max(Math.floor(((x + 1) * data.count) / width), Math.floor((x * data.count) / width) + 1)];
      let worst = -1, trained = false;
      for (let at = low; at < Math.min(high, data.count); at += 1) {
        worst = Math.max(worst, colouring.of(at));
        trained ||= data.columns.mask[at] === 1 && at >= data.prompt;
      }
      if (worst >= 0) {
        paint.fillStyle = style.getPropertyValue(`--${colouring.classes[worst][0]}`);
        const tall = ((worst + 1) / (levels + 1)) * (height - band - 2);
        paint.fillRect(x, height - band - 2 - tall, 1, tall);
      }
      paint.fillStyle = style.getPropertyValue(trained ? "--m1" : "--line");
      paint.fillRect(x, height - band, 1, band);
    }
    paint.fillStyle = style.getPropertyValue("--text");
    for (const turn of data.turns) paint.fillRect(Math.floor((turn.at * width) / data.count),
      height - band - ratio, ratio, band + ratio);
  };
  useLayoutEffect(() => {
    draw();
    const watch = new ResizeObserver(draw);
    watch.observe(canvas.current);
    return () => watch.disconnect();
  }, [data, colouring, theme]);
  const jump = (event) => onJump(Math.min(data.count - 1,
    Math.floor((event.offsetX / canvas.current.clientWidth) * data.count)));
  return html`<canvas class="profile" ref=${canvas} onClick=${jump} role="img"
    aria-label="the value of each token along the trajectory, with the trained tokens in the band below"></canvas>`;
}

const BREAK = /\n$/;

/** One window of tokens as elements, made once; colours are classes that change. */
function build(root, data, from, until) {
  const { columns } = data;
  const marks = new Map(data.turns.map((turn, n) => [turn.at, { ...turn, n }]));
  const spans = new Array(until - from);
  const texts = new Map(); // of each id once
  let chunk = null, held = 0;
  const page = document.createDocumentFragment();
  const begin = () => { chunk = page.appendChild(document.createElement("div")); chunk.className = "chunk"; held = 0; };
  begin();
  for (let at = from; at < until; at += 1) {
    const turn = marks.get(at);
    if (turn) {
      const head = document.createElement("h3");
      head.className = "turn";
      head.id = `turn-${turn.n}`;
      head.textContent = `${turn.n + 1} · ${turn.role ?? "?"} · from token ${at}`;
      page.append(head);
      begin();
    }
    const span = document.createElement("span");
    span.at = at;
    let parts = texts.get(columns.id[at]);
    if (!parts) {
      parts = data.has_text ? decodeBytes(columns.text.subarray(columns.text_start[at],
        columns.text_start[at + 1])) : [[String(columns.id[at]), false]];
      texts.set(columns.id[at], parts);
    }
    const ends = data.has_text && parts.length > 0 && BREAK.test(parts.at(-1)[0]);
    for (const [text, special] of parts) {
      const shown = text.replace(/\n/g, "↵\n").replace(/\t/g, "→\t");
      if (special) {
        const mark = document.createElement("i");
        mark.textContent = shown;
        span.append(mark);
      } else span.append(shown);
    }
    if (parts.length === 0) span.append("∅");
    spans[at - from] = span;
    chunk.append(span);
    held += 1;
    // A chunk is a block: it ends where the text's line does, or where the line is very long.
    if ((ends && held >= CHUNK / 2) || held >= 4 * CHUNK) begin();
  }
  root.replaceChildren(page);
  return spans;
}

/** Strip, legend, profile and what is known of the token under the pointer. */
function Strip({ data, colour, theme }) {
  const root = useRef(null);
  const tip = useRef(null);
  const spans = useRef([]);
  const [window_, setWindow] = useState(0);
  const [picked, setPicked] = useState(-1);
  const ways = useMemo(() => colourings(data), [data]);
  const name = ways[colour] ? colour : DEFAULTS.find((it) => ways[it]);
  const way = ways[name];
  const [from, until] = [window_ * WINDOW, Math.min(data.count, (window_ + 1) * WINDOW)];
  const { columns } = data;
  const tally = useMemo(() => {
    const found = way.classes.map(() => 0);
    for (let at = 0; at < data.count; at += 1) { const n = way.of(at); if (n >= 0) found[n] += 1; }
    return found;
  }, [data, name]);

  useLayoutEffect(() => { spans.current = build(root.current, data, from, until); }, [data, window_]);
  useLayoutEffect(() => {
    let before = null;
    spans.current.forEach((span, n) => {
      const at = from + n;
      const it = way.of(at);
      const next = columns.version && columns.mask[at] ? columns.version[at] : null;
      span.className = `${it >= 0 ? way.classes[it][0] : ""}${columns.mask[at] && at >= data.prompt ? "" : " off"}${
        next !== null && before !== null && next !== before ? " newer" : ""}`;
      if (next !== null) before = next;
    });
    spans.current[picked - from]?.classList.add("picked");
  }, [data, window_, name]);

  const describe = (at) => {
    const number = (it) => (it ? spelled(it[at]) : "–");
    const bytes = data.has_text ? columns.text.subarray(columns.text_start[at], columns.text_start[at + 1]) : null;
    const turn = data.turns.filter((it) => it.at <= at).at(-1);
    const lines = [["token", `${at}${at >= data.prompt ? `, ${at - data.prompt} of the response`
      : ", of the prompt"}`], ["id", String(columns.id[at])]];
    if (bytes) lines.push(["bytes", [...bytes.subarray(0, 24)].map((byte) =>
      byte.toString(16).toUpperCase().padStart(2, "0")).join(" ")]);
    lines.push(["mask", columns.mask[at] ? "1, sampled" : "0, given"]);
    if (columns.mask[at] && columns.logprob) lines.push(["log-prob",
      `${number(columns.logprob)} (p ${spelled(Math.exp(columns.logprob[at]))})`]);
    for (const [other, values] of Object.entries(columns)) {
      if (!(values instanceof Float32Array) || other === "logprob" || !columns.mask[at]) continue;
      lines.push([other.replaceAll("_", " "), number(values)]);
      if (/logprob/.test(other) && columns.logprob) lines.push(["difference",
        signed(values[at] - columns.logprob[at])]);
    }
    if (columns.version && at >= data.prompt) lines.push(["version", String(columns.version[at])]);
    if (turn) lines.push(["turn", `${data.turns.indexOf(turn) + 1}, ${turn.role ?? "?"}`]);
    return lines;
  };
  const tell = (span) => {
    const box = tip.current;
    box.hidden = !span;
    if (!span) return;
    box.replaceChildren(...describe(span.at).flatMap(([term, text]) => {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      dt.textContent = term;
      dd.textContent = text;
      return [dt, dd];
    }));
    const rect = span.getClientRects()[0] ?? span.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(rect.left, innerWidth - box.offsetWidth - 12))}px`;
    box.style.top = `${rect.bottom + 6 + box.offsetHeight > innerHeight ? Math.max(4,
      rect.top - box.offsetHeight - 6) : rect.bottom + 6}px`;
  };
  const show = (at) => {
    if (at < 0 || at >= data.count) return;
    const page = Math.floor(at / WINDOW);
    if (page !== window_) setWindow(page);
    setPicked(at);
  };
  useEffect(() => {
    const span = picked >= from && picked < until ? spans.current[picked - from] : null;
    if (!span) return undefined;
    span.classList.add("picked");
    const strip = root.current;
    const { top, bottom } = span.getBoundingClientRect();
    let frame = 0;
    if (top < 0 || bottom > innerHeight) {
      // All is laid out for two frames, so that the place is the true one; the browser remembers the sizes.
      strip.classList.add("whole");
      span.scrollIntoView({ block: "center" });
      frame = requestAnimationFrame(() => { frame = requestAnimationFrame(() => strip.classList.remove("whole")); });
    }
    tell(span);
    return () => {
      cancelAnimationFrame(frame);
      strip.classList.remove("whole");
      span.classList.remove("picked");
      tell(null);
    };
  }, [picked, window_]);
  const nextOf = (n, by = 1) => {
    for (let step = 1; step <= data.count; step += 1) {
      const at = (((picked + by * step) % data.count) + data.count) % data.count;
      if (way.of(at) === n) return show(at);
    }
    return undefined;
  };
  const turnBy = (by) => {
    const at = picked < 0 ? (by > 0 ? -1 : 0) : picked;
    const found = by > 0 ? data.turns.find((it) => it.at > at) : data.turns.filter((it) => it.at < at).at(-1);
    if (found) show(found.at);
  };
  const names = Object.keys(ways);
  const choose = (it) => go(withQuery({ colour: it }), { replace: true });
  useKeys([
    ["c", "colour by the next value", () => choose(names[(names.indexOf(name) + 1) % names.length])],
    ["n", "next turn", () => turnBy(1)], ["N", "turn before", () => turnBy(-1)],
    ["ArrowRight", "next token", () => show(picked + 1)], ["ArrowLeft", "token before", () =>
      show(Math.max(0, picked - 1))],
    ["w", "next token of the legend's last colour", () => nextOf(way.classes.length - 1)],
    ["Escape", "let go of the token", () => setPicked(-1)],
  ]);
  const over = (event) => { if (picked < 0) tell(event.target.closest(".strip span")); };
  const click = (event) => {
    const span = event.target.closest(".strip span");
    if (span && span.at !== picked) { setPicked(-1); tell(span); } else setPicked(-1);
  };
  const jump = (event) => { const span = event.target.closest(".strip span"); if (span
    && !getSelection().toString()) { click(event); } };
  return html`<div class="tokens">
    <div class="line toolbar">
      <label>Colour by <select value=${name} onChange=${(event) => choose(event.target.value)}>${names.map((it) =>
        html`<option key=${it} value=${it}>${
        ways[it].title}</option>`)}</select></label>
      <span class="legend" aria-label="legend">${way.classes.map(([kind, label], n) =>
        html`<button type="button" key=${label} disabled=${!tally[n]}
        title=${`next of these ${tally[n]} tokens`} onClick=${() => nextOf(n)}><span class="swatch ${kind}">
          </span>${label} <span class="muted">${count(tally[n])}</span></button>`)}
        <span class="muted off">given, not sampled</span></span>
      ${data.count > WINDOW && html`<span><button type="button" disabled=${window_ === 0}
        onClick=${() => setWindow(window_ - 1)}>◀</button> tokens ${
        count(from)} – ${count(until - 1)} of ${count(data.count)} <button type="button"
          disabled=${until === data.count}
        onClick=${() => setWindow(window_ + 1)}>▶</button></span>`}
    </div>
    <${Profile} data=${data} colouring=${way} onJump=${show} theme=${theme} />
    ${!data.has_text && html`<p class="note">Ids are shown: ${data.reason || "there is no tokenizer"}.</p>`}
    <div class="strip ${data.has_text ? "" : "ids"}" ref=${root} onMouseOver=${over}
      onMouseLeave=${() => picked < 0 && tell(null)} onClick=${jump} translate="no"></div>
    <dl class="tip" ref=${tip} hidden role="status"></dl>
  </div>`;
}

/** The strip of a trajectory of a run. */
export function Tokens({ id, row, colour, theme }) {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    const stop = new AbortController();
    getBytes(`/api/runs/${segment(id)}/trajectories/${segment(row)}/tokens`, {}, { signal: stop.signal }).then(
      (buffer) => setState({ data: parseTokens(buffer), error: null, row }),
      (error) => stop.signal.aborted || setState({ data: null, error }));
    return () => stop.abort();
  }, [id, row]);
  if (state.error) return html`<p class="problem" role="alert">${state.error.message}</p>`;
  if (!state.data) return html`<p class="muted" aria-busy="true">Loading…</p>`;
  if (state.data.count === 0) return html`<p class="note">There are no tokens: ${state.data.reason
    || "a hosted model gives none"}.</p>`;
  return html`<${Strip} data=${state.data} colour=${colour} theme=${theme} key=${state.row} />`;
}
