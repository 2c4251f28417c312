// How to sample: which settings there are and what they become in a request. Owns: their names, bounds, units and words.
// Knows nothing of the page.
import { readSchema } from "./validate.js";

// An empty value is not sent: the server then follows the model's own defaults, which are shown in its place.
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hint: "How freely it chooses: 0 always takes the likeliest token." },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.01, unit: "share", hint: "Only the likeliest tokens that make up this share together." },
  { name: "top_k", label: "Top k", min: 0, max: 200, step: 1, unit: "tokens", none: 0, noneWord: "all", hint: "Only so many tokens to choose from; 0 means all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, unit: "share", hint: "Leaves out tokens that are this much less likely than the best." },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, unit: "tokens", noneWord: "what fits", hint: "The answer is cut after so many tokens." },
  { name: "seed", label: "Seed", step: 1, noneWord: "random", hint: "The same seed and settings give the same answer." },
];
export const MORE = [
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.01, unit: "factor", hint: "Makes tokens that came before less likely; 1 changes nothing." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "Against tokens, the more often they came." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "Against tokens that came at all." },
];
export const EFFORTS = ["none", "minimal", "low", "medium", "high"];

export function changedCount(value) {
  return Object.entries(value).filter(([name, v]) => v !== undefined && v !== "" && !(Array.isArray(v) && !v.length) && name !== "schema" && !(name === "form" && v === "text")).length;
}

// Settings of earlier versions of this page.
export function migrated(value) {
  const made = { ...value };
  if (made.json) made.form = "json";
  delete made.json;
  if (typeof made.tools === "string") made.tools = readTools(made.tools).list ?? [];
  return made;
}

// The default in words, as the model's card says it.
export function defaultOf(field, card) {
  const found = card?.defaults?.[field.name];
  if (found === undefined || found === null || found === field.none) return field.noneWord ?? (found === undefined ? "default" : String(found));
  return String(Math.round(found * 1000) / 1000);
}

export function requestFields(value) {
  const fields = {};
  for (const { name } of [...NUMBERS, ...MORE]) {
    if (value[name] !== undefined && value[name] !== "") fields[name] = Number(value[name]);
  }
  const stop = (value.stop || "").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (value.reasoning_effort) fields.reasoning_effort = value.reasoning_effort;
  if (value.form === "json") fields.response_format = { type: "json_object" };
  const { schema } = value.form === "schema" ? readSchema(value.schema) : {};
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = (value.tools ?? []).filter((tool) => tool.on !== false && tool.name).map(asTool);
  if (tools.length) fields.tools = tools;
  return fields;
}

export const asTool = ({ name, description, parameters }) => ({ type: "function", function: { name, ...(description ? { description } : {}), parameters: parameters ?? { type: "object", properties: {} } } });

// What an answer is held to: undefined for plain text, null for any JSON, or the schema.
export function heldTo(value) {
  if (value.form === "json") return null;
  return value.form === "schema" ? (readSchema(value.schema).schema ?? null) : undefined;
}

// Tools as JSON, in OpenAI's form or without its wrapping: {list} or {problem}.
export function readTools(text) {
  if (!text || !text.trim()) return { list: [] };
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    return { problem: `Not valid JSON: ${error.message}` };
  }
  const list = (Array.isArray(found) ? found : [found]).map((t) => t?.function ?? t);
  const bad = list.find((t) => typeof t?.name !== "string" || !/^[\w.-]{1,64}$/.test(t.name));
  if (bad !== undefined) return { problem: "Every tool needs a name of letters, digits, _ or -." };
  return { list: list.map((t) => ({ name: t.name, description: t.description ?? "", parameters: t.parameters ?? { type: "object", properties: {} }, on: true })) };
}

// ---------------------------------------------------------------- an object's schema as rows of a form

const SIMPLE = new Set(["string", "number", "integer", "boolean"]);
const KEPT = new Set(["type", "description", "enum", "items"]);

// Rows {name, type, description, choices, required}; null: the schema says more than a form can.
export function rowsOf(schema) {
  if (!schema || (schema.type ?? "object") !== "object" || Object.keys(schema).some((k) => !["type", "properties", "required", "additionalProperties", "title", "description"].includes(k))) return null;
  const rows = [];
  for (const [name, part] of Object.entries(schema.properties ?? {})) {
    if (typeof part !== "object" || part === null || Object.keys(part).some((k) => !KEPT.has(k))) return null;
    const list = part.type === "array";
    const kind = list ? part.items?.type : part.type;
    if (!SIMPLE.has(kind) || (list && Object.keys(part.items).length > 1) || (part.enum && !part.enum.every((e) => typeof e === "string"))) return null;
    rows.push({ name, type: list ? `list of ${kind}` : kind, description: part.description ?? "", choices: (part.enum ?? []).join(", "), required: (schema.required ?? []).includes(name) });
  }
  return rows;
}

export const KINDS = ["string", "number", "integer", "boolean", "list of string", "list of number", "list of integer"];

export function schemaOf(rows) {
  const properties = {};
  for (const { name, type, description, choices } of rows) {
    if (!name) continue;
    const list = type.startsWith("list of ");
    const values = choices.split(",").map((c) => c.trim()).filter(Boolean);
    properties[name] = { type: list ? "array" : type, ...(list ? { items: { type: type.slice(8) } } : {}), ...(description ? { description } : {}), ...(values.length && type === "string" ? { enum: values } : {}) };
  }
  const required = rows.filter((r) => r.required && r.name).map((r) => r.name);
  return { type: "object", properties, ...(required.length ? { required } : {}), additionalProperties: false };
}
