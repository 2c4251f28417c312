// The engine, live. Owns: asking for samples while one looks, and the page of headline, lanes, plots and requests.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { explain, getJson } from "./api.js";
import { chat } from "./conversation.js";
import { Trouble } from "./message.js";
import { Engines, Events, Facts, Headline, Lanes, Memory, Roofline, share } from "./panels.js";
import { Models } from "./models.js";
import { PlotCard } from "./plots.js";
import { Requests, useRequests } from "./requests.js";
import { middle, recent, series } from "./series.js";
import { useStore } from "./store.js";
import { count, duration, html, Icon, rate } from "./ui.js";

const MOST = 900;
const PERIOD_MS = 1000;
const WINDOWS = [{ label: "1 min", s: 60 }, { label: "5 min", s: 300 }, { label: "15 min", s: 900 }];

const time = (s) => duration(s * 1000);
const short = (n) => (n >= 10_000 ? `${Math.round(n / 1000)}k` : n >= 1000 ? `${(n / 1000).toFixed(1)}k` : `${Math.round(n * 100) / 100}`);
const shortTime = (s) => (s >= 1 ? `${Math.round(s * 10) / 10} s` : `${Math.round(s * 10_000) / 10} ms`);

const PLOTS = [
  { title: "Tokens per second", series: [{ key: "out", label: "written", colour: "one" }, { key: "in", label: "read", colour: "three" }], say: rate, tick: short, least: 10 },
  { title: "Requests", series: [{ key: "running", label: "running", colour: "one" }, { key: "waiting", label: "queue", colour: "two" }], say: count, tick: short, least: 4 },
  { title: "Time to first token", bursts: true, series: [{ key: "ttft_p50", label: "p50", colour: "one" }, { key: "ttft_p90", label: "p90", colour: "three" }, { key: "ttft_p99", label: "p99", colour: "two" }], say: time, tick: shortTime, least: 0.01 },
  { title: "Between tokens", bursts: true, series: [{ key: "itl_p50", label: "p50", colour: "one" }, { key: "itl_p90", label: "p90", colour: "three" }, { key: "itl_p99", label: "p99", colour: "two" }], say: time, tick: shortTime, least: 0.005 },
  { title: "Memory in use", series: [{ key: "kv_usage", label: "in use", colour: "one" }], say: share, tick: (v) => `${Math.round(v * 100)} %`, top: 1 },
  { title: "Prompt found in the cache", bursts: true, series: [{ key: "hits", label: "found", colour: "one" }], say: share, tick: (v) => `${Math.round(v * 100)} %`, top: 1 },
];

// Polls while the view is shown and the window is visible.
function useEngine(paused, model) {
  const [state, setState] = useState(null);
  const [error, setError] = useState(null);
  const samples = useRef([]);
  const of = useRef(model);
  useEffect(() => {
    if (paused) return undefined;
    if (of.current !== model) samples.current = []; // another model has a past of its own
    of.current = model;
    let timer = 0;
    const controller = new AbortController();
    const poll = async () => {
      try {
        if (document.visibilityState === "visible") {
          const latest = samples.current.at(-1)?.[0] ?? 0;
          const found = await getJson(`v1/engine?since=${latest}&model=${encodeURIComponent(model)}`, controller.signal);
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
  }, [paused, model]);
  return { state, error };
}

export function EngineView({ theme, picked, onPick }) {
  const [paused, setPaused] = useState(false);
  const [span, setSpan] = useState(WINDOWS[0].s);
  const { card, model } = useStore(chat);
  const { state, error } = useEngine(paused, model);
  const requests = useRequests(paused);
  const columns = useMemo(() => (state ? series(state.columns, state.samples) : null), [state]);
  const range = state ? { min: state.now - span, max: state.now } : { min: 0, max: span };
  const sum = (name) => state.engines.reduce((total, e) => total + (e[name] ?? 0), 0);
  const figures = columns && {
    speed: recent(columns, "out", state.now), first: middle(columns, "ttft_p50", state.now - span), running: sum("running"), waiting: sum("waiting"),
    bytesPerS: recent(columns, "bytes_per_s", state.now), flopsPerS: recent(columns, "flops_per_s", state.now),
  };
  return html`<div class="engine" tabindex="-1">
    <div class="engine-inner">
      ${error && html`<div class="banner"><${Trouble} error=${{ ...error, help: error.help === "key" ? "key" : "" }} /></div>`}
      ${!state && html`<div class="engine-boot"><h1>${error ? "No figures yet" : "Asking the engine ..."}</h1>${error && html`<p class="hint">They appear here as soon as the server answers: it is asked every second.</p>`}${!error && html`<div class="bones" aria-hidden="true"><i></i><i></i><i></i></div>`}</div>`}
      ${state && html`
        <${Headline} state=${state} gone=${Boolean(error)} figures=${figures} />
        <div class="engine-head">
          <${Facts} state=${state} />
          <div class="engine-tools">
            <div class="segments" role="group" aria-label="Time shown">
              ${WINDOWS.map((w) => html`<button type="button" key=${w.s} aria-pressed=${span === w.s} onClick=${() => setSpan(w.s)}>${w.label}</button>`)}
            </div>
            <button type="button" class="chip" aria-label=${paused ? "Go on" : "Pause"} onClick=${() => setPaused(!paused)}><${Icon} name=${paused ? "play" : "pause"} /><span>${paused ? "Go on" : "Pause"}</span></button>
          </div>
        </div>
        <${Lanes} list=${requests.list} now=${state.now} span=${span} onPick=${onPick} />
        <div class="plots">${PLOTS.map((plot) =>
          html`<${PlotCard} key=${plot.title} plot=${plot} theme=${theme} range=${range} data=${[columns.at, ...plot.series.map((s) => columns[s.key])]} />`)}</div>
        <div class="pair"><${Memory} state=${state} card=${card} /><${Roofline} figures=${figures} card=${card} /></div>
        <div class="pair"><${Events} events=${state.events} now=${state.now} /><${Models} state=${state} /></div>
        ${state.engines.length > 1 && html`<${Engines} engines=${state.engines} />`}`}
      ${(state || !error) && html`<${Requests} requests=${requests} picked=${picked} onPick=${onPick} />`}
    </div>
  </div>`;
}
