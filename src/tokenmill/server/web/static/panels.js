// The engine's parts that are no curves. Owns: the headline, lanes of requests, memory as blocks, the roofline, events, engines.
import { cells, lanes, LEGEND, phases } from "./series.js";
import { bytes, clock, count, duration, html, Icon, plural, rate } from "./ui.js";

const SHOWN_CELLS = 480;
const MOST_LANES = 12;
const share = (x) => `${(x * 100).toFixed(x > 0 && x < 0.1 ? 1 : 0)} %`;
export { share };

// ---------------------------------------------------------------- headline

export function Headline({ state, gone, figures }) {
  const { speed, first, running, waiting } = figures;
  const [word, tone] = gone ? ["No answer", "bad"] : state.problem ? ["In trouble", "bad"] : state.draining ? ["Shutting down", "warn"] : running ? ["Working", "busy"] : ["Idle", "calm"];
  return html`<header class="headline">
    <div class="headline-state"><h1><span class=${`lamp ${tone}`} aria-hidden="true"></span>${word}</h1><p dir="auto">${state.models[0]}</p></div>
    <dl>
      <div class="main-figure"><dt>Tokens per second</dt><dd>${speed === null ? html`<span class="nothing">–</span>` : rate(speed)}</dd></div>
      <div class="main-figure"><dt>First token, p50</dt><dd>${first === null ? html`<span class="nothing">–</span>` : duration(first * 1000)}</dd></div>
      <div><dt>Running</dt><dd>${count(running)}</dd></div>
      <div><dt>Queue</dt><dd>${count(waiting)}</dd></div>
    </dl>
    ${state.problem && html`<p class="bad">${state.problem}</p>`}
  </header>`;
}

export function Facts({ state }) {
  const sum = (name) => state.engines.reduce((total, e) => total + (e[name] ?? 0), 0);
  const rss = sum("rss_bytes");
  const saved = (sum("saved_s") - sum("spent_s")) * 1000;
  const facts = [
    plural(state.engines.length, "engine"),
    `${count(state.open)} of ${count(state.capacity)} places taken`,
    plural(state.counters.engine_restarts ?? 0, "restart"),
    plural(sum("preemptions"), "preemption"),
    sum("drafted") ? `${share(sum("accepted") / sum("drafted"))} of drafts accepted${saved ? `, about ${duration(Math.abs(saved))} ${saved > 0 ? "saved" : "lost"}` : ""}` : "",
    rss ? `${bytes(rss)} of process memory` : "",
    sum("watts") ? `${rate(sum("watts"))} W` : "",
    `up ${duration((state.now - state.started) * 1000)}`,
  ].filter(Boolean);
  return html`<ul class="facts">${facts.map((fact) => html`<li key=${fact}>${fact}</li>`)}</ul>`;
}

// ---------------------------------------------------------------- lanes

export function Lanes({ list, now, span, onPick }) {
  const from = now - span;
  const { lanes: rows, left } = lanes(list ?? [], from, now, MOST_LANES);
  const began = (r) => r.at ?? r.created;
  const part = (s) => Math.max(0, Math.min(100, ((s - from) / span) * 100));
  return html`<section class="card lanes-card">
    <header><h2>Requests, one lane each</h2><ul class="legend" aria-label="Phases">${LEGEND.map((p) => html`<li key=${p.key}><i class=${`swatch ${p.key}`}></i>${p.label}</li>`)}</ul></header>
    ${rows.length === 0
      ? html`<p class="none">No request in ${span >= 120 ? `the last ${span / 60} minutes` : "the last minute"}.</p>`
      : html`<div class="lanes" role="group" aria-label="Requests over time">
        ${rows.map((row, i) => html`<div class="lane" key=${i}>${row.map((r) => {
          const prompt = r.prompts[0];
          const words = `Request of ${clock(r.created)}, ${r.state === "open" ? "running" : duration(r.duration_ms)}`;
          const until = r.state === "open" ? now : began(r) + r.duration_ms / 1000;
          const [a, b] = [part(began(r)), part(until)];
          const last = r.state === "open" && prompt ? phases(prompt, r.duration_ms).found.at(-1)?.key : ""; // it goes on between two looks
          return html`<button type="button" key=${r.id} class=${r.state === "open" ? `request live ${last}` : "request"} aria-label=${words} title=${words} style=${{ insetInlineStart: `${a}%`, width: `max(3px, ${b - a}%)` }} onClick=${() => onPick(r.id)}>
            ${prompt && phases(prompt, r.duration_ms).found.map((p) => {
              const [pa, pb] = [part(began(r) + p.from / 1000), part(began(r) + p.to / 1000)];
              return pb > pa ? html`<i key=${p.key} class=${p.key} style=${{ insetInlineStart: `${((pa - a) / Math.max(b - a, 1e-6)) * 100}%`, width: `${((pb - pa) / Math.max(b - a, 1e-6)) * 100}%` }}></i>` : null;
            })}
          </button>`;
        })}</div>`)}
        <div class="scale" aria-hidden="true">${[1, 0.75, 0.5, 0.25, 0].map((p) => html`<span key=${p}>${p ? `−${duration(span * p * 1000).replace(" min 0 s", " min").replace(/\.0+ s/, " s")}` : "now"}</span>`)}</div>
      </div>`}
    ${left > 0 && html`<p class="hint">${plural(left, "more request")} at the same time.</p>`}
  </section>`;
}

