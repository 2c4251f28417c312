// Graphs as pictures. Owns: nodes, edges and frames of flow charts, states, classes and entities as SVG. Knows nothing of Mermaid's text.
import { el, label, LINE, mark, measure, path, round, sheet, SMALL, words } from "./pen.js";
import { groupsOf, layOut } from "./flow.js";

const WIDER = { rhombus: [1.35, 1.5], hexagon: [1, 1], circle: [1, 1], double: [1, 1] };

const filled = (rows) => rows.filter((each) => each.length);
const DOTS = { start: 15, stop: 19, choice: 30 }; // shapes without words

function boxOf({ shape, lines, rows }, flat) {
  if (DOTS[shape]) return { w: DOTS[shape], h: DOTS[shape] };
  if (shape === "bar") return flat ? { w: 7, h: 70 } : { w: 70, h: 7 };
  const { w, h } = measure(lines);
  if (rows) {
    const inner = filled(rows).map((each) => measure(each, SMALL));
    return { w: Math.max(80, w * 1.08 + 24, ...inner.map((each) => each.w + 24)), h: h + 14 + inner.reduce((sum, each) => sum + each.h + 10, 0) };
  }
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
    case "start": return [el("circle", { cx: x, cy: y, r: w / 2, class: "dot" })];
    case "stop": return [el("circle", { cx: x, cy: y, r: w / 2, class: "ring" }), el("circle", { cx: x, cy: y, r: w / 2 - 5, class: "dot" })];
    case "bar": return [el("rect", { x: l, y: t, width: w, height: h, rx: 2, class: "dot" })];
    case "choice":
    case "rhombus": return poly([x, t], [r, y], [x, b], [l, y]);
    case "round": return [rect(9)];
    case "stadium": return [rect(h / 2)];
    case "circle": return [el("circle", { cx: x, cy: y, r: w / 2 })];
    case "double": return [el("circle", { cx: x, cy: y, r: w / 2 }), el("circle", { cx: x, cy: y, r: w / 2 - 5 })];
    case "frame": return [rect(2), path(`M${l + 8} ${t}V${b}M${r - 8} ${t}V${b}`)];
    case "cylinder": return [path(`M${l} ${t + 7}V${b - 7}A${w / 2} 7 0 0 0 ${r} ${b - 7}V${t + 7}A${w / 2} 7 0 0 0 ${l} ${t + 7}A${w / 2} 7 0 0 0 ${r} ${t + 7}`)];
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
  if (shape === "rhombus" || shape === "choice") return (h / 2) * (1 - Math.min(1, Math.abs(by) / (w / 2)));
  if (/^(?:circle|double|start|stop)$/.test(shape)) return Math.sqrt(Math.max(0, (h / 2) ** 2 - by ** 2));
  return h / 2;
}

// The layout runs from top to bottom; other directions are its mirror images.
function turner(direction, w, h) {
  const flat = direction === "LR" || direction === "RL";
  const back = direction === "BT" || direction === "RL";
  return {
    flat,
    // Where a frame ends towards the beginning (-1) or the end (1) of the layout.
    border: (frame, out) => { const low = out < 0 !== back; const v = flat ? frame[low ? "l" : "r"] : frame[low ? "t" : "b"]; return back ? h - v : v; },
    at: (x, y) => { const along = back ? h - y : y; return flat ? [along, x] : [x, along]; },
    size: flat ? [h, w] : [w, h],
  };
}

// -> an SVG, or null where frames would cut each other. A node of `rows` has parts below its name.
export function drawGraph(name, chart) {
  const flat = /LR|RL/.test(chart.direction);
  const boxes = new Map([...chart.nodes.values()].map((node) => [node.id, { ...boxOf(node, flat), shape: node.shape }]));
  const turned = ({ w, h }) => (flat ? { w: h, h: w } : { w, h });
  const textOf = (edge) => { const { w, h } = measure(edge.lines, SMALL); return { w: w + 12, h: h + 4 }; };
  const found = layOut(chart, (id) => turned(boxes.get(id)), (edge) => turned(textOf(edge)));
  if (!found) return null;
  const turn = turner(chart.direction, found.w, found.h);
  const frames = framesOf(chart, found, turn);
  if (!frames) return null;
  for (const frame of frames) boxes.set(frame.group.id, frame);
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
      texts.push(...text);
    });
  }
  for (const edge of found.loops) parts.push(...loopOf(edge, found.places.get(edge.from), turn, boxes));
  for (const node of chart.nodes.values()) {
    const cell = found.places.get(node.id);
    const { w, h } = boxes.get(node.id);
    const [x, y] = turn.at(cell.x, cell.y);
    parts.push(el("g", { class: node.shape === "note" ? "node note" : "node" }, ...outline(node.shape, x, y, w, h), ...(node.rows ? rowsOf(node, x, y, w, h) : [words(node.lines, x + (node.shape === "flag" ? 6 : 0), y + (node.shape === "cylinder" ? 5 : 0))])));
  }
  const [w, h] = turn.size;
  const [l, t] = [Math.min(0, ...frames.map((f) => f.l)), Math.min(0, ...frames.map((f) => f.t))];
  const [r, b] = [Math.max(w + (found.loops.length ? 60 : 0), ...frames.map((f) => f.r)), Math.max(h, ...frames.map((f) => f.b))];
  return sheet(r - l, b - t, `${name}: ${spoken(chart)}`, [el("g", { transform: `translate(${round(-l)} ${round(-t)})` }, ...parts, ...texts)]);
}

