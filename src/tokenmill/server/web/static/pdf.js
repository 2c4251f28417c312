// The text of PDF files. Owns: pages, what their operators show, lines and spaces. It is fetched when a PDF file is chosen.
//
// It runs in the page, because a worker would want a policy for the addresses of scripts; so it gives the page its turns.
import { Objects, Refusal } from "./pdffile.js";
import { readFont, UNKNOWN } from "./pdffont.js";
import { joined, Reader } from "./pdfsyntax.js";

const MOST_PAGES = 2000;
const MOST_TEXT = 2 << 20; // characters, as of any text file
const DEEPEST = 12; // forms within forms
const TURN_MS = 12; // longer the page does not wait

// `progress(page, pages)` is called before each page; `signal` ends it. -> {text, unknown: signs whose letter the file does not
// tell, faults: damaged pages}; throws a Refusal that goes on after the file's name.
export async function readPdf(bytes, { progress = () => {}, signal } = {}) {
  const objects = new Objects(bytes, turns(signal));
  try {
    const pages = await pagesOf(objects, await objects.open());
    const parts = [];
    let [unknown, letters, faults, room] = [0, 0, 0, MOST_TEXT];
    for (const [i, page] of pages.entries()) {
      progress(i + 1, pages.length);
      const [seen, broken] = await pageText(objects, page, room);
      const text = tidy(seen);
      faults += broken;
      unknown += text.split(UNKNOWN).length - 1;
      letters += text.replace(/\s/g, "").length;
      room -= text.length;
      parts.push(`## Page ${i + 1}\n\n${text}${broken ? "\n\n(the rest of this page is damaged)" : text ? "" : "(no text)"}\n`);
    }
    if (!letters && faults) throw new Error("no page");
    if (!letters) throw new Refusal("holds no text, only pictures: run it through text recognition (OCR) first.");
    if (unknown > letters / 2) throw new Refusal("does not say which letters its signs are, so that only a picture of it could be read.");
    return { text: parts.join("\n"), unknown, faults };
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
    throw new Refusal("is damaged: it cannot be read.");
  }
}

// Older writers put an accent before its letter.
const MARKS = { "´": "\u0301", "¨": "\u0308", "ˆ": "\u0302", "˜": "\u0303", "ˇ": "\u030c", "˚": "\u030a", "¸": "\u0327" };
const tidy = (text) => text.replaceAll("c◯", "©").split("\n").map((line) => line.trimEnd().replace(/([´¨ˆ˜ˇ˚¸])([A-Za-zı])/g, (_, mark, letter) => `${letter === "ı" ? "i" : letter}${MARKS[mark]}`.normalize("NFC"))).join("\n").replace(/\n{3,}/g, "\n\n").trim();

function turns(signal) {
  let last = performance.now();
  return async () => {
    signal?.throwIfAborted();
    if (performance.now() - last < TURN_MS) return;
    const { port1, port2 } = new MessageChannel(); // timers would wait longer, in a hidden tab a second
    await new Promise((go) => {
      port1.onmessage = go;
      port2.postMessage(0);
    });
    port1.close();
    last = performance.now();
  };
}

// [{page, resources}], in order. What was seen before is not walked into again.
async function pagesOf(objects, root) {
  const found = [];
  const seen = new Set();
  const waiting = [[root.get("/Pages"), new Map()]];
  while (waiting.length) {
    await objects.breathe();
    objects.spend(20);
    const [ref, above] = waiting.pop();
    const node = await objects.get(ref);
    if (!(node instanceof Map) || seen.has(node)) continue;
    seen.add(node);
    const own = await objects.in(node, "/Resources");
    const resources = own instanceof Map ? own : above;
    const kids = await objects.in(node, "/Kids");
    if (Array.isArray(kids)) for (let i = kids.length - 1; i >= 0; i -= 1) waiting.push([kids[i], resources]);
    else found.push({ page: node, resources });
    if (found.length > MOST_PAGES) throw new Refusal(`has more than ${MOST_PAGES.toLocaleString("en")} pages.`);
  }
  if (!found.length) throw new Error("no pages");
  return found;
}

// -> [what a page says, whether it ends in a fault].
async function pageText(objects, { page, resources }, room) {
  const lines = new Lines(room);
  try {
    const parts = [];
    for (const each of [await objects.in(page, "/Contents")].flat()) {
      const stream = await objects.get(each);
      if (stream?.dict) parts.push(await objects.data(stream), Uint8Array.of(10));
    }
    await run(objects, joined(parts), resources, lines, [1, 0, 0, 1, 0, 0], 0);
    for (const each of [(await objects.in(page, "/Annots")) ?? []].flat()) await fieldText(objects, await objects.get(each), lines);
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
    return [lines.text, true];
  }
  return [lines.text, false];
}

