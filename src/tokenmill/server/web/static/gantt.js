// Gantt charts. Owns: reading Mermaid's gantt, and its bars over time as SVG.
import { el, measure, sheet, words } from "./pen.js";

const MOST = 80; // tasks
const ROW = 26;
const WIDE = 460; // of the time
const HOUR = 3_600_000;
const DAY = 24 * HOUR;
const LONGEST = 5000 * DAY; // of a task whose weekends are counted
const UNITS = { ms: 1, s: 1000, m: 60_000, h: HOUR, d: DAY, w: 7 * DAY };
const FORMATS = { "YYYY-MM-DD": /^(\d{4})-(\d\d)-(\d\d)$/, "YYYY-MM-DD HH:mm": /^(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d)$/, "HH:mm": /^(\d\d):(\d\d)$/ };
const IGNORED = /^(?:axisFormat|tickInterval|todayMarker|weekday|accTitle|accDescr|click)\b/;

function timeOf(text, form) {
  const found = FORMATS[form].exec(text)?.slice(1).map(Number);
  if (!found) return null;
  const [year, month, day, hours = 0, minutes = 0] = form === "HH:mm" ? [2000, 1, 1, ...found] : found;
  return month > 12 || day > 31 || hours > 24 || minutes > 59 ? null : Date.UTC(year, month - 1, day, hours, minutes);
}

// [{name, kinds, from, to, section}] with its title. What it cannot read in whole it does not read at all (null): other days
// than weekends that are left out are such a thing.
export function readGantt(source) {
  const [first, ...lines] = source.replace(/%%[^\n]*/g, "").split("\n").map((line) => line.trim()).filter(Boolean);
  if (first !== "gantt") return null;
  const found = { title: "", tasks: [], form: "YYYY-MM-DD", rests: false };
  const known = new Map();
  let section = "";
  for (const line of lines) {
    const said = /^(title|dateFormat|section)\s+(.+)$/.exec(line);
    if (said?.[1] === "title") found.title = said[2];
    else if (said?.[1] === "dateFormat") found.form = said[2].trim();
    else if (said) section = said[2];
    else if (line === "excludes weekends") found.rests = true;
    else if (!IGNORED.test(line)) {
      const task = Object.hasOwn(FORMATS, found.form) && taskOf(line, found, known);
      if (!task || found.tasks.length >= MOST) return null;
      found.tasks.push({ ...task, section });
      if (task.id) known.set(task.id, task);
    }
  }
  return found.tasks.length ? found : null;
}

function taskOf(line, { form, tasks, rests }, known) {
  const cut = line.lastIndexOf(" :") >= 0 ? line.lastIndexOf(" :") + 1 : line.indexOf(":");
  if (cut < 1) return null;
  const words = line.slice(cut + 1).split(",").map((each) => each.trim());
  const kinds = [];
  while (/^(?:active|done|crit|milestone)$/.test(words[0])) kinds.push(words.shift());
  if (!words.length || words.length > 3) return null;
  const end = words.pop();
  const start = words.pop();
  const id = words.pop();
  const after = /^after\s+(.+)$/.exec(start ?? "");
  const before = after?.[1].split(/\s+/).map((each) => known.get(each));
  if (before?.includes(undefined)) return null;
  const from = after ? Math.max(...before.map((each) => each.to)) : start === undefined ? tasks.at(-1)?.to : timeOf(start, form);
  const long = /^(\d+(?:\.\d+)?)(ms|[smhdw])$/.exec(end);
  let to = long ? from + long[1] * UNITS[long[2]] : timeOf(end, form);
  if (rests && to - from > LONGEST) return null;
  for (let day = from + DAY; rests && long && day <= to; day += DAY) if (new Date(day).getUTCDay() % 6 === 0) to += DAY;
  return from === null || from === undefined || to === null || !(to >= from) ? null : { name: line.slice(0, cut).trim(), kinds, from, to, id };
}

const STEPS = [60_000, 5 * 60_000, 15 * 60_000, HOUR, 3 * HOUR, 6 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY, 91 * DAY, 365 * DAY];

export function drawGantt(source) {
  const read = readGantt(source);
  if (!read) return null;
  const [from, to] = [Math.min(...read.tasks.map((t) => t.from)), Math.max(...read.tasks.map((t) => t.to))];
  const span = to - from || DAY;
  const step = STEPS.find((each) => span / each <= 7) ?? span / 6;
  const written = (time) => new Date(time).toLocaleString("en", { timeZone: "UTC", ...(step < DAY ? { hour: "2-digit", minute: "2-digit", hourCycle: "h23" } : { day: "numeric", month: "short", ...(span > 300 * DAY ? { year: "2-digit" } : {}) }) });
  const left = 16 + Math.max(...read.tasks.map((t) => measure([t.name]).w));
  const x = (time) => left + ((time - from) / span) * WIDE;
  const parts = read.title ? [words([read.title], 0, 8, "kind", "start")] : [];
  const bars = [];
  let y = read.title ? 32 : 4;
  const top = y;
  let section = "";
  for (const task of read.tasks) {
    if (task.section !== section) {
      section = task.section;
      bars.push(words([section], 0, y + ROW / 2, "small kind", "start"));
      y += ROW;
    }
    bars.push(words([task.name], 0, y + ROW / 2, "", "start"), bar(task, x(task.from), x(task.to), y));
    y += ROW;
  }
  for (let time = from; time <= to + 1; time += step) parts.push(el("g", { class: "edge" }, el("line", { x1: x(time), x2: x(time), y1: top, y2: y, class: "life" }), words([written(time)], x(time), y + 12, "small")));
  const said = (t) => `${t.name}${t.kinds.length ? ` (${t.kinds.join(", ")})` : ""} from ${written(t.from)} to ${written(t.to)}`;
  return sheet(left + WIDE + 24, y + 22, `Gantt chart${read.title ? ` ${read.title}` : ""}: ${read.tasks.slice(0, 40).map(said).join("; ")}`, [...parts, ...bars]);
}

function bar({ kinds }, from, to, y) {
  const look = { class: `bar ${kinds.join(" ")}` };
  const middle = y + ROW / 2;
  if (kinds.includes("milestone")) return el("polygon", { points: [[(from + to) / 2, middle - 8], [(from + to) / 2 + 8, middle], [(from + to) / 2, middle + 8], [(from + to) / 2 - 8, middle]].join(" "), ...look });
  return el("rect", { x: from, y: y + 5, width: Math.max(3, to - from), height: ROW - 10, rx: 3, ...look });
}