// A name, and below it parts between lines: what a class or an entity has.
function rowsOf({ lines, rows }, x, y, w, h) {
  const left = x - w / 2;
  let top = y - h / 2 + 7 + lines.length * LINE + 7;
  const parts = [words(lines, x, top - 7 - (lines.length * LINE) / 2, "kind")];
  for (const each of filled(rows)) {
    parts.push(path(`M${left} ${top}H${left + w}`), words(each, left + 12, top + 5 + (each.length * LINE) / 2, "small", "start"));
    top += each.length * LINE + 10;
  }
  return parts;
}

const SAID = { start: "the start", stop: "the end", bar: "all at once", choice: "a choice" };
const spoken = ({ nodes, edges, groups }) => {
  const name = (id) => SAID[nodes.get(id)?.shape] ?? (nodes.get(id) ?? groups.find((each) => each.id === id)).lines.join(" ");
  const said = edges.slice(0, 40).map((e) => `${name(e.from)}${e.lines.length ? `, ${e.lines.join(" ")},` : ""} to ${name(e.to)}`);
  return (said.length ? said : [...nodes.keys()].map(name)).join("; ");
};

function edgeOf(link, off, turn, boxes) {
  const { edge, back } = link;
  const cells = back ? [...link.cells].reverse() : link.cells;
  const [first, last] = [cells[0], cells.at(-1)];
  const way = back ? -1 : 1; // which way along the ranks it leaves
  const box = (cell) => { const b = boxes.get(cell.id); return turn.flat ? { ...b, w: b.h, h: b.w } : b; };
  const end = (cell, out) => (cell.anchor ? turn.border(boxes.get(cell.anchor), out) : cell.y + out * reach(box(cell), off));
  const start = [first.x + off, end(first, way)];
  const stop = [last.x + off, end(last, -way)];
  const bends = cells.slice(1, -1).flatMap((c) => (c.edge ? [-1, 1].map((side) => [c.x + off, c.y + (side * way * c.h) / 2]) : [[c.x + off, c.y]]));
  const d = curve([start, ...bends, stop], turn.at);
  const line = el("g", { class: `edge ${edge.kind}` }, path(d), ...mark(edge.end, turn.at(...stop), turn.at(stop[0], stop[1] - way)), ...mark(edge.start, turn.at(...start), turn.at(start[0], start[1] + way)));
  const middle = cells.find((c) => c.edge === edge);
  const beside = [[edge.near, start, bends[0] ?? stop], [edge.far, stop, bends.at(-1) ?? start]].filter(([text]) => text).map(([text, ...ends]) => counted(text, ...ends, turn));
  return [line, [...(middle ? [label(edge.lines, ...turn.at(middle.x + off, middle.y))] : []), ...beside]];
}

// How many, beside the end of a line.
function counted(text, [x0, y0], [x1, y1], { at, flat }) {
  const part = Math.min(0.5, (flat ? 22 : 13) / Math.abs(y1 - y0 || 1));
  const [x, y] = at(x0 + (x1 - x0) * part * part * (3 - 2 * part), y0 + (y1 - y0) * part);
  const side = x1 < x0 ? -1 : 1;
  return flat ? words([text], x, y + side * 12, "small") : words([text], x + side * 10, y, "small", side < 0 ? "end" : "start");
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

function loopOf(edge, cell, turn, boxes) {
  const { w } = boxes.get(edge.from);
  const [x, y] = turn.at(cell.x, cell.y);
  const right = x + w / 2;
  const found = [el("g", { class: `edge ${edge.kind}` }, path(`M${right} ${y - 7}C${right + 34} ${y - 20} ${right + 34} ${y + 20} ${right} ${y + 7}`), ...mark(edge.end, [right, y + 7], [right + 8, y + 9]))];
  return edge.lines.length ? [...found, words(edge.lines, right + 30, y, "small", "start")] : found;
}

// The frames of groups, the outer ones first; null if one would hold a stranger or cut another.
function framesOf({ groups }, { places, links }, turn) {
  const texts = links.flatMap((link) => link.cells.filter((c) => c.edge));
  const rects = [...[...places.values()].filter((c) => !c.anchor), ...texts].map((c) => {
    const [[x, y], [w, h]] = [turn.at(c.x, c.y), turn.flat ? [c.h, c.w] : [c.w, c.h]];
    return { path: c.path, text: c.edge, l: x - w / 2, r: x + w / 2, t: y - h / 2, b: y + h / 2 };
  });
  const meet = (a, b) => a.l < b.r && a.r > b.l && a.t < b.b && a.b > b.t;
  const frames = [];
  for (const group of [...groups].reverse()) { // the inner ones first: the outer ones go round them
    const within = [...rects, ...frames].filter((each) => each.path.includes(group));
    if (!within.length) continue;
    const box = { group, path: groupsOf(group.parent), l: Math.min(...within.map((e) => e.l)) - 12, r: Math.max(...within.map((e) => e.r)) + 12, t: Math.min(...within.map((e) => e.t)) - 26, b: Math.max(...within.map((e) => e.b)) + 10 };
    const more = (measure(group.lines, SMALL).w + 16 - (box.r - box.l)) / 2;
    if (more > 0) Object.assign(box, { l: box.l - more, r: box.r + more });
    if ([...rects, ...frames].some((each) => !each.text && !each.path.includes(group) && meet(each, box))) return null;
    frames.push(box);
  }
  return frames.reverse().map(({ group, l, r, t, b }) => ({ group, l, r, t, b, drawn: el("g", { class: "group" }, el("rect", { x: l, y: t, width: r - l, height: b - t, rx: 6 }), words([group.lines.join(" ")], l + 8, t + 12, "small", "start")) }));
}
