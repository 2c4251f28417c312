// Class and entity diagrams as text. Owns: reading Mermaid's classDiagram and erDiagram into nodes of rows and edges. Knows nothing of layout or drawing.
import { linesOf, tooMuch } from "./flowtext.js";

const NAME = "(`[^`]+`|[\\p{L}\\p{N}_.-]+?(?:~[^~]+(?:~[^~]*~)?~)?)";
const RELATION = new RegExp(String.raw`^${NAME}\s*(?:"([^"]*)"\s*)?(<\|(?=--|\.\.)|\s\(\)|[*<](?=--|\.\.)|\so(?=--|\.\.))?\s*(--|\.\.)(\|>|[*>]|o(?=\s)|\(\)\s)?\s*(?:"([^"]*)"\s*)?${NAME}\s*(?::\s*(.*))?$`, "u");
const HEADS = { "<|": "kind", "|>": "kind", "*": "part", o: "share", "<": "open", ">": "open", "()": "ring" };
const CLASS = new RegExp(String.raw`^class\s+${NAME}\s*(?:\["([^"]*)"\])?\s*(?::::[\w-]+)?\s*(?:<<([^>]+)>>)?\s*(\{)?\s*(\})?$`, "u");
const MEMBER = new RegExp(String.raw`^${NAME}\s*:\s*(.+)$`, "u");
const IGNORED = /^(?:click|link|callback|style|cssClass|classDef|title|accTitle|accDescr|classDef)\b/;

const started = () => ({ nodes: new Map(), edges: [], groups: [], home: new Map(), direction: "TB" });
const linesIn = (source) => source.replace(/%%[^\n]*/g, "").split("\n").map((line) => line.trim().replace(/;$/, "")).filter(Boolean);
const turn = (chart, line) => {
  const found = /^direction\s+(TB|TD|BT|LR|RL)$/.exec(line);
  if (found) chart.direction = found[1].replace("TD", "TB");
  return found;
};
const bare = (name) => name.replace(/^`|`$/g, "");
const generic = (text) => text.replace(/~([^~]*)~([^~]*)~~/g, "<$1<$2>>").replace(/~([^~]+)~/g, "<$1>");

// What it cannot read in whole it does not read at all (null).
export function readClasses(source) {
  const chart = started();
  const [first, ...lines] = linesIn(source);
  if (!/^classDiagram(?:-v2)?$/.test(first ?? "")) return null;
  let [inside, space, notes] = [null, null, 0];
  const node = (written) => {
    const id = bare(written).replace(/~.*/, "");
    if (!chart.nodes.has(id)) chart.nodes.set(id, { id, shape: "rect", lines: [generic(bare(written))], rows: [[], []] });
    if (space && !chart.home.has(id)) chart.home.set(id, space);
    return chart.nodes.get(id);
  };
  const member = (one, text) => {
    const kind = /^<<(.+)>>$/.exec(text);
    if (kind) one.lines = [`«${kind[1].trim()}»`, ...one.lines];
    else one.rows[/\(/.test(text) ? 1 : 0].push(...linesOf(generic(text).replace(/(?<=\))([*$])|([*$])$/, (_, after, last) => ((after ?? last) === "*" ? " {abstract}" : " {static}"))));
  };
  for (const line of lines) {
    const [made, relation, said] = [CLASS, RELATION, MEMBER].map((each) => each.exec(line));
    const group = /^namespace\s+([\p{L}\p{N}_.-]+)\s*\{$/u.exec(line);
    const kind = /^<<([^>]+)>>\s+(\S+)$/.exec(line);
    const note = /^note\s+(?:for\s+(\S+)\s+)?"([^"]*)"$/.exec(line);
    if (inside) {
      if (line === "}") inside = null;
      else member(inside, line);
    } else if (turn(chart, line)) continue;
    else if (made) {
      const one = node(made[1]);
      if (made[2]) one.lines = linesOf(made[2]);
      if (made[3]) member(one, `<<${made[3]}>>`);
      if (made[4] && !made[5]) inside = one;
    } else if (group) {
      if (space) return null;
      space = { id: `\n${group[1]}`, lines: [group[1]], parent: null };
      chart.groups.push(space);
    } else if (line === "}") {
      if (!space) return null;
      space = null;
    } else if (kind) member(node(kind[2]), `<<${kind[1]}>>`);
    else if (note) {
      const id = `\n${(notes += 1)}`;
      chart.nodes.set(id, { id, shape: "note", lines: linesOf(note[2]) });
      if (note[1]) chart.edges.push({ kind: "dotted", start: "", end: "", span: 1, lines: [], from: node(note[1]).id, to: id });
    } else if (relation) {
      const [, from, near, start, line, end, far, to, text] = relation;
      const head = (sign) => HEADS[sign?.trim()] ?? "";
      chart.edges.push({ kind: line === "--" ? "solid" : "dotted", start: head(start), end: head(end), near, far, span: 1, from: node(from).id, to: node(to).id, lines: text?.trim() ? linesOf(text) : [] });
    } else if (said) member(node(said[1]), said[2]);
    else if (!IGNORED.test(line)) return null;
    if (tooMuch(chart)) return null;
  }
  return inside || space || !chart.nodes.size ? null : chart;
}

const ENTITY = String.raw`("[^"]+"|[\p{L}\p{N}_-]+)`;
const BOND = new RegExp(String.raw`^${ENTITY}\s+(\|o|\|\||\}o|\}\|)(--|\.\.)(o\||\|\||o\{|\|\{)\s+${ENTITY}\s*(?::\s*(.*))?$`, "u");
const OPENED = new RegExp(String.raw`^${ENTITY}\s*(?:\[\s*("[^"]+"|[^\]]+)\s*\])?\s*(\{)?\s*(\})?$`, "u");
const FEET = { "|o": "maybe", "o|": "maybe", "||": "one", "}o": "many", "o{": "many", "}|": "some", "|{": "some" };
const ATTRIBUTE = /^[^\s"{}]+\s+[^\s"{}]+(?:\s+(?:PK|FK|UK)(?:\s*,\s*(?:PK|FK|UK))*)?(?:\s+"[^"]*")?$/;

export function readEntities(source) {
  const chart = started();
  const [first, ...lines] = linesIn(source);
  if (first !== "erDiagram") return null;
  const node = (written) => {
    const id = written.replace(/^"|"$/g, "");
    if (!chart.nodes.has(id)) chart.nodes.set(id, { id, shape: "rect", lines: [id], rows: [] });
    return chart.nodes.get(id);
  };
  let inside = null;
  for (const line of lines) {
    const [bond, opened] = [BOND.exec(line), OPENED.exec(line)];
    if (inside) {
      if (line === "}") inside = null;
      else if (!ATTRIBUTE.test(line)) return null;
      else inside.rows = [[...(inside.rows[0] ?? []), ...linesOf(line.replace(/\s+"([^"]*)"$/, " – $1"))]];
    } else if (turn(chart, line) || IGNORED.test(line)) continue;
    else if (bond) {
      const [, from, start, line, end, to, text] = bond;
      chart.edges.push({ kind: line === "--" ? "solid" : "dotted", start: FEET[start], end: FEET[end], span: 1, from: node(from).id, to: node(to).id, lines: text?.trim() ? linesOf(text) : [] });
    } else if (opened) {
      const one = node(opened[1]);
      if (opened[2]) one.lines = linesOf(opened[2]);
      if (opened[3] && !opened[4]) inside = one;
    } else return null;
    if (tooMuch(chart)) return null;
  }
  return inside || !chart.nodes.size ? null : chart;
}
