// Sequence diagrams as pictures. Owns: people, messages, notes and frames as SVG. Knows nothing of where they lie.
import { el, mark, measure, path, sheet, SMALL, words } from "./pen.js";
import { placeSequence, readSequence } from "./sequence.js";

// -> an SVG, or null for what cannot be drawn in whole.
export function drawSequence(text) {
  const read = readSequence(text);
  if (!read) return null;
  const found = placeSequence(read, measure);
  const { at, boxes, head, end } = found;
  const parts = [];
  for (const frame of found.frames) parts.push(...framed(frame, at));
  at.forEach((x) => parts.push(el("line", { x1: x, x2: x, y1: head, y2: end, class: "life" })));
  for (const bar of found.bars) parts.push(el("rect", { x: at[bar.who] - 5 + bar.depth * 5, y: bar.y, width: 10, height: bar.end - bar.y, class: "active" }));
  read.people.forEach((person, i) => {
    parts.push(...personAt(person, at[i], head, boxes[i], true), ...personAt(person, at[i], end + boxes[i].h, boxes[i], false));
  });
  let n = 0;
  for (const step of read.steps) {
    if (step.kind === "message") parts.push(message(step, at, read.numbered ? (n += 1) : 0));
    if (step.kind === "note") parts.push(noted(step, at));
  }
  return sheet(found.w, found.h, `Sequence diagram: ${read.steps.filter((s) => s.kind === "message").slice(0, 40).map((s) => `${read.people[s.from].lines.join(" ")} to ${read.people[s.to].lines.join(" ")}: ${s.lines.join(" ")}`).join("; ")}`, parts);
}

function personAt({ lines, actor }, x, bottom, { w, h }, above) {
  const y = bottom - h / 2;
  if (!actor) return [el("g", { class: "node" }, el("rect", { x: x - w / 2, y: y - h / 2, width: w, height: h, rx: 4 }), words(lines, x, y))];
  const figure = above ? [path(`M${x} ${y - 32}V${y - 20}M${x - 11} ${y - 28}H${x + 11}M${x} ${y - 20}L${x - 9} ${y - 10}M${x} ${y - 20}L${x + 9} ${y - 10}`, "sign"), el("circle", { cx: x, cy: y - 38, r: 6, class: "sign" })] : [];
  return [el("g", { class: "edge" }, ...figure), words(lines, x, y + 2)];
}

function message({ from, to, dotted, head, both, lines, y, size }, at, number) {
  const kind = `edge ${dotted ? "dotted" : "solid"}`;
  const [a, b] = [at[from], at[to]];
  const sign = (x) => (number ? [el("circle", { cx: x, cy: y, r: 9, class: "number" }), words([String(number)], x, y, "counted")] : []);
  if (from === to) return el("g", { class: kind }, path(`M${a} ${y}H${a + 34}V${y + 18}H${a + 4}`), ...mark(head, [a + 4, y + 18], [a + 5, y + 18]), words(lines, a + 12, y - size.h / 2 - 3, "", "start"), ...sign(a));
  const way = Math.sign(b - a);
  return el("g", { class: kind }, path(`M${a + (both ? way * 2 : 0)} ${y}H${b - way}`), ...mark(head, [b - way, y], [b - 2 * way, y]), ...(both ? mark(head, [a + way, y], [a + 2 * way, y]) : []), words(lines, (a + b) / 2, y - size.h / 2 - 3), ...sign(a));
}

function noted({ side, from, to, lines, y, size }, at) {
  const over = side === "over";
  const w = over ? Math.max(size.w + 20, from === to ? 0 : at[to] - at[from] + 40) : size.w + 20;
  const x = over ? (at[from] + at[to]) / 2 : at[from] + (side === "right of" ? 1 : -1) * (w / 2 + 12);
  return el("g", { class: "note" }, el("rect", { x: x - w / 2, y, width: w, height: size.h + 8 }), words(lines, x, y + 4 + size.h / 2));
}

function framed({ word, text, y, end, from, to, right, parts, depth: deep }, at) {
  if (to < 0) return [];
  const pad = 40 - deep * 8;
  const [l, r] = [at[from] - pad, Math.max(at[to] + pad, at[to] + right)];
  const rect = el("rect", { x: l, y, width: r - l, height: end - y, rx: 4 });
  if (word === "rect") return [el("g", { class: "tint" }, rect)];
  const wide = measure([word], SMALL).w + 14;
  const cut = (part) => [path(`M${l} ${part.y}H${r}`), words([`[${part.text}]`], l + 10, part.y + 11, "small", "start")];
  return [el("g", { class: "frame" }, rect, path(`M${l} ${y + 19}H${l + wide - 6}L${l + wide} ${y + 13}V${y}`), words([word], l + 6, y + 10, "small kind", "start"), ...(text ? [words([`[${text}]`], l + wide + 8, y + 10, "small", "start")] : []), ...parts.flatMap(cut))];
}
