// Which models there are, and what they take. Owns: memory as a picture, where each model stands, and switching them where the server allows it.
import { useState } from "preact/hooks";
import { call, explain } from "./api.js";
import { FORMATS, neat, short, typed } from "./card.js";
import { chat, chooseModel, loadModels } from "./conversation.js";
import { useStore } from "./store.js";
import { bytes, html, plural, toast } from "./ui.js";

const PARTS = [["weights", "weights"], ["kv_cache", "contexts"], ["adapters", "adapters"], ["other", "other"]];
const ASKS = {
  load: { word: "Load", path: () => "models/load", said: "is loaded" },
  wake: { word: "Wake", path: (name) => `wake_up?model=${encodeURIComponent(name)}`, said: "is awake" },
  sleep: { word: "Sleep", path: (name) => `sleep?model=${encodeURIComponent(name)}`, said: "sleeps" },
  unload: { word: "Unload", path: () => "models/unload", said: "is unloaded" },
};
const here = (state) => state === "ready" || state === "draining" || state === "loading";

// What a model holds now, part by part; what its parts do not explain is other.
function held(model) {
  const { state, size, memory = {} } = model.tokenmill;
  if (!here(state)) return {};
  const known = memory.weights + memory.kv_cache + memory.adapters || 0;
  return { ...memory, other: Math.max(0, size - known) };
}

const sum = (parts) => Object.values(parts).reduce((total, n) => total + (n || 0), 0);

function Bar({ parts, all, label }) {
  const shown = PARTS.filter(([key]) => parts[key] > 0);
  const words = shown.map(([key, word]) => `${bytes(parts[key])} ${word}`).join(", ");
  return html`<div class="memory-bar" role="img" aria-label=${`${label}: ${words || "nothing"}`} title=${words}>
    ${shown.map(([key]) => html`<i key=${key} class=${`part-${key}`} style=${{ width: `${(parts[key] / all) * 100}%` }}></i>`)}
  </div>`;
}

// What may be done to a model that stands so.
function choices({ tokenmill: { state, pinned, can_sleep: able }, parent }, { control, alone }) {
  if (parent) return [];
  const may = able && (control || alone);
  const found = [];
  if (control && (state === "unloaded" || state === "failed")) found.push("load");
  if (may && state === "sleeping") found.push("wake");
  if (may && state === "ready") found.push("sleep");
  if (control && !pinned && (state === "ready" || state === "sleeping")) found.push("unload");
  return found;
}

function standing({ status, tokenmill: { state, kept, waiting, sleep_level: level } }) {
  if (status.failed) return "failed";
  if (state === "sleeping") return [level === 2 ? "sleeping, weights dropped" : "sleeping", kept ? `${bytes(kept)} of the host` : ""].filter(Boolean).join(", ");
  const words = { ready: "loaded", unloaded: "not loaded", loading: "loading", draining: "ending its requests" }[state] ?? state;
  return [words, waiting ? `${plural(waiting, "request")} waiting` : ""].filter(Boolean).join(", ");
}

// What its files are: format, how numbers are held, how many there are.
const formOf = ({ format, quantization, dtype, parameters }) =>
  [FORMATS[format] ?? format, typed(quantization || dtype || ""), parameters ? short(parameters) : ""].filter(Boolean).join(" · ");

function Row({ model, chosen, adapters, all, rights, busy, onAsk }) {
  const { name, form } = model;
  const { state, size } = model.tokenmill;
  const pick = (one) => html`<button type="button" key=${one} class="model-name" aria-pressed=${chosen === one} title=${`Use ${one}`} onClick=${() => chooseModel(one)}><code>${one}</code></button>`;
  return html`<tr class=${`model ${state}`}>
    <th scope="row"><span class="model-title"><span class=${`lamp ${state === "ready" ? "calm" : state === "failed" ? "bad" : here(state) ? "busy" : "off"}`} aria-hidden="true"></span>${pick(name)}</span>
      ${adapters.length > 0 && html`<div class="model-adapters"><span class="hint">${plural(adapters.length, "adapter")}</span>${adapters.map((a) => pick(a.id))}</div>`}</th>
    <td>${formOf(form)}</td>
    <td class="number">${form.context ? html`${neat(form.context)}<span class="in-words"> tokens</span>` : ""}</td>
    <td class="number model-memory">${size ? html`<span>${bytes(size)}</span>` : ""}${here(state) && size > 0 && html`<${Bar} parts=${held(model)} all=${all} label=${name} />`}</td>
    <td class="standing">${standing(model)}</td>
    <td class="model-asks">${choices(model, rights).map((ask) => html`<button type="button" key=${ask} class="quiet" aria-label=${`${ASKS[ask].word} ${name}`} disabled=${busy} onClick=${() => onAsk(ask, name)}>${ASKS[ask].word}</button>`)}</td>
  </tr>`;
}

export function Models({ state }) {
  const { models, model: chosen } = useStore(chat);
  const [busy, setBusy] = useState("");
  const parents = Object.fromEntries(models.filter((m) => m.parent).map((m) => [m.id, m.parent]));
  const stands = state.catalogue.filter((m) => !parents[m.name] && !m.alias);
  const rights = { control: state.memory.control, alone: stands.length === 1 };
  const total = {};
  for (const model of stands) for (const [key, n] of Object.entries(held(model))) total[key] = (total[key] ?? 0) + n;
  const limit = state.memory.limit;
  const all = Math.max(limit ?? 0, sum(total), 1);
  const free = limit ? Math.max(0, limit - sum(total)) : null;
  const ask = async (what, name) => {
    setBusy(name);
    try {
      const path = ASKS[what].path(name);
      await call(path, { body: path.includes("?model=") ? {} : { model: name } });
      toast(`${name} ${ASKS[what].said}.`);
      void loadModels();
    } catch (error) {
      const { title, text } = explain(error);
      toast(`${title}: ${text}`);
    }
    setBusy("");
  };
  const kinds = PARTS.filter(([key]) => total[key] > 0);
  return html`<section class=${`card models${stands.length > 1 ? " several" : ""}`}><header><h2>Models and their memory</h2><p class="hint">${sum(total) ? `${bytes(sum(total))} taken${limit ? ` of ${bytes(limit)}` : ""}` : ""}</p></header>
    ${sum(total) > 0 && html`<${Bar} parts=${total} all=${all} label=${`All models${free === null ? "" : `, ${bytes(free) || "nothing"} free`}`} />
      <ul class="legend">${kinds.map(([key, word]) => html`<li key=${key}><i class=${`swatch part-${key}`}></i>${word} <b>${bytes(total[key])}</b></li>`)}${free !== null && html`<li><i class="swatch cell-free"></i>free <b>${bytes(free) || "0"}</b></li>`}</ul>`}
    <table class="model-list"><thead><tr><th scope="col">Model</th><th scope="col">Format</th><th scope="col" class="number">Context</th><th scope="col" class="number">Memory</th><th scope="col">State</th><td></td></tr></thead>
      <tbody>${stands.map((m) => html`<${Row} key=${m.name} model=${m} chosen=${chosen} all=${all} rights=${rights} busy=${busy === m.name} onAsk=${ask} adapters=${models.filter((a) => a.parent === m.name)} />`)}</tbody></table>
  </section>`;
}
