// How to sample. Owns: the settings, what they mean, their place in a request, and the panel that edits them.
import { useState } from "preact/hooks";
import { kept, makeStore, useStore } from "./store.js";
import { html, Icon, IconButton } from "./ui.js";

const stored = kept("localStorage", "tokenmill.settings", {});
export const settings = makeStore({ ...stored.read() });
settings.subscribe((value) => stored.write(value));

// An empty value is not sent: the server then follows the model's own defaults.
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hint: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.01, hint: "only the likeliest tokens that make up this share" },
  { name: "top_k", label: "Top k", min: 1, max: 200, step: 1, hint: "only so many tokens to choose from" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "leaves out what is this much less likely than the best" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "the answer's longest length" },
  { name: "seed", label: "Seed", step: 1, hint: "the same seed gives the same answer" },
];
const MORE = [
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "against tokens, the more often they came" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "against tokens that came at all" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.01, hint: "1 changes nothing" },
];

export function changedCount(value) {
  return Object.values(value).filter((v) => v !== undefined && v !== "").length;
}

export function requestFields(value) {
  const fields = {};
  for (const { name } of [...NUMBERS, ...MORE]) {
    if (value[name] !== undefined && value[name] !== "") fields[name] = Number(value[name]);
  }
  const stop = (value.stop || "").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (value.reasoning_effort) fields.reasoning_effort = value.reasoning_effort;
  if (value.json) fields.response_format = { type: "json_object" };
  const tools = readTools(value.tools);
  if (tools.list) fields.tools = tools.list;
  return fields;
}

function readTools(text) {
  if (!text || !text.trim()) return {};
  try {
    const found = JSON.parse(text);
    const list = (Array.isArray(found) ? found : [found]).map((t) => (t.function ? t : { type: "function", function: t }));
    if (!list.every((t) => typeof t.function?.name === "string")) return { problem: "Every tool needs a name." };
    return { list };
  } catch (error) {
    return { problem: `Not valid JSON: ${error.message}` };
  }
}

const set = (name, value) => settings.set({ [name]: value === "" ? undefined : value });

function NumberField({ name, label, min, max, step, hint }) {
  const value = useStore(settings)[name];
  const slides = max !== undefined;
  const id = `set-${name}`;
  return html`<div class="field">
    <div class="field-head">
      <label for=${id}>${label}</label>
      <input id=${id} type="number" inputmode="decimal" min=${min} max=${max} step=${slides ? "any" : step} placeholder="default"
        value=${value ?? ""} aria-describedby=${`${id}-hint`} onInput=${(e) => set(name, e.target.value)} />
    </div>
    ${slides && html`<input type="range" aria-label=${`${label}, slider`} class=${value === undefined ? "unset" : ""} min=${min} max=${max} step=${step}
      value=${value ?? (name === "temperature" || name === "top_p" || name === "repetition_penalty" ? 1 : min < 0 ? 0 : min)}
      onInput=${(e) => set(name, e.target.value)} />`}
    <p class="hint" id=${`${id}-hint`}>${hint}</p>
  </div>`;
}

function TextField({ name, label, hint, rows, problem, ...rest }) {
  const value = useStore(settings)[name];
  const id = `set-${name}`;
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <textarea id=${id} rows=${rows} value=${value ?? ""} aria-describedby=${`${id}-hint`} aria-invalid=${problem ? "true" : undefined}
      onInput=${(e) => set(name, e.target.value)} ...${rest}></textarea>
    <p class=${problem ? "hint bad" : "hint"} id=${`${id}-hint`}>${problem || hint}</p>
  </div>`;
}

export function SettingsPanel({ onClose }) {
  const value = useStore(settings);
  const [cleared, setCleared] = useState(0);
  const clear = () => {
    settings.set(Object.fromEntries(Object.keys(value).map((name) => [name, undefined])));
    setCleared(cleared + 1);
  };
  return html`<aside class="settings" aria-label="Settings" key=${cleared}>
    <header>
      <h2>Settings</h2>
      <${IconButton} icon="close" label="Close the settings" onClick=${onClose} />
    </header>
    <div class="settings-body">
      <${TextField} name="system" label="System prompt" rows="4" placeholder="You are ..." hint="stands before every conversation" />
      ${NUMBERS.map((field) => html`<${NumberField} key=${field.name} ...${field} />`)}
      <details>
        <summary><${Icon} name="right" />More</summary>
        ${MORE.map((field) => html`<${NumberField} key=${field.name} ...${field} />`)}
        <${TextField} name="stop" label="Stop strings" rows="2" hint="one per line; the answer ends before any of them" />
        <div class="field">
          <div class="field-head">
            <label for="set-reasoning">Reasoning effort</label>
            <select id="set-reasoning" value=${value.reasoning_effort ?? ""} onChange=${(e) => set("reasoning_effort", e.target.value)}>
              <option value="">default</option>
              ${["none", "minimal", "low", "medium", "high"].map((v) => html`<option value=${v}>${v}</option>`)}
            </select>
          </div>
          <p class="hint">for models that think before they answer</p>
        </div>
        <label class="check"><input type="checkbox" checked=${Boolean(value.json)} onChange=${(e) => set("json", e.target.checked ? true : "")} />
          Answer in JSON only</label>
        <${TextField} name="tools" label="Tools" rows="5" class="mono" spellcheck="false" problem=${readTools(value.tools).problem}
          placeholder=${'[{"name": "weather", "parameters": {...}}]'} hint="functions that the model may call, as a JSON list" />
      </details>
      <button type="button" class="quiet" onClick=${clear} disabled=${changedCount(value) === 0}>Back to the defaults</button>
    </div>
  </aside>`;
}
