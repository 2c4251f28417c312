// Ollama's JavaScript client against a running server: node tests/clients/ollama_node.mjs URL KEY. Run by tests/clients/run.py.
import assert from "node:assert";
import { Ollama } from "ollama";

const [url, key] = process.argv.slice(2);
const client = new Ollama({ host: url.replace(/\/v1$/, ""), headers: { Authorization: `Bearer ${key}` } });
const options = { temperature: 0, num_predict: 60 };
const messages = [{ role: "user", content: "What is the capital of France?" }];
const names = async (found) => new Set((await found).models.map((each) => each.model));
const collected = async (stream) => {
  const parts = [];
  for await (const part of await stream) parts.push(part);
  return parts;
};
const refused = async (asked) => {
  const error = await asked().then(() => null, (caught) => caught);
  assert.ok(error && [400, 404, 501].includes(error.status_code) && error.message, String(asked));
};

assert.ok((await names(client.list())).has("demo:latest") && (await names(client.ps())).has("demo:latest"));
assert.ok((await client.show({ model: "demo" })).capabilities.includes("tools"));
assert.ok((await client.version()).version);
const whole = await client.chat({ model: "demo", messages, options });
assert.ok(whole.message.content.includes("Paris") && whole.done && whole.eval_count);
const parts = await collected(client.chat({ model: "demo", messages, options, stream: true }));
assert.equal(parts.map((part) => part.message.content).join(""), whole.message.content);
assert.equal((await client.generate({ model: "demo", prompt: messages[0].content, options })).response, whole.message.content);
const raw = await collected(client.generate({ model: "demo", prompt: "The capital of France is", raw: true, stream: true, options }));
assert.ok(raw.map((part) => part.response).join("").trim().startsWith("Paris"));

const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather",
    parameters: { type: "object", properties: { city: { type: "string", description: "the city" } }, required: ["city"] },
  },
};
const ask = [{ role: "user", content: "What's the weather in Paris?" }];
const called = (await client.chat({ model: "demo", messages: ask, tools: [tool], options })).message;
assert.deepEqual(called.tool_calls.map((call) => call.function.arguments), [{ city: "Paris" }]);
const answer = { role: "tool", tool_name: "get_weather", content: "22 degrees and sunny in Paris" };
const told = await client.chat({ model: "demo", messages: [...ask, called, answer], tools: [tool], options });
assert.ok(told.message.content.includes("22"));
const format = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] };
const tom = [{ role: "user", content: "Extract name and age as JSON: Tom is 31." }];
assert.deepEqual(JSON.parse((await client.chat({ model: "demo", messages: tom, format, options })).message.content), { name: "Tom", age: 31 });
assert.equal((await client.embed({ model: "demo", input: ["one", "two"] })).embeddings.length, 2);
const together = await Promise.all(Array.from({ length: 8 }, () => client.chat({ model: "demo", messages, options })));
assert.equal(new Set(together.map((each) => each.message.content)).size, 1);
await refused(() => client.chat({ model: "nope", messages }));
await refused(() => client.pull({ model: "x" }));

// Models that are pulled from a folder of the server, made, shown, used, copied and deleted.
const steps = await collected(client.pull({ model: "weights", stream: true }));
assert.equal(steps.at(-1).status, "success");
const made = { model: "short", from: "weights", system: "Answer briefly.", parameters: { temperature: 0, num_predict: 20 } };
assert.equal((await client.create(made)).status, "success");
const listed = await names(client.list());
for (const name of ["demo:latest", "weights:latest", "short:latest"]) assert.ok(listed.has(name), name);
assert.ok((await client.show({ model: "short" })).modelfile.includes("SYSTEM Answer briefly."));
const spoken = await client.chat({ model: "short", messages, keep_alive: "10m" });
assert.ok(spoken.message.content.includes("Paris") && spoken.eval_count <= 20);
assert.ok((await names(client.ps())).has("short:latest"));
assert.ok((await client.generate({ model: "short", prompt: "", keep_alive: 0 })).done);
assert.equal((await client.copy({ source: "short", destination: "team/short:v1" })).status, "success");
assert.equal((await client.chat({ model: "team/short:v1", messages })).message.content, spoken.message.content);
const leaving = client.chat({ model: "demo", messages, stream: true, options: { num_predict: 2000, temperature: 1 } });
(await leaving).abort();
for (const model of ["short", "team/short:v1", "weights"]) assert.equal((await client.delete({ model })).status, "success");
assert.deepEqual(await names(client.list()), new Set(["demo:latest"]));
await refused(() => client.delete({ model: "short" }));
await refused(() => client.copy({ source: "short", destination: "x" }));
await refused(() => client.create({ model: "x", from: "../weights" }));
await refused(() => client.push({ model: "demo" }));
console.log("ollama (JavaScript) ok");
