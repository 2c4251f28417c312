// Flow charts as text. Owns: reading Mermaid's flowchart into nodes, edges and groups. Knows nothing of layout or drawing.
//
// {nodes: id -> {shape, lines}, edges, groups, home: id -> its innermost group, direction}. What it cannot read in whole it does not read at all (null): half a diagram would be a wrong one.
const MOST = 100; // nodes; more are no picture
const WIDEST = 36; // characters of a line
const ID = /^[\p{L}\p{N}_](?:[\p{L}\p{N}_.]|-(?![-.>=ox]))*/u;
// The longer marks first: what begins a shape, what ends it, and what it is.
const SHAPES = [["(((", ")))", "double"], ["((", "))", "circle"], ["([", "])", "stadium"], ["[[", "]]", "frame"], ["[(", ")]", "cylinder"], ["{{", "}}", "hexagon"], ["[/", "/]", "right"], ["[\\", "\\]", "left"], ["[/", "\\]", "trapezoid"], ["[\\", "/]", "funnel"], ["[", "]", "rect"], ["(", ")", "round"], ["{", "}", "rhombus"], [">", "]", "flag"]];
const PLAIN = /^\s*([<ox](?=[-=]))?(-{2,}[>ox]|-{3,}|={2,}[>ox]|={3,}|-\.+-[>ox]?|~{3,})(?:\|("[^"]*"|[^|]*)\|)?\s*/;
const NAMED = /^\s*([<ox](?=[-=]))?(?:--\s*([^-=.>|ox\s].*?|[ox]\S.*?)\s*(-{2,}[>ox]|-{3,})|==\s*([^=>|\s].*?)\s*(={2,}[>ox]|={3,})|-\.\s*([^-.>\s].*?)\s*(\.+-[>ox]?))\s*/;
const IGNORED = /^(?:classDef|class|style|linkStyle|click|accTitle|accDescr|direction)\b/;

export const tooMuch = ({ nodes, edges, groups }) => nodes.size > MOST || edges.length > 1.5 * MOST || groups.length > MOST / 2;

// Text of a node or an edge, as lines.
export function linesOf(text) {
  const bare = text.trim().replace(/^"([\s\S]*)"$/, "$1").replace(/^`([\s\S]*)`$/, "$1");
  const said = bare.replace(/#(\d+);/g, (_, n) => String.fromCodePoint(Math.min(n, 0x10ffff))).replace(/#quot;|&quot;/g, '"').replace(/&lt;|#lt;/g, "<").replace(/&gt;|#gt;/g, ">").replace(/&amp;|#amp;/g, "&");
  return said.split(/<br\s*\/?>|\\n|\n/).flatMap((line) => wrapped(line.replace(/<\/?[bi]>|\*\*|\bfa[bsr]?:fa-[\w-]+/g, "").trim()));
}

function wrapped(line) {
  if (line.length <= WIDEST) return [line];
  const lines = [""];
  for (const word of line.split(/\s+/)) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= WIDEST) lines.push(word);
    else lines.push(`${lines.pop()} ${word}`.trim());
  }
  return lines;
}

export function readFlow(source) {
  const chart = { nodes: new Map(), edges: [], groups: [], home: new Map(), direction: "TB" };
  const open = []; // groups that the next lines belong to
  const [first, ...lines] = source.replace(/%%[^\n]*/g, "").split("\n").map((line) => line.trim()).filter(Boolean);
  const head = /^(?:graph|flowchart)(?:-elk)?(?:\s+(TD|TB|BT|LR|RL)\b)?\s*(?:;\s*(.*))?$/.exec(first ?? "");
  if (!head) return null;
  chart.direction = (head[1] ?? "TB").replace("TD", "TB");
  for (const line of [head[2] ?? "", ...lines].flatMap(statements)) {
    if (!line || IGNORED.test(line)) continue;
    const group = /^subgraph\s*(.*)$/.exec(line);
    if (group) {
      const named = /^([^[\s]+)\s*\[(.*)\]$/.exec(group[1]);
      const made = { id: named?.[1] ?? group[1], lines: linesOf(named?.[2] ?? group[1]), parent: open.at(-1) ?? null };
      chart.groups.push(made);
      open.push(made);
    } else if (line === "end") {
      if (!open.pop()) return null;
    } else if (!statement(chart, line, open)) return null;
    if (tooMuch(chart)) return null;
  }
  for (const { id, parent } of chart.groups) { // whoever names a group means it
    if (chart.home.has(id) && chart.home.get(id) !== parent) return null;
    chart.nodes.delete(id);
    chart.home.delete(id);
  }
  return open.length || !chart.nodes.size ? null : chart;
}

// Semicolons end statements, except within quotes and brackets.
const statements = (line) => (/["[({|]/.test(line) ? [line.replace(/;$/, "")] : line.split(";")).map((each) => each.trim());

function statement(chart, line, open) {
  let rest = line;
  let before = null;
  let link = null;
  for (;;) {
    const here = [];
    do {
      const read = node(chart, rest, open);
      if (!read) return false;
      here.push(read.id);
      rest = read.rest;
      const more = /^\s*&\s*/.exec(rest);
      if (!more) break;
      rest = rest.slice(more[0].length);
    } while (rest);
    if (link) for (const from of before) for (const to of here) chart.edges.push({ ...link, from, to });
    if (!rest.trim()) return true;
    const read = edge(rest);
    if (!read) return false;
    [link, rest] = read;
    before = here;
  }
}

function node(chart, source, open) {
  const id = ID.exec(source)?.[0];
  if (!id) return null;
  let rest = source.slice(id.length);
  const known = chart.nodes.get(id);
  const made = known ?? { id, shape: "rect", lines: [id] };
  if (!known) chart.nodes.set(id, made);
  if (open.length && !chart.home.has(id)) chart.home.set(id, open.at(-1)); // the first group that names a node has it
  for (const [start, end, shape] of SHAPES) {
    if (!rest.startsWith(start)) continue;
    const quoted = new RegExp(`^\\s*("[^"]*")\\s*${end.replace(/[\\()[\]{}|/]/g, "\\$&")}`).exec(rest.slice(start.length));
    const at = quoted ? -1 : rest.indexOf(end, start.length);
    if (!quoted && at < 0) continue;
    const text = quoted ? quoted[1] : rest.slice(start.length, at);
    if (!quoted && /^[[({]/.test(text)) continue;
    Object.assign(made, { shape, lines: linesOf(text) });
    rest = rest.slice(quoted ? start.length + quoted[0].length : at + end.length);
    break;
  }
  rest = rest.replace(/^:::[\w-]+/, "");
  return /^(?:[[({@]|>\S)/.test(rest) ? null : { id, rest };
}

// -> [what it looks like, what follows].
function edge(source) {
  const plain = PLAIN.exec(source);
  const named = plain ? null : NAMED.exec(source);
  if (!plain && !named) return null;
  const [whole, start = ""] = plain ?? named;
  const line = plain ? plain[2] : (named[3] ?? named[5] ?? named[7]);
  const text = plain ? plain[3] : (named[2] ?? named[4] ?? named[6]);
  const end = /[>ox]$/.exec(line)?.[0] ?? "";
  const kind = line.includes("=") ? "thick" : line.includes(".") ? "dotted" : line.startsWith("~") ? "hidden" : "solid";
  const span = kind === "dotted" ? line.split(".").length - 1 : line.length - 2; // a longer line goes over more ranks
  return [{ kind, start: start === "<" ? ">" : start, end, span: Math.max(1, Math.min(5, span)), lines: text?.trim() ? linesOf(text) : [] }, source.slice(whole.length)];
}
