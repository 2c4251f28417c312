// Is this JSON, and does it meet a schema? Owns: reading JSON that still grows, and the part of JSON Schema that models are given.
// Knows nothing of the page.

// How far a text is JSON: {state: "whole" | "open" | "wrong", at}; `at` is where it goes wrong.
export function readJson(text) {
  let at = 0;
  const space = () => {
    while (at < text.length && " \t\n\r".includes(text[at])) at += 1;
  };
  const stop = (state) => {
    throw { state, at };
  };
  const need = (wanted) => {
    if (at >= text.length) stop("open");
    if (text[at] !== wanted) stop("wrong");
    at += 1;
  };
  const word = (wanted) => {
    for (const letter of wanted) need(letter);
  };
  const string = () => {
    need('"');
    for (;;) {
      if (at >= text.length) stop("open");
      const c = text[at];
      if (c < " ") stop("wrong");
      at += 1;
      if (c === '"') return;
      if (c !== "\\") continue;
      if (at >= text.length) stop("open");
      const kind = text[at];
      if (!'"\\/bfnrtu'.includes(kind)) stop("wrong");
      at += 1;
      for (let i = 0; kind === "u" && i < 4; i += 1) {
        if (at >= text.length) stop("open");
        if (!/[0-9a-fA-F]/.test(text[at])) stop("wrong");
        at += 1;
      }
    }
  };
  const number = () => {
    const rest = text.slice(at);
    const found = /^-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/.exec(rest);
    const begun = /^-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:[eE][+-]?\d*)?)?/.exec(rest)[0];
    if (at + begun.length >= text.length && begun !== found?.[0]) {
      at = text.length;
      stop("open");
    }
    if (!found) stop("wrong");
    at += found[0].length;
  };
  const value = (depth) => {
    if (depth > 200) stop("wrong");
    space();
    if (at >= text.length) stop("open");
    const c = text[at];
    if (c === "{" || c === "[") many(c === "{" ? "}" : "]", c === "{", depth);
    else if (c === '"') string();
    else if (c === "t") word("true");
    else if (c === "f") word("false");
    else if (c === "n") word("null");
    else number();
  };
  const many = (end, named, depth) => {
    at += 1;
    space();
    if (text[at] === end) {
      at += 1;
      return;
    }
    for (;;) {
      space();
      if (named) {
        string();
        space();
        need(":");
      }
      value(depth + 1);
      space();
      if (at >= text.length) stop("open");
      if (text[at] === end) break;
      need(",");
    }
    at += 1;
  };
  try {
    value(0);
    space();
    return { state: at < text.length ? "wrong" : "whole", at };
  } catch (found) {
    if (found.state) return found;
    throw found;
  }
}

const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : Number.isInteger(value) ? "integer" : typeof value);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const MOST = 20;

// What in `value` does not meet `schema`: [{path, text}], at most twenty.
export function faults(value, schema, root = schema, path = "", depth = 0) {
  if (schema === true || schema === undefined || depth > 60) return [];
  if (schema === false) return [{ path, text: "nothing is allowed here" }];
  const found = [];
  const say = (text, where = path) => found.length < MOST && found.push({ path: where || "the whole", text });
  const into = (inner, part, where) => found.push(...faults(inner, part, root, where, depth + 1).slice(0, MOST - found.length));
  if (schema.$ref) {
    const target = pointed(root, schema.$ref);
    if (target) into(value, target, path);
  }
  const kind = typeOf(value);
  const wanted = schema.type === undefined ? null : [schema.type].flat();
  if (wanted && !wanted.includes(kind) && !(kind === "integer" && wanted.includes("number"))) {
    say(`must be ${wanted.join(" or ")}, and is ${kind}`);
    return found;
  }
  if (schema.enum && !schema.enum.some((each) => same(each, value))) say(`must be one of ${schema.enum.map((e) => JSON.stringify(e)).join(", ").slice(0, 120)}`);
  if ("const" in schema && !same(schema.const, value)) say(`must be ${JSON.stringify(schema.const).slice(0, 80)}`);
  if (kind === "string") strings(value, schema, say);
  if (kind === "integer" || kind === "number") numbers(value, schema, say);
  if (kind === "array") {
    if (value.length < (schema.minItems ?? 0)) say(`needs at least ${schema.minItems} items`);
    if (value.length > (schema.maxItems ?? Infinity)) say(`may have at most ${schema.maxItems} items`);
    if (schema.uniqueItems && new Set(value.map((v) => JSON.stringify(v))).size < value.length) say("has the same item twice");
    const first = schema.prefixItems ?? [];
    value.forEach((item, i) => into(item, first[i] ?? (typeof schema.items === "object" || schema.items === false ? schema.items : true), `${path}[${i}]`));
  }
  if (kind === "object") objects(value, schema, say, into, path);
  for (const part of schema.allOf ?? []) into(value, part, path);
  for (const [name, text] of [["anyOf", "meets none of the alternatives"], ["oneOf", "must meet exactly one of the alternatives"]]) {
    if (!schema[name]) continue;
    const fit = schema[name].filter((part) => !faults(value, part, root, path, depth + 1).length).length;
    if (name === "anyOf" ? fit === 0 : fit !== 1) say(text);
  }
  if (schema.not !== undefined && !faults(value, schema.not, root, path, depth + 1).length) say("is what it must not be");
  return found;
}

