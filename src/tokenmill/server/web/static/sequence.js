// Sequence diagrams. Owns: reading Mermaid's sequenceDiagram, and where everything in it lies. Knows nothing of drawing.
//
// What it cannot read in whole it does not read at all (null).
import { linesOf } from "./flowtext.js";

const MOST = 300; // lines
const MESSAGE = /^(.+?)\s*(<<-->>|<<->>|-->>|->>|--x|-x|--\)|-\)|-->|->)\s*([+-]?)\s*([^:]+?)\s*:\s*(.*)$/;
const FRAMES = /^(loop|alt|opt|par|critical|break|rect)\b\s*(.*)$/;
const PARTS = /^(else|and|option)\b\s*(.*)$/;
const NOTE = /^note\s+(left of|right of|over)\s+([^:]+?)\s*:\s*(.*)$/i;

// -> {people: [{id, lines, actor}], steps, title, numbered}.
export function readSequence(source) {
  const [first, ...lines] = source.replace(/%%[^\n]*/g, "").split("\n").map((line) => line.trim().replace(/;$/, "")).filter(Boolean);
  if (!/^sequenceDiagram$/.test(first ?? "") || lines.length > MOST) return null;
  const found = { people: [], steps: [], title: "", numbered: false };
  const who = (id, text = id, actor = false, named = false) => {
    let one = found.people.find((p) => p.id === id);
    if (!one) found.people.push((one = { id, lines: linesOf(text), actor }));
    else if (named) Object.assign(one, { lines: linesOf(text), actor });
    return found.people.indexOf(one);
  };
  let depth = 0;
  for (const line of lines) {
    const person = /^(participant|actor)\s+(.+?)(?:\s+as\s+(.+))?$/.exec(line);
    const frame = FRAMES.exec(line);
    const part = PARTS.exec(line);
    const note = NOTE.exec(line);
    const active = /^(activate|deactivate)\s+(.+)$/.exec(line);
    const title = /^(?:title|accTitle)\s*:?\s+(.+)$/.exec(line);
    if (title) found.title = title[1];
    else if (/^(autonumber)\b/.test(line)) found.numbered = true;
    else if (/^(links?|accDescr)\b/.test(line)) continue;
    else if (person && !/^(?:create|destroy)\b/.test(line)) who(person[2].trim(), person[3] ?? person[2], person[1] === "actor", true);
    else if (note) {
      const at = note[2].split(",").map((each) => who(each.trim()));
      found.steps.push({ kind: "note", side: note[1].toLowerCase(), from: Math.min(...at), to: Math.max(...at), lines: linesOf(note[3]) });
    } else if (active) found.steps.push({ kind: active[1], who: who(active[2].trim()) });
    else if (frame && !MESSAGE.test(line)) {
      depth += 1;
      found.steps.push({ kind: "frame", word: frame[1], text: frame[1] === "rect" ? "" : frame[2] });
    } else if (part && depth && !MESSAGE.test(line)) found.steps.push({ kind: "part", text: part[2] });
    else if (line === "end") {
      if (!depth) return null;
      depth -= 1;
      found.steps.push({ kind: "end" });
    } else {
      const said = MESSAGE.exec(line);
      if (!said || /^(create|destroy|box)\b/.test(line)) return null;
      const [, from, arrow, active, to, text] = said;
      found.steps.push({ kind: "message", from: who(from), to: who(to), dotted: arrow.includes("--"), head: /x$/.test(arrow) ? "x" : /\)$/.test(arrow) ? "open" : />>$/.test(arrow) ? "full" : "", both: arrow.startsWith("<<"), lines: linesOf(text) });
      if (active) found.steps.push({ kind: active === "+" ? "activate" : "deactivate", who: active === "+" ? who(to) : who(from) });
    }
  }
  return depth || !found.people.length || found.people.length > 20 ? null : found;
}

const ROW = 16; // above the text of a step
const SELF = 46;

