// Settings. Owns: their place in this browser, presets of them, and the panel that edits them.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { SchemaEditor, ToolsEditor } from "./editors.js";
import { changedCount, defaultOf, EFFORTS, migrated, MORE, NUMBERS, requestFields } from "./fields.js";
import { kept, makeStore, useStore } from "./store.js";
import { html, Icon, IconButton, toast, useFocusBack } from "./ui.js";

const stored = kept("localStorage", "tokenmill.settings", {});
export const settings = makeStore(migrated(stored.read()));
settings.subscribe((value) => stored.write(value));

const storedPresets = kept("localStorage", "tokenmill.presets", []);
const presets = makeStore({ list: storedPresets.read() });
const BUILT_IN = [
  { name: "Exact", values: { temperature: 0 } },
  { name: "Inventive", values: { temperature: 1.1, top_p: 0.98 } },
  { name: "Programmer", values: { temperature: 0.2, system: "You are a careful programmer. Give the code first, then explain it in a few sentences." } },
  { name: "Translator", values: { temperature: 0.2, system: "Translate what the user writes into English; translate English into the language of the user's first message. Answer with the translation only." } },
];

export { changedCount, requestFields };

export const cleared = (value) => Object.fromEntries(Object.keys(value).map((name) => [name, undefined]));

function Tip({ id, text }) {
  return html`<span class="tip" role="tooltip" id=${id}>${text}</span>`;
}

function NumberField({ field, store, card }) {
  const { name, label, min, max, step, unit, hint } = field;
  const value = useStore(store)[name];
  const set = (next) => store.set({ [name]: next === "" ? undefined : next });
  const slides = max !== undefined;
  const id = `set-${name}`;
  const usual = defaultOf(field, card);
  const off = value !== undefined && !(Number(value) >= (min ?? -Infinity) && Number(value) <= (max ?? Infinity));
  const resting = Number.isFinite(Number(usual)) ? Number(usual) : min < 0 ? 0 : min;
  return html`<div class="field tipped">
    <div class="field-head">
      <span><label for=${id}>${label}</label>${unit && html` <small class="unit">${unit}</small>`}</span>
      <span class="grow"></span>
      ${value !== undefined && html`<${IconButton} icon="undo" label=${`Default for ${label}`} onClick=${() => { set(""); document.getElementById(id).focus(); }} />`}
      <input id=${id} type="number" inputmode="decimal" min=${min} max=${max} step=${slides ? "any" : step} placeholder=${usual}
        value=${value ?? ""} aria-invalid=${off ? "true" : undefined} aria-describedby=${`${id}-tip`} onInput=${(e) => set(e.target.value)} />
    </div>
    ${off && html`<p class="hint bad" role="status">${max === undefined ? `At least ${min}.` : `From ${min} to ${max}.`}</p>`}
    ${slides && html`<input type="range" aria-label=${`${label}, slider`} class=${value === undefined ? "unset" : ""} min=${min} max=${max} step=${step}
      style=${{ "--at": `${Math.min(1, Math.max(0, (Number(value ?? resting) - min) / (max - min))) * 100}%` }} aria-valuetext=${value === undefined ? `${usual}, the default` : undefined}
      value=${value ?? resting} onInput=${(e) => set(e.target.value)} />`}
    <${Tip} id=${`${id}-tip`} text=${`${hint} Default: ${usual}.`} />
  </div>`;
}

function TextField({ name, label, hint, rows, store, ...rest }) {
  const value = useStore(store)[name];
  const id = `set-${name}`;
  return html`<div class="field tipped">
    <label for=${id}>${label}</label>
    <textarea id=${id} rows=${rows} value=${value ?? ""} dir="auto" aria-describedby=${`${id}-tip`} onInput=${(e) => store.set({ [name]: e.target.value === "" ? undefined : e.target.value })} ...${rest}></textarea>
    <${Tip} id=${`${id}-tip`} text=${hint} />
  </div>`;
}