// ---------------------------------------------------------------- memory

export function Memory({ state, card }) {
  const sum = (name) => state.engines.reduce((total, e) => total + (e[name] ?? 0), 0);
  const blocks = sum("kv_blocks");
  const used = Math.round(state.engines.reduce((total, e) => total + e.kv_usage * e.kv_blocks, 0));
  const [shared, idle] = [sum("kv_shared"), sum("kv_idle")];
  const size = card?.kv_block_bytes ?? 0;
  const per = blocks / Math.min(SHOWN_CELLS, blocks || 1);
  const made = cells({ blocks, used, shared, idle }, SHOWN_CELLS);
  const kinds = [["shared", "shared by requests", shared], ["used", "in use by one", used - shared], ["cached", "kept for reuse", idle], ["free", "free", blocks - used - idle]];
  const words = kinds.map(([, label, n]) => `${count(n)} ${label}`).join(", ");
  return html`<section class="card memory">
    <header><h2>Context memory (KV cache)</h2><p class="hint">${blocks ? `${plural(blocks, "block")}${card?.block_size ? ` of ${card.block_size} tokens` : ""}${size ? `, ${bytes(blocks * size)}` : ""}` : ""}</p></header>
    ${blocks
      ? html`<div class="cells" role="img" aria-label=${`Memory: ${words}`}>${made.map((kind, i) => html`<i key=${i} class=${kind}></i>`)}</div>
        <ul class="legend">${kinds.map(([key, label, n]) => html`<li key=${key}><i class=${`swatch cell-${key}`}></i>${label} <b>${count(n)}</b></li>`)}</ul>
        ${per > 1 && html`<p class="hint">One square is about ${plural(Math.round(per), "block")}.</p>`}`
      : html`<p class="none">This engine does not say how its memory lies.</p>`}
  </section>`;
}

// ---------------------------------------------------------------- roofline

const UNITS = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]];
const scaled = (n, unit) => {
  const [size, sign] = UNITS.find(([s]) => n >= s) ?? [1, ""];
  return `${rate(n / size)} ${sign}${unit}`;
};

function Gauge({ label, value, ceiling, unit }) {
  const part = ceiling && value !== null ? Math.min(1, value / ceiling) : null;
  const words = value === null ? "not measured now" : `${scaled(value, unit)}${part === null ? "" : `, ${share(part)} of ${scaled(ceiling, unit)}`}`;
  return html`<div class="gauge"><div class="gauge-head"><span>${label}</span><b>${value === null ? "–" : part === null ? scaled(value, unit) : share(part)}</b></div>
    ${part !== null && html`<div class="gauge-bar" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(part * 100)} aria-valuetext=${words}><i style=${{ width: `${part * 100}%` }}></i></div>
      <p class="hint">${words}</p>`}</div>`;
}