// Places: x of each person, y of each step. `measure(lines)` -> {w, h}.
export function placeSequence(read, measure) {
  const boxes = read.people.map((p) => measure(p.lines)).map(({ w, h }) => ({ w: Math.max(w + 28, 76), h: h + 18 }));
  const head = Math.max(...boxes.map((b) => b.h)) + (read.people.some((p) => p.actor) ? 40 : 0);
  const gaps = boxes.map((b, i) => (i ? (boxes[i - 1].w + b.w) / 2 + 26 : 0)); // from the person before
  let [left, right] = [boxes[0].w / 2, boxes.at(-1).w / 2];
  const wants = [];
  for (const step of read.steps) {
    if (!step.lines) continue;
    const [a, b] = [Math.min(step.from, step.to), Math.max(step.from, step.to)];
    Object.assign(step, { size: measure(step.lines) });
    const w = step.size.w + (read.numbered ? 28 : 0);
    if (step.kind === "message" && a !== b) wants.push([a, b, w + 30]);
    else if (step.kind === "message") wants.push([a, a + 1, w + SELF + 24]);
    else if (step.side === "over") a === b ? wants.push([a - 1, a, w / 2 + 60], [a, a + 1, w / 2 + 60]) : wants.push([a, b, w]);
    else wants.push(step.side === "left of" ? [a - 1, a, w + 60] : [a, a + 1, w + 60]);
  }
  for (const [a, b, w] of wants.sort((one, two) => one[1] - one[0] - (two[1] - two[0]))) {
    if (a < 0) left = Math.max(left, w);
    else if (b >= gaps.length) right = Math.max(right, w);
    else {
      const has = gaps.slice(a + 1, b + 1).reduce((x, y) => x + y, 0);
      if (has < w) for (let i = a + 1; i <= b; i += 1) gaps[i] += (w - has) / (b - a);
    }
  }
  const deepest = read.steps.reduce(({ now, most }, { kind }) => { const next = now + (kind === "frame" ? 1 : kind === "end" ? -1 : 0); return { now: next, most: Math.max(most, next) }; }, { now: 0, most: 0 }).most;
  let x = left + deepest * 10;
  const at = gaps.map((gap, i) => (x += i ? gap : 0));
  const { y, frames, bars } = rows(read.steps, head + 14, at);
  return { boxes, at, head, frames, bars, end: y + 14, w: at.at(-1) + right + deepest * 10, h: y + 14 + Math.max(...boxes.map((b) => b.h)) };
}

function rows(steps, from, at) {
  let y = from;
  const open = [];
  const frames = [];
  const bars = [];
  const active = at.map(() => []);
  const touch = (a, b, extra = 0) => open.forEach((frame) => Object.assign(frame, { from: Math.min(frame.from, a), to: Math.max(frame.to, b), right: Math.max(frame.right, extra) }));
  for (const step of steps) {
    if (step.kind === "frame") {
      y += 12;
      open.push({ ...step, y, from: Infinity, to: -1, right: 0, parts: [], depth: open.length });
      y += step.word === "rect" ? 4 : 28;
    } else if (step.kind === "part") {
      y += 12;
      open.at(-1).parts.push({ y, text: step.text });
      y += 22;
    } else if (step.kind === "end") {
      const frame = open.pop();
      y += 12;
      frames.push({ ...frame, end: y });
      if (frame.to >= 0) touch(frame.from, frame.to, frame.right);
      y += 4;
    } else if (step.kind === "activate") active[step.who].push(y);
    else if (step.kind === "deactivate") {
      const start = active[step.who].pop();
      if (start !== undefined) bars.push({ who: step.who, y: start, end: y, depth: active[step.who].length });
    } else if (step.kind === "note") {
      y += ROW;
      step.y = y;
      y += step.size.h + 14;
      touch(step.from, step.to, step.side === "right of" ? step.size.w + 40 : step.size.w / 2 + 12);
    } else {
      y += ROW + step.size.h;
      step.y = y;
      if (step.from === step.to) y += 24;
      touch(Math.min(step.from, step.to), Math.max(step.from, step.to), step.from === step.to ? step.size.w + SELF : 0);
    }
  }
  active.forEach((starts, who) => starts.forEach((start, depth) => bars.push({ who, y: start, end: y + 8, depth })));
  return { y: y + 12, frames, bars };
}
