// The Node SDK against a running server: node tests/clients/openai_node.mjs URL KEY. Run by tests/clients/run.py.
import OpenAI from "openai";
import assert from "node:assert";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
assert.equal((await client.models.retrieve(model)).id, model);

const messages = [{ role: "system", content: "Be brief." }, { role: "user", content: "Tell me about the sea." }];
const body = { model, messages, max_tokens: 10, temperature: 0, seed: 3 };
const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"] };

// field: what is sent, what must hold of the answer
const fields = {
  plain: [{}, (a) => a.choices[0].message.role === "assistant"],
  penalties: [{ frequency_penalty: 0.5, presence_penalty: 0.5, repetition_penalty: 1.1 }, () => true],
  sampling: [{ temperature: 0.9, top_p: 0.9, top_k: 20, min_p: 0.02 }, () => true],
  n: [{ n: 3, temperature: 1 }, (a) => a.choices.length === 3],
  stop: [{ stop: ["e"] }, (a) => !a.choices[0].message.content.includes("e")],
  max_completion_tokens: [{ max_tokens: undefined, max_completion_tokens: 4 }, (a) => a.usage.completion_tokens <= 4],
  logprobs: [{ logprobs: true, top_logprobs: 2 }, (a) => a.choices[0].logprobs.content[0].top_logprobs.length === 2],
  logit_bias: [{ logit_bias: { 70: 100 }, return_token_ids: true }, (a) => new Set(a.choices[0].token_ids).size === 1],
  response_format: [
    { response_format: { type: "json_schema", json_schema: { name: "x", schema } }, max_tokens: 40 },
    (a) => a.choices[0].message.content.trimStart().startsWith("{"),
  ],
  structured_outputs: [{ structured_outputs: { choice: ["red", "blue"] } }, (a) => ["red", "blue"].includes(a.choices[0].message.content)],
  user: [{ user: "me", priority: 1, cache_salt: "me", request_id: "mine" }, (a) => a.id === "chatcmpl-mine"],
};
for (const [name, [extra, check]] of Object.entries(fields)) {
  const whole = await client.chat.completions.create({ ...body, ...extra });
  assert.ok(check(whole), name);
  const said = {};
  let usage = null;
  const stream = await client.chat.completions.create({ ...body, ...extra, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    for (const choice of chunk.choices) said[choice.index] = (said[choice.index] ?? "") + (choice.delta.content ?? "");
    usage = chunk.usage ?? usage;
  }
  assert.deepEqual(said, Object.fromEntries(whole.choices.map((c) => [c.index, c.message.content])), name);
  assert.equal(usage.total_tokens, whole.usage.total_tokens, name);
}

const runner = client.chat.completions.stream(body);
const whole = await client.chat.completions.create(body);
assert.equal((await runner.finalChatCompletion()).choices[0].message.content, whole.choices[0].message.content);

const completion = await client.completions.create({ model, prompt: ["One", "Two"], max_tokens: 3, logprobs: 1, echo: true });
assert.equal(completion.choices.length, 2);
assert.ok(completion.choices[0].text.startsWith("One"));
let text = "";
for await (const chunk of await client.completions.create({ model, prompt: "One", max_tokens: 5, temperature: 0, stream: true })) {
  text += chunk.choices[0]?.text ?? "";
}
assert.equal(text, (await client.completions.create({ model, prompt: "One", max_tokens: 5, temperature: 0 })).choices[0].text);

const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
assert.equal(vectors.data.length, 2);
assert.equal((await client.embeddings.create({ model, input: "a", dimensions: 4 })).data[0].embedding.length, 4);

// a stream that the client leaves, and errors with their shape
const left = await client.chat.completions.create({ ...body, max_tokens: 500, stream: true });
for await (const _ of left) break;
const cases = [
  [{ ...body, model: "missing" }, OpenAI.NotFoundError, "model"],
  [{ ...body, temperature: -1 }, OpenAI.BadRequestError, "temperature"],
  [{ ...body, messages: [] }, OpenAI.BadRequestError, "messages"],
];
for (const [asked, kind, param] of cases) {
  for (const stream of [false, true]) {
    await assert.rejects(client.chat.completions.create({ ...asked, stream }), (e) => e instanceof kind && e.param === param);
  }
}
await assert.rejects(new OpenAI({ baseURL: url, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
console.log("openai (node) ok");
