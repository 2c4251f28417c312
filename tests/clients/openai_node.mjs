// The Node SDK against a running server: node tests/clients/openai_node.mjs URL [KEY] (npm install openai first).
import OpenAI from "openai";
import assert from "node:assert";

const [url, key = "none"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Hello" }];
const body = { model, messages, max_tokens: 10, temperature: 0 };
const whole = await client.chat.completions.create(body);
let text = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.total_tokens, whole.usage.total_tokens);
const completion = await client.completions.create({ model, prompt: ["One", "Two"], max_tokens: 3, logprobs: 1 });
assert.equal(completion.choices.length, 2);
const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
assert.equal(vectors.data.length, 2);
await assert.rejects(client.chat.completions.create({ ...body, model: "missing" }), (e) => e.status === 404);
await assert.rejects(client.chat.completions.create({ ...body, temperature: -1 }), (e) => e.status === 400 && e.param === "temperature");
const runner = client.chat.completions.stream(body);
assert.equal((await runner.finalChatCompletion()).choices[0].message.content, text);
console.log("openai (node) ok");