function strings(value, schema, say) {
  const length = [...value].length;
  if (length < (schema.minLength ?? 0)) say(`needs at least ${schema.minLength} characters`);
  if (length > (schema.maxLength ?? Infinity)) say(`may have at most ${schema.maxLength} characters`);
  if (schema.pattern === undefined) return;
  try {
    if (!new RegExp(schema.pattern, "u").test(value)) say(`must match ${schema.pattern}`);
  } catch {
    // A pattern of another dialect: the server judges it.
  }
}

function numbers(value, schema, say) {
  if (value < (schema.minimum ?? -Infinity)) say(`must be at least ${schema.minimum}`);
  if (value > (schema.maximum ?? Infinity)) say(`must be at most ${schema.maximum}`);
  if (value <= (schema.exclusiveMinimum ?? -Infinity)) say(`must be more than ${schema.exclusiveMinimum}`);
  if (value >= (schema.exclusiveMaximum ?? Infinity)) say(`must be less than ${schema.exclusiveMaximum}`);
  if (schema.multipleOf > 0 && Math.abs(value / schema.multipleOf - Math.round(value / schema.multipleOf)) > 1e-9) say(`must be a multiple of ${schema.multipleOf}`);
}

function objects(value, schema, say, into, path) {
  const inner = (name) => (path ? `${path}.${name}` : name);
  for (const name of schema.required ?? []) if (!Object.hasOwn(value, name)) say("is missing", inner(name));
  for (const [name, item] of Object.entries(value)) {
    const own = schema.properties && Object.hasOwn(schema.properties, name) ? schema.properties[name] : undefined;
    if (own !== undefined) into(item, own, inner(name));
    else if (schema.additionalProperties === false && !schema.patternProperties) say("is not in the schema", inner(name));
    else if (typeof schema.additionalProperties === "object") into(item, schema.additionalProperties, inner(name));
  }
}

function pointed(root, ref) {
  if (!ref.startsWith("#")) return undefined;
  return ref.slice(1).split("/").filter(Boolean).reduce((at, part) => at?.[part.replaceAll("~1", "/").replaceAll("~0", "~")], root);
}

// A schema as somebody writes it: {schema} or {problem}.
export function readSchema(text) {
  if (!text?.trim()) return { problem: "A schema is needed, like the example." };
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    return { problem: `Not valid JSON: ${error.message}` };
  }
  if (schema?.schema && typeof schema.schema === "object" && !schema.type) schema = schema.schema; // OpenAI's wrapping
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) return { problem: "A schema is a JSON object." };
  const kinds = ["object", "array", "string", "number", "integer", "boolean", "null"];
  const bad = [schema.type ?? []].flat().find((kind) => !kinds.includes(kind));
  if (bad !== undefined) return { problem: `“${bad}” is no type of JSON (${kinds.join(", ")}).` };
  if (schema.required !== undefined && !Array.isArray(schema.required)) return { problem: "“required” must be a list of names." };
  const lost = (schema.required ?? []).find((name) => schema.properties && !Object.hasOwn(schema.properties, name));
  if (lost !== undefined) return { problem: `“${lost}” is required, but not among the properties.` };
  return { schema };
}

// What can be said of an answer that should be JSON: {tone, text, more}.
export function judge(text, schema, live) {
  const { state, at } = readJson(text);
  if (!text.trim()) return live ? { tone: "", text: "JSON: nothing yet", more: [] } : { tone: "bad", text: "No JSON: the answer is empty", more: [] };
  if (state === "wrong") return { tone: "bad", text: `No valid JSON from character ${at + 1} on`, more: [text.slice(Math.max(0, at - 20), at + 10)] };
  if (state === "open") return live ? { tone: "", text: "Valid JSON so far", more: [] } : { tone: "bad", text: "The JSON is not closed: the answer ended too early", more: [] };
  if (!schema) return { tone: "good", text: "Valid JSON", more: [] };
  const found = faults(JSON.parse(text), schema);
  return found.length ? { tone: "bad", text: `JSON that does not meet the schema (${found.length})`, more: found.map((f) => `${f.path} ${f.text}`) } : { tone: "good", text: "Valid JSON that meets the schema", more: [] };
}