// All fields of one set of settings; `lean` leaves out what only a conversation has.
export function SettingsFields({ store, card, model, lean = false, raw = false }) {
  const value = useStore(store);
  const form = value.form ?? "text";
  return html`
    ${!raw && html`<${TextField} store=${store} name="system" label="System prompt" rows=${lean ? 2 : 4} placeholder="You are ..." hint="Stands before every conversation." />`}
    ${NUMBERS.map((field) => html`<${NumberField} key=${field.name} field=${field} store=${store} card=${card} />`)}
    ${!lean && !raw && html`<div class="field">
      <span class="label" id="form-label">Answer as</span>
      <div class="segments wide-segments" role="group" aria-labelledby="form-label">
        ${[["text", "Text"], ["json", "Any JSON"], ["schema", "Schema"]].map(([key, word]) => html`<button type="button" key=${key} aria-pressed=${form === key} onClick=${() => store.set({ form: key === "text" ? undefined : key })}>${word}</button>`)}
      </div>
      ${form === "schema" && html`<${SchemaEditor} value=${value.schema} onChange=${(schema) => store.set({ schema })} />`}
    </div>`}
    ${!lean && !raw && html`<details open=${Boolean(value.tools?.length)}>
      <summary><${Icon} name="right" />Tools${value.tools?.length ? html` <b class="count">${value.tools.length}</b>` : ""}</summary>
      <${ToolsEditor} value=${value.tools} onChange=${(tools) => store.set({ tools: tools.length ? tools : undefined })} model=${model} able=${card?.can?.tools} />
    </details>`}
    <details>
      <summary><${Icon} name="right" />More</summary>
      ${MORE.map((field) => html`<${NumberField} key=${field.name} field=${field} store=${store} card=${card} />`)}
      <${TextField} store=${store} name="stop" label="Stop strings" rows="2" hint="One per line; the answer ends before any of them." />
      ${!raw && html`<div class="field tipped">
        <div class="field-head">
          <label for="set-reasoning">Reasoning effort</label>
          <select id="set-reasoning" value=${value.reasoning_effort ?? ""} aria-describedby="set-reasoning-tip" onChange=${(e) => store.set({ reasoning_effort: e.target.value || undefined })}>
            <option value="">default</option>
            ${EFFORTS.map((v) => html`<option value=${v}>${v}</option>`)}
          </select>
        </div>
        <${Tip} id="set-reasoning-tip" text="For models that think before they answer." />
      </div>`}
    </details>`;
}

function Presets() {
  const value = useStore(settings);
  const { list } = useStore(presets);
  const [naming, setNaming] = useState(false);
  const write = (next) => {
    storedPresets.write(next);
    presets.set({ list: next });
  };
  const take = (name) => {
    const found = [...list, ...BUILT_IN].find((p) => p.name === name);
    if (!found) return;
    settings.set({ ...cleared(settings.get()), ...structuredClone(found.values) });
    toast(`Settings: ${name}`);
  };
  const area = useRef(null);
  const end = () => {
    setNaming(false);
    requestAnimationFrame(() => document.getElementById("preset")?.focus());
  };
  useLayoutEffect(() => area.current?.focus(), [naming]);
  const save = (event) => {
    event.preventDefault();
    const name = event.target.elements.preset.value.trim();
    if (!name) return;
    const values = JSON.parse(JSON.stringify(value));
    write([...list.filter((p) => p.name !== name), { name, values }].sort((a, b) => a.name.localeCompare(b.name)));
    end();
    toast(`Kept as “${name}”.`);
  };
  const same = (p) => JSON.stringify(Object.entries(p.values).sort()) === JSON.stringify(Object.entries(JSON.parse(JSON.stringify(value))).sort());
  const now = [...list, ...BUILT_IN].find(same)?.name ?? "";
  const own = list.some((p) => p.name === now);
  return html`<div class="presets">
    ${naming
      ? html`<form class="preset-form" onSubmit=${save}><input name="preset" aria-label="Name of the preset" placeholder="Name of the preset" required maxlength="40" ref=${area} onKeyDown=${(e) => { if (e.key === "Escape") { e.stopPropagation(); end(); } }} /><button type="submit" class="strong">Keep</button><${IconButton} icon="close" label="Keep none" onClick=${end} /></form>`
      : html`<label class="unseen" for="preset">Preset</label>
        <select id="preset" value=${now} onChange=${(e) => take(e.target.value)}>
          <option value="">${changedCount(value) ? "Own settings" : "Defaults"}</option>
          ${list.length > 0 && html`<optgroup label="Yours">${list.map((p) => html`<option value=${p.name}>${p.name}</option>`)}</optgroup>`}
          <optgroup label="Ready-made">${BUILT_IN.map((p) => html`<option value=${p.name}>${p.name}</option>`)}</optgroup>
        </select>
        <${IconButton} icon="save" label="Keep these settings as a preset" disabled=${changedCount(value) === 0} onClick=${() => setNaming(true)} />
        ${own && html`<${IconButton} icon="trash" label=${`Forget the preset “${now}”`} onClick=${() => write(list.filter((p) => p.name !== now))} />`}`}
  </div>`;
}

export function SettingsPanel({ onClose, card, model, raw = false }) {
  const value = useStore(settings);
  const [times, setTimes] = useState(0);
  const panel = useFocusBack();
  const clear = () => {
    const before = { ...value };
    settings.set(cleared(value));
    setTimes(times + 1);
    requestAnimationFrame(() => document.getElementById("preset")?.focus());
    toast("Settings are the defaults.", "Undo", () => settings.set(before));
  };
  return html`<aside class="settings" aria-label="Settings" key=${times} ref=${panel}>
    <header>
      <h2>Settings</h2>
      <${IconButton} icon="close" label="Close the settings" onClick=${onClose} />
    </header>
    <div class="settings-body">
      <${Presets} />
      <${SettingsFields} store=${settings} card=${card} model=${model} raw=${raw} />
      <button type="button" class="quiet" onClick=${clear} disabled=${changedCount(value) === 0}>Back to the defaults</button>
    </div>
  </aside>`;
}