// What was filled into a form or written over a page.
async function fieldText(objects, note, lines) {
  const looks = note instanceof Map ? await objects.in(note, "/AP") : null;
  const rect = looks instanceof Map ? await objects.in(note, "/Rect") : null;
  if (Array.isArray(rect)) await form(objects, await objects.in(looks, "/N"), new Map(), lines, [1, 0, 0, 1, rect[0], rect[1]], 0);
}

// Letters that run from the right to the left.
const RIGHT = "\u0590-\u065f\u066a-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefc";
const [FROM_RIGHT, ALL_RIGHT] = [new RegExp(`[${RIGHT}]`), new RegExp(`[${RIGHT}]`, "g")];
const RIGHT_RUN = new RegExp(`[${RIGHT}](?:[${RIGHT}\\P{L}]*[${RIGHT}])?`, "gu");
const LEFT_RUN = new RegExp(`(?![${RIGHT}])[\\p{L}\\p{N}](?:[^${RIGHT}]*(?![${RIGHT}])[\\p{L}\\p{N}])?`, "gu");
const LONGEST = 2000; // of a line that is worth it
const PAIRS = "()[]{}<>«»";

const backwards = (text) => text.match(/\P{M}\p{M}*|\p{M}+/gu).reverse().join("").replace(/[()[\]{}<>«»]/g, (c) => PAIRS[PAIRS.indexOf(c) ^ 1]);
const turned = (text) => backwards(text).replace(LEFT_RUN, backwards);

// A line as one reads it, from how it looks: files place letters from left to right.
function asRead(line) {
  if (line.length > LONGEST || !FROM_RIGHT.test(line)) return line;
  const right = line.match(ALL_RIGHT).length;
  return 2 * right > line.match(/\p{L}/gu).length ? turned(line) : line.replace(RIGHT_RUN, turned);
}

// Text as it is shown, with the spaces and ends of lines that only places tell.
class Lines {
  constructor(room) {
    Object.assign(this, { done: "", line: "", room, start: null, end: null });
  }

  get text() {
    return this.done + asRead(this.line);
  }

  // `from` and `to` are where the text begins and ends, `size` is how high it is there and `wide` how wide one em.
  add(text, from, to, size, wide) {
    if (!text) return;
    const [ux, uy] = [from[0], from[1]].map((each) => each / (Math.hypot(from[0], from[1]) || 1));
    const along = (a, b) => (a[4] - b[4]) * ux + (a[5] - b[5]) * uy;
    let gap = "";
    if (this.end) {
      const { at } = this.end;
      const across = Math.abs((from[5] - at[5]) * ux - (from[4] - at[4]) * uy);
      const high = Math.max(size, this.end.size);
      const beside = across <= high / 2 && ux * this.end.ux + uy * this.end.uy >= 0.9;
      const by = along(from, at);
      if (beside && by < -2 * wide && FROM_RIGHT.test(text) && along(to, this.start) < wide / 2) {
        this.line = `${text}${along(this.start, to) > 0.15 * wide ? " " : ""}${this.line}`;
        this.start = from;
        return;
      }
      if (!beside || by < -2 * wide) {
        this.done += `${asRead(this.line)}${across > 1.8 * high ? "\n\n" : "\n"}`;
        Object.assign(this, { line: "", start: from });
      } else if (by > 0.15 * wide && !/^\s|\s$/.test(this.line.slice(-1) + text[0])) gap = by > 2 * wide ? "\t" : " ";
    }
    this.line += gap + text;
    this.start ??= from;
    this.end = { at: to, ux, uy, size };
    if (this.done.length + this.line.length > this.room) throw new Refusal(`holds more than ${MOST_TEXT >> 20} MiB of text.`);
  }
}

const times = ([a, b, c, d, e, f], [g, h, i, j, k, l]) => [a * g + b * i, a * h + b * j, c * g + d * i, c * h + d * j, e * g + f * i + k, e * h + f * j + l];
const START = { ctm: null, font: null, size: 1, spacing: 0, wordSpacing: 0, stretch: 1, leading: 0, rise: 0 };

