// Editors of what is more than a number. Owns: rows of an object's schema, the list of tools with a test call, and the schema of answers.
import { useState } from "preact/hooks";
import { call, explain } from "./api.js";
import { asTool, KINDS, readTools, rowsOf, schemaOf } from "./fields.js";
import { html, Icon, IconButton } from "./ui.js";
import { faults, readSchema } from "./validate.js";

const EXAMPLE = { type: "object", properties: { name: { type: "string", description: "who it is about" }, age: { type: "integer" }, mood: { type: "string", enum: ["glad", "sad", "calm"] } }, required: ["name", "mood"], additionalProperties: false };
const pretty = (value) => JSON.stringify(value, null, 2);

function Rows({ rows, onChange, what }) {
  const change = (i, patch) => onChange(rows.map((row, j) => (i === j ? { ...row, ...patch } : row)));
  const add = () => onChange([...rows, { name: "", type: "string", description: "", choices: "", required: true }]);
  return html`<div class="rows">
    ${rows.map((row, i) => html`<fieldset class="row" key=${i}>
      <legend class="unseen">${what} ${row.name || i + 1}</legend>
      <input aria-label="Name" placeholder="name" class="mono" spellcheck="false" value=${row.name} onInput=${(e) => change(i, { name: e.target.value.trim() })} />
      <select aria-label="Type" value=${row.type} onChange=${(e) => change(i, { type: e.target.value })}>${KINDS.map((k) => html`<option value=${k}>${k}</option>`)}</select>
      <${IconButton} icon="close" label=${`Remove ${row.name || "this row"}`} onClick=${() => onChange(rows.filter((_, j) => j !== i))} />
      <input aria-label="Description" class="full" placeholder="what it means" value=${row.description} onInput=${(e) => change(i, { description: e.target.value })} />
      ${row.type === "string" && html`<input aria-label="Choices" class="full" placeholder="only these: red, green, blue" value=${row.choices} onInput=${(e) => change(i, { choices: e.target.value })} />`}
      <label class="tick"><input type="checkbox" checked=${row.required} onChange=${(e) => change(i, { required: e.target.checked })} />required</label>
    </fieldset>`)}
    <button type="button" class="quiet small" onClick=${add}><${Icon} name="plus" />${what}</button>
  </div>`;
}

// A schema as rows where a form can show it, or as JSON.
function ObjectEditor({ schema, onChange, what, label }) {
  const rows = rowsOf(schema);
  const [asJson, setAsJson] = useState(rows === null);
  const [text, setText] = useState(null);
  const { problem } = text === null ? {} : readSchema(text);
  const write = (value) => {
    setText(value);
    const found = readSchema(value);
    if (found.schema) onChange(found.schema);
  };
  const [editing, setEditing] = useState(null); // rows that have no name yet are not in the schema
  const shown = editing ?? rows ?? [];
  return html`<div class="object-editor">
    <div class="field-head"><span class="label">${label}</span>
      <div class="segments small-segments" role="group" aria-label=${`${label} as`}>
        <button type="button" aria-pressed=${!asJson} disabled=${rows === null} title=${rows === null ? "This schema says more than a form can show" : ""} onClick=${() => { setAsJson(false); setText(null); setEditing(null); }}>Form</button>
        <button type="button" aria-pressed=${asJson} onClick=${() => setAsJson(true)}>JSON</button>
      </div></div>
    ${asJson || rows === null
      ? html`<textarea class="mono" rows="8" spellcheck="false" aria-label=${`${label} as JSON`} aria-invalid=${problem ? "true" : undefined} value=${text ?? pretty(schema)} onInput=${(e) => write(e.target.value)}></textarea>
        ${problem && html`<p class="hint bad" role="alert">${problem}</p>`}`
      : html`<${Rows} rows=${shown} what=${what} onChange=${(next) => { setEditing(next); onChange(schemaOf(next)); }} />`}
  </div>`;
}

// ---------------------------------------------------------------- structured output

export function SchemaEditor({ value, onChange }) {
  const { schema, problem } = readSchema(value);
  if (!value?.trim()) {
    return html`<div class="object-editor"><p class="hint">The answer will be JSON that meets a schema: the engine cannot say anything else.</p>
      <div class="buttons start"><button type="button" class="quiet small" onClick=${() => onChange(pretty({ type: "object", properties: {}, additionalProperties: false }))}><${Icon} name="plus" />New schema</button>
      <button type="button" class="quiet small" onClick=${() => onChange(pretty(EXAMPLE))}>Take the example</button></div></div>`;
  }
  return html`<div class="schema-editor">
    ${schema
      ? html`<${ObjectEditor} schema=${schema} label="Schema of the answer" what="Field" onChange=${(next) => onChange(pretty(next))} />
        <p class="hint good"><${Icon} name="check" />A valid schema${Object.keys(schema.properties ?? {}).length ? ` with ${Object.keys(schema.properties).length} fields` : ""}. Answers are checked while they come.</p>`
      : html`<label for="schema-text">Schema of the answer</label>
        <textarea id="schema-text" class="mono" rows="8" spellcheck="false" aria-invalid="true" value=${value} onInput=${(e) => onChange(e.target.value)}></textarea><p class="hint bad" role="alert">${problem}</p>`}
    <div class="buttons start"><button type="button" class="quiet small" onClick=${() => onChange("")}>Clear the schema</button></div>
  </div>`;
}

