// Plots over time. Owns: one uPlot per card, its colours (from the style sheet), size, shared cursor, and spoken summary.
import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "./ui.js";

const HEIGHT = 132;
const RECENT_S = 10;

// A CSS colour variable as what a canvas understands.
function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  probe.className = "unseen";
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const moment = (t) =>
  new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: t % 60 ? "2-digit" : undefined, hourCycle: "h23" });

const faint = (rgb) => rgb.replace(/^rgb\(([^)]+)\)$/, "rgba($1, 0.13)");

// Indices of values that no line reaches.
const alone = (values) => values.flatMap((v, i) => (v !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null ? [i] : []));

function options(plot, width) {
  const dim = colour("dim");
  const grid = { stroke: colour("line"), width: 1 };
  const axis = { stroke: dim, font: "11px system-ui, sans-serif", ticks: { show: false }, grid };
  return {
    width,
    height: HEIGHT,
    padding: [8, 26, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "engine" }, points: { size: 6 }, drag: { x: false, y: false } },
    scales: { x: { time: true }, y: { range: (u, low, high) => [0, plot.top ?? Math.max(high * 1.1 || 0, plot.least ?? 1)] } },
    axes: [
      { ...axis, grid: { show: false }, space: 70, size: 24, values: (u, ticks) => ticks.map(moment) },
      { ...axis, size: 46, space: 34, values: (u, ticks) => ticks.map((t) => plot.tick(t)) },
    ],
    series: [{}, ...plot.series.map((series, i) => {
      const stroke = colour(series.colour);
      return { label: series.label, stroke, width: 1.6, fill: i === 0 ? faint(stroke) : undefined, points: { show: true, size: 4, fill: stroke, filter: (u, n) => (plot.bursts ? null : alone(u.data[n])) }, spanGaps: false };
    })],
  };
}

export function PlotCard({ plot, data, range, theme }) {
  const box = useRef(null);
  const chart = useRef(null);
  const latest = useRef({ data, range });
  latest.current = { data, range };
  const [at, setAt] = useState(null);

  useEffect(() => {
    const made = new globalThis.uPlot(
      { ...options(plot, box.current.clientWidth || 300), hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] } },
      latest.current.data,
      box.current,
    );
    chart.current = made;
    made.setScale("x", latest.current.range);
    const sizes = new ResizeObserver(() => {
      if (box.current && Math.abs(box.current.clientWidth - made.width) > 1) made.setSize({ width: box.current.clientWidth, height: HEIGHT });
    });
    sizes.observe(box.current);
    return () => {
      sizes.disconnect();
      made.destroy();
    };
  }, [theme]);

  useEffect(() => {
    chart.current.batch(() => {
      chart.current.setData(data, false);
      chart.current.setScale("x", range);
    });
  }, [data, range.min, range.max]);

  const newest = data[0].length - 1;
  const shown = at !== null && at <= newest ? at : newest;
  const values = plot.series.map((_, i) => lastValue(data[i + 1], data[0], shown, at === null && plot.bursts));
  const words = plot.series.map((s, i) => `${s.label} ${values[i] === null ? "none" : plot.say(values[i])}`).join(", ");
  return html`<figure class="plot">
    <figcaption>
      <h2>${plot.title}</h2>
      <ul>${plot.series.map((s, i) => html`<li key=${s.label}><i class=${`swatch ${s.colour}`}></i>${s.label} <b>${values[i] === null ? "–" : plot.say(values[i])}</b></li>`)}</ul>
    </figcaption>
    <div class="canvas" ref=${box} role="img" aria-label=${`${plot.title} over time; now: ${words}`}></div>
  </figure>`;
}

// The value at an index, or (latencies come in bursts) the newest one of the seconds before it.
function lastValue(values, times, index, searches) {
  for (let i = index; i >= 0 && times[index] - times[i] <= RECENT_S; i -= 1) {
    if (values[i] !== null && values[i] !== undefined) return values[i];
    if (!searches) return null;
  }
  return null;
}