// Do what a stream of operators says.
async function run(objects, bytes, resources, lines, ctm, depth) {
  const reader = new Reader(bytes);
  const kept = [];
  let state = { ...START, ctm };
  let [matrix, line] = [[1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0]];
  const move = (x, y) => { matrix = line = times([1, 0, 0, 1, x, y], line); };
  const forward = (by) => { matrix = times([1, 0, 0, 1, by * state.stretch, 0], matrix); };
  const show = (string) => {
    if (!state.font || !(string instanceof Uint8Array)) return;
    const { font, size, spacing, wordSpacing } = state;
    const at = times([1, 0, 0, 1, 0, state.rise], times(matrix, state.ctm));
    const scale = Math.abs(size);
    let [text, width] = ["", 0];
    for (const [code, length] of font.codes(string)) {
      const letter = font.text(code);
      text += letter[1] && FROM_RIGHT.test(letter) ? [...letter].reverse().join("") : letter; // the line is turned as a whole
      width += font.width(code) * size + spacing + (code === 32 && length === 1 ? wordSpacing : 0);
    }
    forward(width || 0);
    lines.add(text, at, times(matrix, state.ctm), scale * Math.hypot(at[2], at[3]), scale * state.stretch * Math.hypot(at[0], at[1]));
  };
  const operators = {
    q: () => { if (kept.length < 1000) kept.push(state); state = { ...state }; },
    Q: () => { state = kept.pop() ?? state; },
    cm: (m) => { state.ctm = times(m, state.ctm); },
    BT: () => { matrix = line = [1, 0, 0, 1, 0, 0]; },
    Tc: ([by]) => { state.spacing = by; },
    Tw: ([by]) => { state.wordSpacing = by; },
    Tz: ([by]) => { state.stretch = by / 100; },
    TL: ([by]) => { state.leading = by; },
    Ts: ([by]) => { state.rise = by; },
    Tm: (m) => { matrix = line = m.slice(-6); },
    Td: ([x, y]) => move(x, y),
    TD: ([x, y]) => { state.leading = -y; move(x, y); },
    "T*": () => move(0, -state.leading),
    Tj: ([text]) => show(text),
    "'": ([text]) => { move(0, -state.leading); show(text); },
    '"': ([word, sign, text]) => { Object.assign(state, { wordSpacing: word, spacing: sign }); move(0, -state.leading); show(text); },
    TJ: ([list]) => { for (const each of Array.isArray(list) ? list : []) typeof each === "number" ? forward((-each / 1000) * state.size) : show(each); },
    Tf: async ([name, size]) => { Object.assign(state, { font: await fontOf(objects, resources, name), size }); },
    Do: async ([name]) => form(objects, await named(objects, resources, "/XObject", name), resources, lines, state.ctm, depth),
    ID: () => { reader.at = pictureEnd(bytes, reader.at); },
  };
  let held = [];
  for (let n = 0; ; n += 1) {
    const item = reader.next();
    if (item === undefined) return;
    if (n % 256 === 0) await objects.breathe();
    if (typeof item !== "string" || item[0] === "/") {
      held.push(item);
      continue;
    }
    const work = Object.hasOwn(operators, item) ? operators[item](held) : null;
    if (work) await work;
    held = [];
  }
}

async function named(objects, resources, kind, name) {
  const all = await objects.in(resources, kind);
  return all instanceof Map ? objects.in(all, name) : null;
}

const fonts = new WeakMap(); // by their dictionary: pages share them

async function fontOf(objects, resources, name) {
  const dict = await named(objects, resources, "/Font", name);
  if (!(dict instanceof Map)) return readFont(objects, new Map());
  if (!fonts.has(dict)) fonts.set(dict, await readFont(objects, dict));
  return fonts.get(dict);
}

// A part of a page that is kept as an object of its own.
async function form(objects, stream, resources, lines, ctm, depth) {
  objects.spend(2000); // a few forms that show each other many times are work without end
  if (depth >= DEEPEST || !stream?.dict || (await objects.in(stream.dict, "/Subtype")) !== "/Form") return;
  const own = await objects.in(stream.dict, "/Resources");
  const matrix = await objects.in(stream.dict, "/Matrix");
  await run(objects, await objects.data(stream), own instanceof Map ? own : resources, lines, Array.isArray(matrix) ? times(matrix, ctm) : ctm, depth + 1);
}

// A picture within the operators ends with EI between white space.
function pictureEnd(bytes, from) {
  const white = (at) => at >= bytes.length || bytes[at] <= 32;
  for (let at = from; at < bytes.length; at += 1) if (bytes[at] === 69 && bytes[at + 1] === 73 && white(at - 1) && white(at + 2)) return at + 2;
  return bytes.length;
}
