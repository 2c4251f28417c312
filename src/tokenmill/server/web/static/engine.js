// The engine, live. Owns: asking for samples while one looks, rates made of totals, and the page around plots and requests.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { explain, getJson } from "./api.js";
import { Trouble } from "./message.js";
import { PlotCard } from "./plots.js";
import { Requests } from "./requests.js";
import { count, duration, html, Icon, plural, rate } from "./ui.js";

const MOST = 900;
const PERIOD_MS = 1000;
const GAP_S = 2.6; // a longer silence between samples means that the engine rested in between
const WINDOWS = [{ label: "1 min", s: 60 }, { label: "5 min", s: 300 }, { label: "15 min", s: 900 }];

const share = (x) => `${(x * 100).toFixed(x > 0 && x < 0.1 ? 1 : 0)} %`;
const time = (s) => duration(s * 1000);
const short = (n) => (n >= 10_000 ? `${Math.round(n / 1000)}k` : n >= 1000 ? `${(n / 1000).toFixed(1)}k` : `${Math.round(n * 100) / 100}`);
const shortTime = (s) => (s >= 1 ? `${Math.round(s * 10) / 10} s` : `${Math.round(s * 10_000) / 10} ms`);

const PLOTS = [
  { title: "Requests", series: [{ key: "running", label: "running", colour: "one" }, { key: "waiting", label: "waiting", colour: "two" }], say: count, tick: short, least: 4 },
  { title: "Tokens per second", series: [{ key: "out", label: "out", colour: "one" }, { key: "in", label: "in", colour: "three" }], say: rate, tick: short, least: 10 },
  { title: "K/V blocks in use", series: [{ key: "kv_usage", label: "in use", colour: "one" }], say: share, tick: (v) => `${Math.round(v * 100)} %`, top: 1 },
  { title: "Time to first token", spans: true, series: [{ key: "ttft_p50", label: "p50", colour: "one" }, { key: "ttft_p90", label: "p90", colour: "three" }, { key: "ttft_p99", label: "p99", colour: "two" }], say: time, tick: shortTime, least: 0.01 },
  { title: "Between tokens", spans: true, series: [{ key: "itl_p50", label: "p50", colour: "one" }, { key: "itl_p90", label: "p90", colour: "three" }, { key: "itl_p99", label: "p99", colour: "two" }], say: time, tick: shortTime, least: 0.005 },
  { title: "Prompt tokens found in the cache", spans: true, series: [{ key: "hits", label: "found", colour: "one" }], say: share, tick: (v) => `${Math.round(v * 100)} %`, top: 1 },
];

// Samples (rows) -> columns for the plots; totals become rates.
export function series(columns, samples) {
  const place = Object.fromEntries(columns.map((name, i) => [name, i]));
  const found = { at: [] };
  const keys = PLOTS.flatMap((plot) => plot.series.map((s) => s.key));
  for (const key of keys) found[key] = [];
  const put = (at, values) => {
    found.at.push(at);
    for (const key of keys) found[key].push(values[key] ?? null);
  };
  const rest = { running: 0, waiting: 0, out: 0, in: 0 };
  samples.forEach((row, i) => {
    const get = (name) => row[place[name]];
    const values = Object.fromEntries(keys.filter((k) => k in place).map((k) => [k, get(k)]));
    const before = samples[i - 1];
    if (before) {
      const grown = (name) => Math.max(0, get(name) - before[place[name]]);
      let seconds = get("at") - before[place.at];
      if (seconds > GAP_S) {
        put(before[place.at] + 0.5, { ...rest, kv_usage: before[place.kv_usage] });
        put(get("at") - 1, { ...rest, kv_usage: before[place.kv_usage] });
        seconds = 1;
      }
      const computed = grown("prompt_tokens");
      const cached = grown("cached_tokens");
      values.out = grown("output_tokens") / seconds;
      values.in = computed / seconds;
      values.hits = computed + cached > 0 ? cached / (computed + cached) : null;
    }
    put(get("at"), values);
  });
  return found;
}

