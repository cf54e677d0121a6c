// Text that models wrote: only ever text nodes, with what would be invisible, or move other text, made visible.

import { html, useState, count } from "./core.js";

/** Controls, bidi and zero-width characters, tags, lone surrogates: all that is drawn as nothing or moves text. */
const UNSEEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180e"
  + "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\u{e0000}-\\u{e0fff}]"
  + "|\\p{Cs}", "gu");

const CONTROLS = ("NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN "
  + "EM SUB ESC FS GS RS US").split(" ");

const name = (character) => {
  const code = character.codePointAt(0);
  if (code < 0x20) return `⟨${CONTROLS[code]}⟩`;
  if (code === 0x7f) return "⟨DEL⟩";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
};

export const visible = (text) => String(text ?? "").replace(UNSEEN, name);

/** `[[text, whether it stands for unseen characters], …]` */
export function pieces(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > from) found.push([text.slice(from, match.index), false]);
    found.push([name(match[0]), true]);
    from = match.index + match[0].length;
  }
  if (from < text.length) found.push([text.slice(from), false]);
  return found;
}

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** A token's bytes as text; bytes that are no whole UTF-8 as ⟨E2 9C⟩. `[[text, whether special], …]` */
export function decodeBytes(bytes) {
  try {
    return pieces(utf8.decode(bytes));
  } catch { /* a part of a character, at an end or at both */ }
  const found = [];
  let bad = [];
  const flush = () => {
    if (bad.length) found.push([`⟨${bad.map((byte) => byte.toString(16).toUpperCase().padStart(2,
      "0")).join(" ")}⟩`, true]);
    bad = [];
  };
  for (let at = 0; at < bytes.length;) {
    const first = bytes[at];
    const size = first < 0x80 ? 1 : first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    try {
      const text = utf8.decode(bytes.subarray(at, at + size));
      flush();
      found.push(...pieces(text));
      at += size;
    } catch {
      bad.push(first);
      at += 1;
    }
  }
  flush();
  return found;
}

const FIRST = 20_000;
const MORE = 200_000;

/** Model text; of a very long one the beginning, with a button for more. `mark`: character at which others differ. */
export function Text({ text, mark = null, className = "" }) {
  const [shown, setShown] = useState(FIRST);
  const part = text.length > shown ? text.slice(0, shown) : text;
  const runs = (of) => pieces(of).map(([piece, unseen]) => (unseen ? html`<span class="unseen">${piece}</span>`
    : piece));
  const body = mark === null ? runs(part) : mark > part.length ? html`<span class="same">${runs(part)}</span>`
    : [html`<span class="same">${runs(part.slice(0, mark))}</span>`,
      html`<span class="fork" title="here the answers begin to differ">${"▸"}</span>`, runs(part.slice(mark))];
  return html`<div class="text ${className}" dir="auto">${body}${text.length > shown && html`
    <button type="button" class="more" onClick=${() => setShown(shown + MORE)}>
      ${count(text.length - shown)} more characters</button>`}</div>`;
}

const THINK = /^\s*<think(?:ing)?>([\s\S]*?)(?:<\/think(?:ing)?>|$)/;

/** A message's parts in reading order: `{kind: "thinking"|"text"|"image"|"call"|"other", text, …}`. */
export function partsOf(message) {
  const parts = [];
  const thought = message.reasoning_content ?? message.reasoning ?? message.thinking;
  if (typeof thought === "string" && thought) parts.push({ kind: "thinking", text: thought });
  const content = message.content;
  const blocks = typeof content === "string" ? [{ type: "text", text: content }] : Array.isArray(content) ? content
    : content === null || content === undefined ? [] : [content];
  for (const block of blocks) {
    if (typeof block === "string") parts.push({ kind: "text", text: block });
    else if (typeof block?.text === "string" && (block.type ?? "text") === "text") {
      const match = message.role === "assistant" && THINK.exec(block.text);
      if (match) parts.push({ kind: "thinking", text: match[1].trim() });
      const rest = match ? block.text.slice(match[0].length).replace(/^\n+/, "") : block.text;
      if (rest || !match) parts.push({ kind: "text", text: rest });
    } else if (/^(image|image_url|input_image)$/.test(block?.type)) {
      parts.push({ kind: "image", source: pictured(block), text: pretty(block) });
    }
    else parts.push({ kind: "other", text: pretty(block) });
  }
  for (const call of message.tool_calls || []) {
    const called = call?.function ?? call ?? {};
    let args = called.arguments;
    if (typeof args === "string") try { args = JSON.parse(args); } catch { /* shown as it is */ }
    parts.push({ kind: "call", name: String(called.name ?? "?"), id: call?.id, text: typeof args === "string"
      ? args : pretty(args) });
  }
  return parts;
}

export const plain = (message) => partsOf(message).map((part) => part.text).join("\n");

const pretty = (value) => JSON.stringify(value, null, 2) ?? "";

/** The address of an image that stands in the message itself; nothing is fetched. */
function pictured(block) {
  const given = block.image ?? block.image_url?.url ?? block.image_url;
  return typeof given === "string" && /^data:image\/(png|jpeg|gif|webp|bmp);base64,[\w+/=]+$/.test(given) ? given
    : null;
}

/** An image, or what stands in its place. */
function Picture({ source, text }) {
  const [broken, setBroken] = useState(false);
  if (!source || broken) return html`<${Text} text=${text} className="code" />`;
  return html`<img src=${source} alt="image of the conversation" onError=${() => setBroken(true)} />`;
}

/** One message. `mark`: how many characters of its parts other answers share; null: it is not compared. */
export function Message({ message, id, mark = null, removed = false }) {
  const role = String(message.role ?? "?");
  let marked = mark;
  // Answers are compared over their parts' texts, one line after the other.
  const here = (it) => {
    const found = marked;
    if (marked !== null) marked = marked <= it.text.length ? null : marked - it.text.length - 1;
    return found;
  };
  const part = (it) => {
    const at = here(it);
    if (it.kind === "thinking") {
      return html`<details class="thinking"><summary>Thinking, ${count(it.text.length)} characters${
        at !== null && at <= it.text.length
          && html` <span class="fork" title="here the answers begin to differ">▸</span>`}</summary>
        <${Text} text=${it.text} mark=${at} /></details>`;
    }
    if (it.kind === "image") return html`<${Picture} source=${it.source} text=${it.text} />`;
    if (it.kind === "call") {
      return html`<div class="call"><span class="label">calls</span> <b>${visible(it.name)}</b>
        ${it.id && html` <span class="muted">${visible(String(it.id))}</span>`}<${Text} text=${it.text} mark=${at}
          className="code" /></div>`;
    }
    return html`<${Text} text=${it.text} mark=${at} className=${role === "tool" || it.kind === "other" ? "code"
      : ""} />`;
  };
  return html`<article class="message ${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}
      ${removed ? "removed" : ""}" id=${id}>
    <header><span class="role">${visible(role)}</span>${message.name && html` <b>${visible(String(message.name))}</b>`}
      ${message.tool_call_id && html` <span class="muted">answers ${visible(String(message.tool_call_id))}</span>`}
      ${removed && html` <span class="tag">removed from the context</span>`}</header>
    ${partsOf(message).map(part)}
  </article>`;
}