export function Roofline({ figures, card }) {
  const { bytesPerS, flopsPerS } = figures;
  const top = card?.ceilings;
  return html`<section class="card roofline">
    <header><h2>How near to the hardware's limits</h2><p class="hint">${top ? "" : card ? "limits unknown" : ""}</p></header>
    <div class="roof">
      ${top?.flops > 0 && html`<${Roof} top=${top} bytesPerS=${bytesPerS} flopsPerS=${flopsPerS} />`}
      <div class="gauges">
        <${Gauge} label="Memory bandwidth" value=${bytesPerS} ceiling=${top?.bytes_per_s} unit="B/s" />
        <${Gauge} label="Arithmetic" value=${flopsPerS} ceiling=${top?.flops} unit="FLOP/s" />
      </div>
    </div>
    <p class="hint">${top ? `Estimated from steps and tokens; limits ${top.source.startsWith("measured") ? "measured here" : `from ${top.source}`}.` : html`Estimated from steps and tokens. <code>tokenmill doctor --measure</code> finds this machine's limits, once; a restarted server then shows them.`}</p>
  </section>`;
}

// Both axes in powers of ten: operations per byte, operations per second.
function Roof({ top, bytesPerS, flopsPerS }) {
  const [w, h] = [230, 118];
  const ridge = top.flops / top.bytes_per_s;
  const x = (v) => ((Math.log10(v) - Math.log10(ridge / 1000)) / 5) * w;
  const y = (v) => h - 8 - ((Math.log10(v) - Math.log10(top.flops / 10_000)) / 4.3) * (h - 8);
  const dot = bytesPerS > 0 && flopsPerS > 0 ? [x(flopsPerS / bytesPerS), y(flopsPerS)] : null;
  const inside = (v, most) => Math.max(4, Math.min(most - 4, v));
  const start = ridge / 1000;
  const words = dot ? `Now ${rate(flopsPerS / bytesPerS)} operations per byte, ${scaled(flopsPerS, "FLOP/s")}` : "Nothing is computed now";
  return html`<svg class="roof-plot" viewBox=${`0 0 ${w} ${h + 14}`} role="img" aria-label=${`Roofline. ${words}`}>
    <path class="roof-line" d=${`M${x(start)} ${y(start * top.bytes_per_s)}L${x(ridge)} ${y(top.flops)}L${w} ${y(top.flops)}`} />
    <path class="roof-axis" d=${`M0 ${h}H${w}`} />
    <text x="2" y=${h + 11}>memory limits</text><text x=${w - 2} y=${h + 11} text-anchor="end">arithmetic limits</text>
    ${dot && html`<circle cx=${inside(dot[0], w)} cy=${inside(dot[1], h)} r="4.5"><title>${words}</title></circle>`}
  </svg>`;
}

// ---------------------------------------------------------------- events, engines

export function Events({ events, now }) {
  return html`<section class="card events"><header><h2>Events</h2><p class="hint">restarts and refusals</p></header>
    ${!events?.length && html`<p class="none">Nothing has happened that you should know of.</p>`}
    <ul>${(events ?? []).slice(0, 8).map((e, i) => html`<li key=${i} class=${e.kind}><${Icon} name=${e.kind === "restart" ? "redo" : "close"} /><span>${e.text}${e.count > 1 ? html` <b>× ${count(e.count)}</b>` : ""}</span><time datetime=${new Date(e.at * 1000).toISOString()} title=${clock(e.at)}>${now - e.at < 5 ? "now" : `${duration(Math.round(now - e.at) * 1000).replace(/\.\d+ s/, " s")} ago`}</time></li>`)}</ul>
  </section>`;
}

export function Engines({ engines }) {
  const names = [["running", "Running", count], ["waiting", "Queue", count], ["kv_usage", "Memory in use", share], ["prompt_tokens", "Tokens in", count], ["cached_tokens", "Cached", count], ["output_tokens", "Tokens out", count], ["preemptions", "Preemptions", count], ["steps", "Steps", count]];
  return html`<section class="card"><header><h2>Engines</h2></header><div class="table" tabindex="0" role="region" aria-label="Engines"><table>
    <thead><tr><th scope="col">Engine</th>${names.map(([, label]) => html`<th scope="col" class="number" key=${label}>${label}</th>`)}</tr></thead>
    <tbody>${engines.map((e, i) => html`<tr key=${i}><th scope="row">${i}${e.up === 0 ? html` <span class="bad">away</span>` : ""}</th>${names.map(([key, , say]) => html`<td class="number" key=${key}>${say(e[key] ?? 0)}</td>`)}</tr>`)}</tbody>
  </table></div></section>`;
}
