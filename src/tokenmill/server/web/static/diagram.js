// Diagrams. Owns: drawing flow charts and sequence diagrams of Mermaid as SVG. It is fetched where an answer holds one.
import { groupsOf, layOut } from "./flow.js";
import { readFlow } from "./flowtext.js";
import { placeSequence, readSequence } from "./sequence.js";

const LINE = 18;
const SIZE = 13.5;
const PAD = 10; // around the whole
const round = (n) => Math.round(n * 10) / 10;

function el(name, attributes = {}, ...children) {
  const made = document.createElementNS("http" + "://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, typeof value === "number" ? round(value) : value);
  made.append(...children);
  return made;
}

const path = (d, kind) => el("path", { d: d.replace(/-?\d+\.\d+/g, (n) => round(Number(n))), class: kind });

let pen = null;
export function measure(lines, size = SIZE) {
  pen ??= document.createElement("canvas").getContext("2d");
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return { w: Math.max(0, ...lines.map((line) => pen.measureText(line).width)), h: lines.length * LINE };
}

// Lines of a text around a middle (or beginning at it).
function words(lines, x, y, kind = "", anchor = "middle") {
  const top = y - ((lines.length - 1) * LINE) / 2;
  return el("text", { class: `words ${kind}`, "text-anchor": anchor }, ...lines.map((line, i) => {
    const made = el("tspan", { x, y: top + i * LINE + SIZE * 0.35 });
    made.textContent = line;
    return made;
  }));
}

// -> an SVG, or null for what cannot be drawn in whole.
export function draw(source) {
  const text = source.replace(/^\s*---\n[\s\S]*?\n---\n/, "");
  const flow = readFlow(text);
  if (flow) return drawFlow(flow);
  const sequence = readSequence(text);
  return sequence ? drawSequence(sequence) : null;
}

function sheet(w, h, name, parts) {
  const svg = el("svg", { viewBox: [-PAD, -PAD, w + 2 * PAD, h + 2 * PAD].map(round).join(" "), width: w + 2 * PAD, height: h + 2 * PAD, role: "img", "aria-label": name }, ...parts);
  svg.style.minWidth = `${Math.min(w, (w + 2 * PAD) * 0.7)}px`; // smaller it could not be read
  return svg;
}

// ---------------------------------------------------------------- flow charts

const WIDER = { rhombus: [1.35, 1.5], hexagon: [1, 1], circle: [1, 1], double: [1, 1] };

function boxOf({ shape, lines }) {
  const { w, h } = measure(lines);
  if (shape === "circle" || shape === "double") {
    const side = Math.hypot(w, h) + (shape === "double" ? 26 : 16);
    return { w: Math.max(44, side), h: Math.max(44, side) };
  }
  const [wide, high] = WIDER[shape] ?? [1, 1];
  const more = { hexagon: 22, right: 26, left: 26, trapezoid: 30, funnel: 30, frame: 16, flag: 14, stadium: 12 }[shape] ?? 0;
  return { w: Math.max(48, w * wide + 30 + more), h: h * high + 20 + (shape === "cylinder" ? 14 : shape === "rhombus" ? 12 : 0) };
}

function outline(shape, x, y, w, h) {
  const [l, r, t, b] = [x - w / 2, x + w / 2, y - h / 2, y + h / 2];
  const poly = (...points) => [el("polygon", { points: points.map(([px, py]) => `${round(px)},${round(py)}`).join(" ") })];
  const rect = (radius) => el("rect", { x: l, y: t, width: w, height: h, rx: radius });
  switch (shape) {
    case "round": return [rect(9)];
    case "stadium": return [rect(h / 2)];
    case "circle": return [el("circle", { cx: x, cy: y, r: w / 2 })];
    case "double": return [el("circle", { cx: x, cy: y, r: w / 2 }), el("circle", { cx: x, cy: y, r: w / 2 - 5 })];
    case "frame": return [rect(2), path(`M${l + 8} ${t}V${b}M${r - 8} ${t}V${b}`)];
    case "cylinder": return [path(`M${l} ${t + 7}V${b - 7}A${w / 2} 7 0 0 0 ${r} ${b - 7}V${t + 7}A${w / 2} 7 0 0 0 ${l} ${t + 7}A${w / 2} 7 0 0 0 ${r} ${t + 7}`)];
    case "rhombus": return poly([x, t], [r, y], [x, b], [l, y]);
    case "hexagon": return poly([l + 14, t], [r - 14, t], [r, y], [r - 14, b], [l + 14, b], [l, y]);
    case "right": return poly([l + 14, t], [r, t], [r - 14, b], [l, b]);
    case "left": return poly([l, t], [r - 14, t], [r, b], [l + 14, b]);
    case "trapezoid": return poly([l + 16, t], [r - 16, t], [r, b], [l, b]);
    case "funnel": return poly([l, t], [r, t], [r - 16, b], [l + 16, b]);
    case "flag": return poly([l, t], [r, t], [r, b], [l, b], [l + 12, y]);
    default: return [rect(3)];
  }
}

// How far above its middle a shape ends, `by` beside the middle.
function reach({ shape, w, h }, by) {
  if (shape === "rhombus") return (h / 2) * (1 - Math.min(1, Math.abs(by) / (w / 2)));
  if (shape === "circle" || shape === "double") return Math.sqrt(Math.max(0, (h / 2) ** 2 - by ** 2));
  return h / 2;
}

// The layout runs from top to bottom; other directions are its mirror images.
function turner(direction, w, h) {
  const flat = direction === "LR" || direction === "RL";
  const back = direction === "BT" || direction === "RL";
  return {
    flat,
    at: (x, y) => { const along = back ? h - y : y; return flat ? [along, x] : [x, along]; },
    size: flat ? [h, w] : [w, h],
  };
}

function drawFlow(chart) {
  const flat = /LR|RL/.test(chart.direction);
  const boxes = new Map([...chart.nodes.values()].map((node) => [node.id, { ...boxOf(node), shape: node.shape }]));
  const turned = ({ w, h }) => (flat ? { w: h, h: w } : { w, h });
  const textOf = (edge) => { const { w, h } = measure(edge.lines, 12.5); return { w: w + 12, h: h + 4 }; };
  const found = layOut(chart, (id) => turned(boxes.get(id)), (edge) => turned(textOf(edge)));
  const turn = turner(chart.direction, found.w, found.h);
  const frames = framesOf(chart, found, turn);
  if (!frames) return null;
  const parts = frames.map((each) => each.drawn);
  const beside = new Map();
  for (const link of found.links) {
    const key = [link.from, link.to].sort().join("\n");
    beside.set(key, [...(beside.get(key) ?? []), link]);
  }
  const texts = [];
  for (const links of beside.values()) {
    links.forEach((link, i) => {
      if (link.edge.kind === "hidden") return;
      const off = (i - (links.length - 1) / 2) * 16;
      const [line, text] = edgeOf(link, off, turn, boxes);
      parts.push(line);
      if (text) texts.push(text);
    });
  }
  for (const edge of found.loops) parts.push(...loopOf(edge, found.places.get(edge.from), turn, boxes));
  for (const node of chart.nodes.values()) {
    const cell = found.places.get(node.id);
    const { w, h } = boxes.get(node.id);
    const [x, y] = turn.at(cell.x, cell.y);
    parts.push(el("g", { class: "node" }, ...outline(node.shape, x, y, w, h), words(node.lines, x + (node.shape === "flag" ? 6 : 0), y + (node.shape === "cylinder" ? 5 : 0))));
  }
  const [w, h] = turn.size;
  const [l, t] = [Math.min(0, ...frames.map((f) => f.l)), Math.min(0, ...frames.map((f) => f.t))];
  const [r, b] = [Math.max(w + (found.loops.length ? 60 : 0), ...frames.map((f) => f.r)), Math.max(h, ...frames.map((f) => f.b))];
  return sheet(r - l, b - t, `Flow chart: ${spoken(chart)}`, [el("g", { transform: `translate(${round(-l)} ${round(-t)})` }, ...parts, ...texts)]);
}

const spoken = ({ nodes, edges }) => {
  const name = (id) => nodes.get(id).lines.join(" ");
  const said = edges.slice(0, 40).map((e) => `${name(e.from)}${e.lines.length ? `, ${e.lines.join(" ")},` : ""} to ${name(e.to)}`);
  return (said.length ? said : [...nodes.keys()].map(name)).join("; ");
};

function edgeOf(link, off, turn, boxes) {
  const { edge, back } = link;
  const cells = back ? [...link.cells].reverse() : link.cells;
  const [first, last] = [cells[0], cells.at(-1)];
  const way = back ? -1 : 1; // which way along the ranks it leaves
  const box = (cell) => { const b = boxes.get(cell.id); return turn.flat ? { ...b, w: b.h, h: b.w } : b; };
  const start = [first.x + off, first.y + way * reach(box(first), off)];
  const stop = [last.x + off, last.y - way * reach(box(last), off)];
  const bends = cells.slice(1, -1).flatMap((c) => (c.edge ? [-1, 1].map((side) => [c.x + off, c.y + (side * way * c.h) / 2]) : [[c.x + off, c.y]]));
  const d = curve([start, ...bends, stop], turn.at);
  const line = el("g", { class: `edge ${edge.kind}` }, path(d), ...mark(edge.end, turn.at(...stop), turn.at(stop[0], stop[1] - way)), ...mark(edge.start, turn.at(...start), turn.at(start[0], start[1] + way)));
  const middle = cells.find((c) => c.edge === edge);
  return [line, middle ? label(edge.lines, ...turn.at(middle.x + off, middle.y)) : null];
}

// Through all points, without a turn between two of them; it begins and ends along the ranks.
function curve(points, at) {
  const slope = points.slice(1).map(([x, y], i) => (x - points[i][0]) / (y - points[i][1] || 1));
  const lean = points.map((_, i) => (i && i < slope.length && slope[i - 1] * slope[i] > 0 ? (2 * slope[i - 1] * slope[i]) / (slope[i - 1] + slope[i]) : 0));
  return points.slice(1).reduce((d, [x1, y1], i) => {
    const [x0, y0] = points[i];
    const third = (y1 - y0) / 3;
    return `${d}C${[at(x0 + lean[i] * third, y0 + third), at(x1 - lean[i + 1] * third, y1 - third), at(x1, y1)].map((p) => p.join(" ")).join(" ")}`;
  }, `M${at(...points[0]).join(" ")}`);
}

function label(lines, x, y) {
  const { w, h } = measure(lines, 12.5);
  return el("g", { class: "label" }, el("rect", { x: x - w / 2 - 4, y: y - h / 2, width: w + 8, height: h, rx: 3 }), words(lines, x, y, "small"));
}

// The head at the end of a line that comes from a point.
function mark(kind, [x, y], [fromX, fromY]) {
  if (!kind) return [];
  const angle = (Math.atan2(y - fromY, x - fromX) * 180) / Math.PI;
  const transform = `translate(${round(x)} ${round(y)}) rotate(${round(angle)})`;
  if (kind === "o") return [el("circle", { cx: x - 4 * Math.sign(x - fromX || 0), cy: y - 4 * Math.sign(y - fromY || 0), r: 4, class: "head" })];
  return [el("path", { d: kind === "x" ? "M-9 -4L-1 4M-9 4L-1 -4" : kind === "open" ? "M-8 -4.5L0 0L-8 4.5" : "M0 0L-9 -4.5V4.5Z", transform, class: kind === ">" || kind === "full" ? "head" : "sign" })];
}

function loopOf(edge, cell, turn, boxes) {
  const { w } = boxes.get(edge.from);
  const [x, y] = turn.at(cell.x, cell.y);
  const right = x + w / 2;
  const found = [el("g", { class: `edge ${edge.kind}` }, path(`M${right} ${y - 7}C${right + 34} ${y - 20} ${right + 34} ${y + 20} ${right} ${y + 7}`), ...mark(edge.end, [right, y + 7], [right + 8, y + 9]))];
  return edge.lines.length ? [...found, words(edge.lines, right + 30, y, "small", "start")] : found;
}

// The frames of groups, the outer ones first; null if one would hold a stranger or cut another.
function framesOf({ groups, home }, { places }, turn) {
  const rects = [...places.values()].map((c) => {
    const [[x, y], [w, h]] = [turn.at(c.x, c.y), turn.flat ? [c.h, c.w] : [c.w, c.h]];
    return { path: groupsOf(home.get(c.id)), l: x - w / 2, r: x + w / 2, t: y - h / 2, b: y + h / 2 };
  });
  const meet = (a, b) => a.l < b.r && a.r > b.l && a.t < b.b && a.b > b.t;
  const frames = [];
  for (const group of [...groups].reverse()) { // the inner ones first: the outer ones go round them
    const within = [...rects, ...frames].filter((each) => each.path.includes(group));
    if (!within.length) continue;
    const box = { group, path: groupsOf(group.parent), l: Math.min(...within.map((e) => e.l)) - 12, r: Math.max(...within.map((e) => e.r)) + 12, t: Math.min(...within.map((e) => e.t)) - 26, b: Math.max(...within.map((e) => e.b)) + 10 };
    const more = (measure(group.lines, 12.5).w + 16 - (box.r - box.l)) / 2;
    if (more > 0) Object.assign(box, { l: box.l - more, r: box.r + more });
    if ([...rects, ...frames].some((each) => !each.path.includes(group) && meet(each, box))) return null;
    frames.push(box);
  }
  return frames.reverse().map(({ group, l, r, t, b }) => ({ l, r, t, b, drawn: el("g", { class: "group" }, el("rect", { x: l, y: t, width: r - l, height: b - t, rx: 6 }), words([group.lines.join(" ")], l + 8, t + 12, "small", "start")) }));
}

// ---------------------------------------------------------------- sequence diagrams

function drawSequence(read) {
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
  const wide = measure([word], 12.5).w + 14;
  const cut = (part) => [path(`M${l} ${part.y}H${r}`), words([`[${part.text}]`], l + 10, part.y + 11, "small", "start")];
  return [el("g", { class: "frame" }, rect, path(`M${l} ${y + 19}H${l + wide - 6}L${l + wide} ${y + 13}V${y}`), words([word], l + 6, y + 10, "small kind", "start"), ...(text ? [words([`[${text}]`], l + wide + 8, y + 10, "small", "start")] : []), ...parts.flatMap(cut))];
}