// ---------------------------------------------------------------- tools

export function ToolsEditor({ value, onChange, model, able }) {
  const list = value ?? [];
  const [asJson, setAsJson] = useState(null);
  const { problem } = asJson === null ? {} : readTools(asJson);
  const change = (i, patch) => onChange(list.map((tool, j) => (i === j ? { ...tool, ...patch } : tool)));
  const add = () => onChange([...list, { name: `tool_${list.length + 1}`, description: "", parameters: { type: "object", properties: {}, additionalProperties: false }, on: true }]);
  const write = (text) => {
    setAsJson(text);
    const found = readTools(text);
    if (found.list) onChange(found.list);
  };
  return html`<div class="tools-editor">
    ${able === false && html`<p class="hint">This model's template has no form for tools: it may not call them.</p>`}
    <div class="field-head"><span class="label">Functions</span>
      <div class="segments small-segments" role="group" aria-label="Tools as">
        <button type="button" aria-pressed=${asJson === null} onClick=${() => setAsJson(null)}>Form</button>
        <button type="button" aria-pressed=${asJson !== null} onClick=${() => setAsJson(list.length ? pretty(list.map(asTool)) : "")}>JSON</button>
      </div></div>
    ${asJson !== null
      ? html`<textarea class="mono" rows="10" spellcheck="false" aria-label="Tools as JSON" aria-invalid=${problem ? "true" : undefined} placeholder=${'[{"name": "weather", "parameters": {"type": "object", ...}}]'} value=${asJson} onInput=${(e) => write(e.target.value)}></textarea>
        ${problem && html`<p class="hint bad" role="alert">${problem}</p>`}`
      : html`${list.map((tool, i) => html`<${Tool} key=${i} tool=${tool} model=${model} onChange=${(patch) => change(i, patch)} onRemove=${() => onChange(list.filter((_, j) => j !== i))} />`)}
        <button type="button" class="quiet small" onClick=${add}><${Icon} name="plus" />Add a tool</button>`}
  </div>`;
}

function Tool({ tool, model, onChange, onRemove }) {
  const nameProblem = /^[\w.-]{1,64}$/.test(tool.name) ? "" : "Letters, digits, _ or -";
  const [fresh] = useState(/^tool_\d+$/.test(tool.name));
  return html`<details class="tool" open=${fresh}>
    <summary><${Icon} name="right" /><code>${tool.name || "no name"}</code>${tool.on === false && html`<small>off</small>`}</summary>
    <label class="tick"><input type="checkbox" checked=${tool.on !== false} onChange=${(e) => onChange({ on: e.target.checked })} />offered to the model</label>
    <label>Name<input class="mono" spellcheck="false" aria-label="Tool's name" aria-invalid=${nameProblem ? "true" : undefined} value=${tool.name} onInput=${(e) => onChange({ name: e.target.value.trim() })} /></label>
    ${nameProblem && html`<p class="hint bad">${nameProblem}</p>`}
    <label>What it does<input aria-label="What the tool does" value=${tool.description} onInput=${(e) => onChange({ description: e.target.value })} /></label>
    <${ObjectEditor} schema=${tool.parameters} label="Parameters" what="Parameter" onChange=${(parameters) => onChange({ parameters })} />
    <${TestCall} tool=${tool} model=${model} />
    <div class="buttons"><button type="button" class="quiet small" onClick=${onRemove}>Remove the tool</button></div>
  </details>`;
}

// The model is made to call this tool once: do the arguments meet the schema?
function TestCall({ tool, model }) {
  const [text, setText] = useState(null);
  const [found, setFound] = useState(null);
  const asked = text ?? `Use ${tool.name} with an example.`;
  const test = async () => {
    setFound({ busy: true });
    const body = { model, messages: [{ role: "user", content: asked }], tools: [asTool(tool)], tool_choice: { type: "function", function: { name: tool.name } }, max_tokens: 300 };
    try {
      const answer = await (await call("v1/chat/completions", { body })).json();
      const made = answer.choices[0].message.tool_calls?.[0]?.function.arguments;
      setFound(made === undefined ? { bad: "The model answered without calling the tool.", text: answer.choices[0].message.content } : judged(made, tool.parameters));
    } catch (error) {
      setFound({ bad: explain(error).text });
    }
  };
  return html`<div class="test-call">
    <label>Test with<input aria-label="Question of the test call" value=${asked} onInput=${(e) => setText(e.target.value)} /></label>
    <button type="button" class="quiet small" disabled=${!model || found?.busy} onClick=${test}><${Icon} name="play" />${found?.busy ? "Calling ..." : "Test call"}</button>
    ${found && !found.busy && html`<div class="tested" role="status">
      ${found.text && html`<pre tabindex="0" aria-label="Arguments of the test call">${found.text}</pre>`}
      <p class=${found.bad ? "hint bad" : "hint good"}>${found.bad || "The arguments meet the parameters' schema."}</p>
    </div>`}
  </div>`;
}

function judged(text, schema) {
  try {
    const value = JSON.parse(text);
    const wrong = faults(value, schema);
    return { text: pretty(value), bad: wrong.map((w) => `${w.path} ${w.text}`).join("; ") };
  } catch {
    return { text, bad: "The arguments are no JSON." };
  }
}
