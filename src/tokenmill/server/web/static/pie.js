// Pie charts. Owns: reading Mermaid's pie, and its slices as SVG.
import { el, measure, path, round, sheet, words } from "./pen.js";

const RADIUS = 105;
const MOST = 24; // slices

// What it cannot read in whole it does not read at all (null).
export function readPie(source) {
  const [first, ...lines] = source.replace(/%%[^\n]*/g, "").split("\n").map((line) => line.trim()).filter(Boolean);
  const head = /^pie\b\s*(showData\b)?\s*(?:title\s+(.+))?$/.exec(first ?? "");
  if (!head) return null;
  const found = { title: head[2] ?? "", data: Boolean(head[1]), slices: [] };
  for (const line of lines) {
    const title = /^title\s+(.+)$/.exec(line);
    const slice = /^(?:"([^"]*)"|'([^']*)')\s*:\s*(\d+(?:\.\d+)?)$/.exec(line);
    if (title) found.title = title[1];
    else if (line === "showData") found.data = true;
    else if (slice) found.slices.push({ name: slice[1] ?? slice[2], size: Number(slice[3]) });
    else if (!/^acc(?:Title|Descr)\b/.test(line)) return null;
  }
  const sum = found.slices.reduce((total, { size }) => total + size, 0);
  return sum > 0 && sum < Infinity && found.slices.length <= MOST ? found : null;
}

export function drawPie(source) {
  const read = readPie(source);
  if (!read) return null;
  const sum = read.slices.reduce((total, { size }) => total + size, 0);
  const share = (size) => `${round((size / sum) * 100)} %`;
  const top = read.title ? 30 : 0;
  const [x, y] = [RADIUS, top + RADIUS];
  const at = (part, radius) => [x + radius * Math.sin(part * 2 * Math.PI), y - radius * Math.cos(part * 2 * Math.PI)];
  const parts = read.title ? [words([read.title], 0, 8, "kind", "start")] : [];
  const texts = [];
  const rows = read.slices.map(({ name, size }) => `${name}${read.data ? `: ${size}` : ""} (${share(size)})`);
  const narrow = innerWidth < 600; // then the names stand below
  const [left, first] = narrow ? [0, top + 2 * RADIUS + 26] : [2 * RADIUS + 26, y - (rows.length * 24) / 2 + 12];
  let from = 0;
  read.slices.forEach(({ size }, i) => {
    const to = from + size / sum;
    const coloured = (made) => { made.style.setProperty("--hue", (175 + i * 137.5) % 360); made.setAttribute("class", "slice"); return made; };
    const [[ax, ay], [bx, by]] = [at(from, RADIUS), at(to, RADIUS)];
    if (size === sum) parts.push(coloured(el("circle", { cx: x, cy: y, r: RADIUS })));
    else if (size) parts.push(coloured(path(`M${x} ${y}L${ax} ${ay}A${RADIUS} ${RADIUS} 0 ${to - from > 0.5 ? 1 : 0} 1 ${bx} ${by}Z`)));
    const [mx, my] = at((from + to) / 2, size === sum ? 0 : RADIUS * 0.68);
    if (to - from > 0.06) texts.push(words([share(size)], mx, my, "small"));
    parts.push(coloured(el("rect", { x: left, y: first + i * 24 - 7, width: 14, height: 14, rx: 3 })), words([rows[i]], left + 22, first + i * 24, "", "start"));
    from = to;
  });
  const w = Math.max(2 * RADIUS, left + 22 + measure(rows).w, measure([read.title]).w * 1.1);
  const low = Math.min(0, first - 14 - top);
  const whole = el("g", { transform: `translate(0 ${round(-low)})` }, ...parts, ...texts);
  return sheet(w, top + Math.max(2 * RADIUS, first + rows.length * 24 - 12 - top - low), `Pie chart${read.title ? ` ${read.title}` : ""}: ${rows.join("; ")}`, [whole]);
}
