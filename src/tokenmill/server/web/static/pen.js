// The pen of all diagrams. Owns: sizes, texts that are measured, heads of lines, the sheet. Must not know: kinds of diagrams.

export const LINE = 18;
const SIZE = 13.5;
const PAD = 10; // around the whole
export const SMALL = 12.5;
export const round = (n) => Math.round(n * 10) / 10;

export function el(name, attributes = {}, ...children) {
  const made = document.createElementNS("http" + "://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, typeof value === "number" ? round(value) : value);
  made.append(...children);
  return made;
}

export const path = (d, kind) => el("path", { d: d.replace(/-?\d+\.\d+/g, (n) => round(Number(n))), class: kind });

let pen = null;
export function measure(lines, size = SIZE) {
  pen ??= document.createElement("canvas").getContext("2d");
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return { w: Math.max(0, ...lines.map((line) => pen.measureText(line).width)), h: lines.length * LINE };
}

// Lines of a text around a middle (or beginning at it).
export function words(lines, x, y, kind = "", anchor = "middle") {
  const top = y - ((lines.length - 1) * LINE) / 2;
  return el("text", { class: `words ${kind}`, "text-anchor": anchor }, ...lines.map((line, i) => {
    const made = el("tspan", { x, y: top + i * LINE + SIZE * 0.35 });
    made.textContent = line;
    return made;
  }));
}

export function label(lines, x, y) {
  const { w, h } = measure(lines, SMALL);
  return el("g", { class: "label" }, el("rect", { x: x - w / 2 - 4, y: y - h / 2, width: w + 8, height: h, rx: 3 }), words(lines, x, y, "small"));
}

// Heads of lines, as they end at 0 0 from the left; the hollow ones hide the line below them.
const HEADS = {
  x: ["M-9 -4L-1 4M-9 4L-1 -4", "sign"],
  open: ["M-8 -4.5L0 0L-8 4.5", "sign"],
  part: ["M0 0L-8 -5L-16 0L-8 5Z", "head"],
  share: ["M0 0L-8 -5L-16 0L-8 5Z", "hollow"],
  kind: ["M0 0L-13 -7V7Z", "hollow"],
  ring: ["M0 0A5 5 0 1 0 -10 0A5 5 0 1 0 0 0Z", "hollow"],
  one: ["M-5 -6V6M-10 -6V6", "sign"],
  maybe: ["M-5 -6V6M-9 0A4 4 0 1 0 -17 0A4 4 0 1 0 -9 0Z", "hollow"],
  some: ["M0 -7L-11 0L0 7M-14 -6V6", "sign"],
  many: ["M0 -7L-11 0L0 7M-11 0A4 4 0 1 0 -19 0A4 4 0 1 0 -11 0Z", "hollow"],
};

// The head at the end of a line that comes from a point.
export function mark(kind, [x, y], [fromX, fromY]) {
  if (!kind) return [];
  const angle = (Math.atan2(y - fromY, x - fromX) * 180) / Math.PI;
  const transform = `translate(${round(x)} ${round(y)}) rotate(${round(angle)})`;
  if (kind === "o") return [el("circle", { cx: x - 4 * Math.sign(x - fromX || 0), cy: y - 4 * Math.sign(y - fromY || 0), r: 4, class: "head" })];
  const [d, look] = HEADS[kind] ?? ["M0 0L-9 -4.5V4.5Z", kind === ">" || kind === "full" ? "head" : "sign"];
  return [el("path", { d, transform, class: look })];
}

export function sheet(w, h, name, parts) {
  const svg = el("svg", { viewBox: [-PAD, -PAD, w + 2 * PAD, h + 2 * PAD].map(round).join(" "), width: w + 2 * PAD, height: h + 2 * PAD, role: "img", "aria-label": name }, ...parts);
  svg.style.minWidth = `${Math.min(w, (w + 2 * PAD) * 0.7)}px`; // smaller it could not be read
  return svg;
}
