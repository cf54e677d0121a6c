// An exported file: the answers of a server about one run, and lists that are sorted and filtered here.

let file = null;

/** Reads what the page's file holds; nothing where a server answers. */
export async function readFile() {
  const packed = document.getElementById("rollstream-file")?.textContent;
  if (!packed) return;
  const stream = new Blob([bytesOf(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
  file = JSON.parse(await new Response(stream).text());
}

const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** `{run, note}` of an exported file, or null. */
export const exported = () => file;

const TESTS = {
  "=": (a, b) => a === b, "==": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b,
  "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
};
const WORD = `"(?:[^"\\\\]|\\\\.)*"|'(?:[^'\\\\]|\\\\.)*'|[^\\s()=<>~,!"']+`;
const COMPARISON = new RegExp(`^(${WORD})\\s*([=!<>]=|[=<>])\\s*(${WORD})(?:\\s+and\\s+|$)`, "is");
const TRUTHS = { true: true, 1: true, yes: true, false: false, 0: false, no: false };

const unquoted = (word) => (/^["']/.test(word) ? word.slice(1, -1).replace(/\\(.)/gs, "$1") : word);

/** A value as cells of a column have it; undefined where it means nothing there. */
function valueOf(word, type) {
  if (/^null$/i.test(word)) return null;
  const text = unquoted(word);
  if (type === "text") return text;
  if (type === "bool") return TRUTHS[text.toLowerCase()];
  return Number.isNaN(Number(text)) ? undefined : Number(text);
}

/** Comparisons joined by `and`, as the page's own links have them; undefined where a filter says more. */
function testsOf(filter, columns) {
  const types = new Map(file[`/api/runs/${file.run}`].columns.map(({ name, type }) => [name, type]));
  const tests = [];
  let rest = filter.trim();
  while (rest) {
    const part = COMPARISON.exec(rest);
    const name = part && unquoted(part[1]);
    const at = columns.indexOf(name);
    const value = at < 0 ? undefined : valueOf(part[3], types.get(name));
    if (value === undefined) return undefined;
    const test = TESTS[part[2]];
    tests.push((row) => (row[at] === null && value !== null ? part[2] === "!=" : test(row[at], value)));
    rest = rest.slice(part[0].length);
  }
  return tests;
}

function sorted(rows, sort, cell) {
  for (const name of (sort || "").split(",").filter(Boolean).reverse()) {
    const key = decodeURIComponent(name.replace(/^-/, ""));
    const sign = name.startsWith("-") ? -1 : 1;
    rows.sort((one, other) => {
      const [a, b] = [cell(one, key), cell(other, key)];
      if (a === b) return 0;
      if (a === null || a === undefined) return 1;
      if (b === null || b === undefined) return -1;
      return (a < b ? -1 : 1) * sign;
    });
  }
  return rows;
}

const LISTS = {
  rows({ filter = "", sort, offset = 0, limit, columns = "" }) {
    const known = ["row", ...file.rows.columns];
    const tests = testsOf(filter, known);
    if (!tests) return undefined;
    const names = columns ? columns.split(",").map(decodeURIComponent) : file.rows.columns;
    const places = ["row", ...names].map((name) => known.indexOf(name));
    const found = sorted(file.rows.rows.filter((row) => tests.every((test) => test(row))), sort,
      (row, name) => row[known.indexOf(name)]);
    return { total: found.length, all: file.rows.rows.length, columns: names,
      rows: found.slice(offset, offset + limit).map((row) => places.map((at) => row[at])) };
  },
  groups({ filter, sort, offset, limit }) {
    if (filter) return undefined;
    const found = sorted([...file.groups], sort, (group, name) => group[name]);
    return { total: found.length, groups: found.slice(offset, offset + limit) };
  },
  texts: ({ rows }) => ({ texts: Object.fromEntries(rows.split(",").map((row) => [row, file.texts[row]])) }),
  failures({ cause, offset, limit }) {
    const { failures } = file[`/api/runs/${file.run}/failures`];
    const found = failures.filter((it) => !cause || it.error.split("\n")[0].trim().replace(/\d+/g, "N").slice(0, 200) === cause);
    return { total: found.length, failures: found.slice(offset, offset + limit) };
  },
};

/** What the server would have answered; undefined where the file does not hold it. */
export function answerOf(path, params = {}) {
  const list = LISTS[path.slice(`/api/runs/${file.run}/`.length)];
  return list ? list(params) : path.endsWith("/tokens") && file[path] ? bytesOf(file[path]).buffer : file[path];
}