// Polls while the view is shown and the window is visible.
function useEngine(paused) {
  const [state, setState] = useState(null);
  const [error, setError] = useState(null);
  const samples = useRef([]);
  useEffect(() => {
    if (paused) return undefined;
    let timer = 0;
    const controller = new AbortController();
    const poll = async () => {
      try {
        if (document.visibilityState === "visible") {
          const newest = samples.current.at(-1)?.[0] ?? 0;
          const found = await getJson(`v1/engine?since=${newest}`, controller.signal);
          samples.current = [...samples.current, ...found.samples].slice(-MOST);
          setState({ ...found, samples: samples.current });
          setError(null);
        }
      } catch (problem) {
        if (problem.name === "AbortError") return;
        setError(explain(problem));
      }
      timer = setTimeout(poll, PERIOD_MS);
    };
    poll();
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [paused]);
  return { state, error };
}

export function EngineView({ theme, picked, onPick }) {
  const [paused, setPaused] = useState(false);
  const [span, setSpan] = useState(WINDOWS[1].s);
  const { state, error } = useEngine(paused);
  const columns = useMemo(() => (state ? series(state.columns, state.samples) : null), [state]);
  const range = state ? { min: state.now - span, max: state.now } : { min: 0, max: span };
  return html`<div class="engine" tabindex="-1">
    <div class="engine-inner">
      ${error && html`<div class="banner"><${Trouble} error=${{ ...error, help: error.help === "key" ? "key" : "" }} /></div>`}
      <header class="engine-head">
        <${Facts} state=${state} gone=${Boolean(error)} />
        <div class="engine-tools">
          <div class="segments" role="group" aria-label="Time shown">
            ${WINDOWS.map((w) => html`<button type="button" key=${w.s} aria-pressed=${span === w.s} onClick=${() => setSpan(w.s)}>${w.label}</button>`)}
          </div>
          <button type="button" class="chip" aria-label=${paused ? "Go on" : "Pause"} onClick=${() => setPaused(!paused)}><${Icon} name=${paused ? "play" : "pause"} /><span>${paused ? "Go on" : "Pause"}</span></button>
        </div>
      </header>
      ${columns && html`<div class="plots">${PLOTS.map((plot) =>
        html`<${PlotCard} key=${plot.title} plot=${plot} theme=${theme} range=${range} data=${[columns.at, ...plot.series.map((s) => columns[s.key])]} />`)}</div>`}
      ${state && state.engines.length > 1 && html`<${Engines} engines=${state.engines} />`}
      <${Requests} paused=${paused} picked=${picked} onPick=${onPick} />
    </div>
  </div>`;
}

function Facts({ state, gone }) {
  if (!state) return html`<h1>${gone ? "No figures" : "Asking the engine ..."}</h1>`;
  const sum = (name) => state.engines.reduce((total, e) => total + (e[name] ?? 0), 0);
  const word = gone ? "No answer" : state.problem ? "In trouble" : state.draining ? "Shutting down" : sum("running") ? "At work" : "At rest";
  const tone = gone || state.problem ? "bad" : state.draining ? "warn" : sum("running") ? "busy" : "calm";
  const restarts = state.counters.engine_restarts ?? 0;
  const facts = [
    plural(state.engines.length, "engine"),
    `${count(state.max_model_len)} tokens at most`,
    `${count(state.open)} of ${count(state.capacity)} places taken`,
    plural(restarts, "restart"),
    plural(sum("preemptions"), "preemption"),
    `up ${duration((state.now - state.started) * 1000)}`,
  ];
  if (sum("kv_blocks")) facts.splice(1, 0, `${count(sum("kv_blocks"))} K/V blocks`);
  if (sum("drafted")) facts.splice(4, 0, `${share(sum("accepted") / sum("drafted"))} of drafts accepted`);
  return html`<div class="facts">
    <h1><span class=${`lamp ${tone}`} aria-hidden="true"></span>${word}<small>${state.models[0]}</small></h1>
    ${state.problem && html`<p class="bad">${state.problem}</p>`}
    <ul>${facts.map((fact) => html`<li>${fact}</li>`)}</ul>
  </div>`;
}

function Engines({ engines }) {
  const names = [["running", "Running", count], ["waiting", "Waiting", count], ["kv_usage", "K/V in use", share], ["prompt_tokens", "Tokens in", count], ["cached_tokens", "Cached", count], ["output_tokens", "Tokens out", count], ["preemptions", "Preemptions", count], ["steps", "Steps", count]];
  return html`<section class="card"><h2>Engines</h2><div class="table" tabindex="0" role="region" aria-label="Engines"><table>
    <thead><tr><th scope="col">Engine</th>${names.map(([, label]) => html`<th scope="col" class="number">${label}</th>`)}</tr></thead>
    <tbody>${engines.map((e, i) => html`<tr key=${i}><th scope="row">${i}</th>${names.map(([key, , say]) => html`<td class="number">${say(e[key] ?? 0)}</td>`)}</tr>`)}</tbody>
  </table></div></section>`;
}
