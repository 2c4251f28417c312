// Diagrams. Owns: which module draws which kind of Mermaid. It is fetched where an answer holds one.

const graph = async (name, chart) => chart && (await import("./flowdraw.js")).drawGraph(name, chart);
const flow = async (text) => graph("Flow chart", (await import("./flowtext.js")).readFlow(text));
const state = async (text) => graph("State diagram", (await import("./statetext.js")).readStates(text));
const KINDS = {
  graph: flow,
  flowchart: flow,
  stateDiagram: state,
  classDiagram: async (text) => graph("Class diagram", (await import("./classtext.js")).readClasses(text)),
  erDiagram: async (text) => graph("Entity diagram", (await import("./classtext.js")).readEntities(text)),
  sequenceDiagram: async (text) => (await import("./sequencedraw.js")).drawSequence(text),
  pie: async (text) => (await import("./pie.js")).drawPie(text),
  gantt: async (text) => (await import("./gantt.js")).drawGantt(text),
};

// -> an SVG, or null for what cannot be drawn in whole.
export async function draw(source) {
  const text = source.replace(/^\s*---\n[\s\S]*?\n---\n/, "");
  const kind = /^(?:\s|%%[^\n]*\n)*([A-Za-z]+)/.exec(text)?.[1];
  return Object.hasOwn(KINDS, kind) ? KINDS[kind](text) : null;
}
