// State diagrams as text. Owns: reading Mermaid's stateDiagram into nodes, edges and groups as flowtext.js does. Knows nothing of layout or drawing.
import { linesOf, tooMuch } from "./flowtext.js";

const ID = String.raw`(\[\*\]|[\p{L}\p{N}_.-]+?)(?:\s*:::[\w-]+)?`;
const MOVE = new RegExp(String.raw`^${ID}\s*-->\s*${ID}\s*(?::\s*(.*))?$`, "u");
const SAID = /^([\p{L}\p{N}_.-]+)\s*:\s*(.+)$/u;
const NAMED = /^state\s+(?:"([^"]*)"\s+as\s+)?([\p{L}\p{N}_.-]+)\s*(?:<<(fork|join|choice)>>|\[\[(fork|join|choice)\]\])?\s*(\{)?\s*(\})?$/u;
const NOTE = /^note\s+(?:left|right)\s+of\s+([\p{L}\p{N}_.-]+)\s*(?::\s*(.+))?$/iu;
const IGNORED = /^(?:classDef|class|style|click|hide empty description|scale|accTitle|accDescr|title)\b/;

// What it cannot read in whole it does not read at all (null); regions that run side by side are such a thing.
export function readStates(source) {
  const chart = { nodes: new Map(), edges: [], groups: [], home: new Map(), direction: "TB" };
  const [first, ...lines] = source.replace(/%%[^\n]*/g, "").split("\n").map((line) => line.trim().replace(/;$/, "")).filter(Boolean);
  if (!/^stateDiagram(?:-v2)?$/.test(first ?? "")) return null;
  const open = [];
  const groups = new Map();
  const node = (id, shape = "round", text = id) => {
    if (groups.has(id) || chart.nodes.has(id)) return id;
    chart.nodes.set(id, { id, shape, lines: linesOf(text) });
    if (open.length) chart.home.set(id, open.at(-1));
    return id;
  };
  const at = (id, shape) => (id === "[*]" ? node(`${open.at(-1)?.id ?? ""}\n${shape}`, shape, "") : node(id));
  let note = null;
  const noted = (id, text) => {
    const made = node(`${id}\nnote ${chart.edges.length}`, "note", text);
    chart.edges.push({ kind: "dotted", start: "", end: "", span: 1, lines: [], from: node(id), to: made });
  };
  for (const line of lines) {
    if (note) {
      if (/^end note$/i.test(line)) {
        noted(note.of, note.text.join("\n"));
        note = null;
      } else note.text.push(line);
      continue;
    }
    const [move, said, named, about] = [MOVE, SAID, NAMED, NOTE].map((each) => each.exec(line));
    const direction = /^direction\s+(TB|TD|BT|LR|RL)$/.exec(line);
    if (direction) chart.direction = open.length ? chart.direction : direction[1].replace("TD", "TB");
    else if (about) {
      if (about[2]) noted(about[1], about[2]);
      else note = { of: about[1], text: [] };
    } else if (named) {
      const [, text, id, kind, other, opens, closes] = named;
      if (opens) {
        if (groups.has(id)) return null;
        const made = { id, lines: linesOf(text ?? chart.nodes.get(id)?.lines.join(" ") ?? id), parent: open.at(-1) ?? null };
        if (chart.home.has(id)) made.parent = chart.home.get(id);
        chart.nodes.delete(id); // it was named before it was opened
        chart.home.delete(id);
        groups.set(id, made);
        chart.groups.push(made);
        if (!closes) open.push(made);
      } else if (groups.has(id)) groups.get(id).lines = linesOf(text ?? id);
      else Object.assign(chart.nodes.get(node(id)), kind || other ? { shape: (kind ?? other) === "choice" ? "choice" : "bar", lines: [] } : { lines: linesOf(text ?? id) });
    } else if (line === "}") {
      if (!open.pop()) return null;
    } else if (move) chart.edges.push({ kind: "solid", start: "", end: ">", span: 1, from: at(move[1], "start"), to: at(move[2], "stop"), lines: move[3]?.trim() ? linesOf(move[3]) : [] });
    else if (said) {
      const [, id, text] = said;
      const one = groups.get(id) ?? chart.nodes.get(node(id));
      if (one.told) one.rows = [[...(one.rows?.[0] ?? []), ...linesOf(text)]];
      else Object.assign(one, { told: true, lines: linesOf(text) });
    } else if (/^[\p{L}\p{N}_.-]+(?::::[\w-]+)?$/u.test(line) && line !== "--") node(line.replace(/:::.*/, ""));
    else if (!IGNORED.test(line)) return null;
    if (tooMuch(chart)) return null;
  }
  return open.length || note || !chart.nodes.size ? null : chart;
}
