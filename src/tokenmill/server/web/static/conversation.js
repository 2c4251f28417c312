// What is said. Owns: the open conversation, asking the server, growing answers, and keeping all of it in the browser.
//
// A conversation is {id, title, created, updated, messages}. A message has a role and `content`; an assistant's has
// `answers` instead, of which `at` is shown: {content, reasoning, tools, finish, error, stats}.
import { call, events, explain, getJson } from "./api.js";
import * as db from "./db.js";
import { requestFields, settings } from "./settings.js";
import { kept, makeStore } from "./store.js";

const lastModel = kept("localStorage", "tokenmill.model", "");
export const chat = makeStore({ list: [], open: fresh(), models: [], model: lastModel.read(), problem: null, said: "" });

const running = new Map(); // answer -> AbortController
const growing = new Map(); // answer -> functions that draw it
const forgotten = new Set(); // ids of deleted conversations: what still runs for them must not bring them back
const SAVE_MS = 2000; // a growing answer is kept this often, in case the page is closed

function fresh() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", created: Date.now(), updated: Date.now(), messages: [] };
}

const redraw = () => chat.set({});
const newId = () => Math.random().toString(36).slice(2);

// ---------------------------------------------------------------- models and the list

export async function loadModels() {
  try {
    const models = (await getJson("v1/models")).data;
    const model = models.some((m) => m.id === chat.get().model) ? chat.get().model : (models[0]?.id ?? "");
    chat.set({ models, model, problem: null });
  } catch (error) {
    chat.set({ problem: error.status === 401 ? null : explain(error) });
  }
}

export function chooseModel(model) {
  lastModel.write(model);
  chat.set({ model });
}

export const loadList = async () => chat.set({ list: await db.list() });

export const begin = () => chat.set({ open: fresh() });

export async function openConversation(id) {
  if (id === chat.get().open.id) return;
  const running = [...working.values()].find((c) => c.id === id);
  const found = running ?? (await db.load(id));
  if (found) chat.set({ open: found });
  else await loadList();
}

export async function rename(id, title) {
  const conversation = id === chat.get().open.id ? chat.get().open : await db.load(id);
  if (!conversation || !title.trim()) return;
  conversation.title = title.trim();
  await keep(conversation);
}

// -> a function that brings it back.
export async function forget(id) {
  const conversation = [...working.values(), chat.get().open].find((c) => c.id === id) ?? (await db.load(id));
  forgotten.add(id);
  const answer = runningIn(conversation);
  if (answer) running.get(answer).abort();
  await db.remove(id);
  if (id === chat.get().open.id) begin();
  await loadList();
  return async () => {
    forgotten.delete(id);
    await db.save(conversation);
    await loadList();
    chat.set({ open: conversation });
  };
}

export const whole = async (id) => (id === chat.get().open.id ? chat.get().open : db.load(id));

async function keep(conversation) {
  if (forgotten.has(conversation.id)) return;
  conversation.updated = Date.now();
  try {
    await db.save(conversation);
  } catch (error) {
    chat.set({ said: `The conversation could not be kept: ${error.message}` });
  }
  await loadList();
}

// ---------------------------------------------------------------- answers

const working = new Map(); // answer -> its conversation
export const isRunning = (answer) => running.has(answer);
export const runningIn = (conversation) => [...working].find(([, c]) => c.id === conversation.id)?.[0];

export function onGrowth(answer, draw) {
  const draws = growing.get(answer) ?? new Set();
  growing.set(answer, draws.add(draw));
  return () => draws.delete(draw);
}

function emptyAnswer(content = "") {
  return { content, reasoning: "", tools: [], finish: "", error: null, stats: null };
}

// A model's thoughts that came within the text instead of in a field of their own.
export function split(answer) {
  const text = answer.content;
  const opens = /^\s*<think>/.exec(text);
  if (!opens) return { reasoning: answer.reasoning, content: text, thinking: false };
  const end = text.indexOf("</think>");
  const thought = text.slice(opens[0].length, end < 0 ? undefined : end).trim();
  return { reasoning: answer.reasoning + thought, content: end < 0 ? "" : text.slice(end + 8).trimStart(), thinking: end < 0 };
}

export function ask(text) {
  const { open } = chat.get();
  if (runningIn(open) || !text.trim()) return;
  if (!open.title) open.title = text.trim().split("\n")[0].slice(0, 60);
  open.messages.push({ id: newId(), role: "user", content: text });
  answerNext(open);
}

export function giveResults(message, results) {
  const { open } = chat.get();
  const calls = message.answers[message.at].tools;
  open.messages = open.messages.slice(0, open.messages.indexOf(message) + 1);
  calls.forEach((c, i) => open.messages.push({ id: newId(), role: "tool", content: results[i], callId: c.id, name: c.name }));
  answerNext(open);
}

// Ask again: the old answer stays beside the new one, what followed it is dropped.
export function regenerate(message) {
  const { open } = chat.get();
  if (runningIn(open)) return;
  open.messages = open.messages.slice(0, open.messages.indexOf(message) + 1);
  const { error, content, tools } = message.answers[message.at];
  if (error && !content && !tools.length) message.answers.splice(message.at, 1); // nothing came: nothing to keep
  message.answers.push(emptyAnswer());
  message.at = message.answers.length - 1;
  return run(open, message);
}

// Change one's own words: the conversation goes on from there.
export function edit(message, text) {
  const { open } = chat.get();
  if (runningIn(open) || !text.trim()) return;
  open.messages = open.messages.slice(0, open.messages.indexOf(message));
  open.messages.push({ id: newId(), role: "user", content: text });
  answerNext(open);
}

// Let an answer that was cut go on where it ended.
export function goOn(message) {
  const { open } = chat.get();
  if (runningIn(open)) return;
  message.answers[message.at].finish = "";
  return run(open, message, true);
}

export function stop() {
  const answer = runningIn(chat.get().open);
  if (answer) running.get(answer).abort();
}

export function show(message, at) {
  message.at = at;
  keep(chat.get().open);
  redraw();
}

function answerNext(conversation) {
  const message = { id: newId(), role: "assistant", at: 0, answers: [emptyAnswer()] };
  conversation.messages.push(message);
  return run(conversation, message);
}

async function run(conversation, message, goesOn = false) {
  const answer = message.answers[message.at];
  const controller = new AbortController();
  running.set(answer, controller);
  working.set(answer, conversation);
  answer.error = null;
  redraw();
  keep(conversation);
  const saving = setInterval(() => forgotten.has(conversation.id) || db.save(conversation).catch(() => {}), SAVE_MS);
  try {
    await receive(request(conversation, message, goesOn), answer, controller.signal);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = { ...explain(error), retryAfter: error.retryAfter || 0, status: error.status };
  } finally {
    running.delete(answer);
    working.delete(answer);
    clearInterval(saving);
    growing.get(answer)?.forEach((draw) => draw(true));
    growing.delete(answer);
    const tokens = answer.stats?.output;
    chat.set({ said: answer.error ? answer.error.title : `The answer has ended${tokens ? ` after ${tokens} tokens` : ""}.` });
    await keep(conversation);
  }
}

function request(conversation, message, goesOn) {
  const { system, ...sampling } = settings.get();
  const before = conversation.messages.slice(0, conversation.messages.indexOf(message) + (goesOn ? 1 : 0));
  const messages = before.map(apiMessage);
  if (system?.trim()) messages.unshift({ role: "system", content: system });
  const body = { model: chat.get().model, messages, stream: true, stream_options: { include_usage: true }, ...requestFields(sampling) };
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

function apiMessage(message) {
  if (message.role === "tool") return { role: "tool", content: message.content, tool_call_id: message.callId };
  if (message.role !== "assistant") return { role: message.role, content: message.content };
  const answer = message.answers[message.at];
  const found = { role: "assistant", content: split(answer).content };
  if (answer.tools.length) {
    found.tool_calls = answer.tools.map((t) => ({ id: t.id, type: "function", function: { name: t.name, arguments: t.arguments } }));
  }
  return found;
}

async function receive(body, answer, signal) {
  const began = performance.now();
  const stats = { model: body.model, request: "", chunks: 0, output: 0, prompt: 0, cached: 0, ttft: 0, seconds: 0 };
  answer.stats = stats;
  const response = await call("v1/chat/completions", { body, signal });
  let frame = 0;
  const draw = () => {
    frame = 0;
    growing.get(answer)?.forEach((each) => each(false));
  };
  try {
    for await (const batch of events(response)) {
      const now = performance.now() - began;
      for (const event of batch) take(event, answer, stats, now);
      if (!frame && batch.length) frame = requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(frame);
    stats.output ||= stats.chunks;
  }
}

function take(event, answer, stats, now) {
  stats.request ||= event.id;
  if (event.usage) {
    stats.output = event.usage.completion_tokens;
    stats.prompt = event.usage.prompt_tokens;
    stats.cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = event.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) answer.reasoning += thought;
  if (delta.content) answer.content += delta.content;
  for (const part of delta.tool_calls ?? []) takeCall(part, answer.tools);
  if (thought || delta.content || delta.tool_calls) {
    stats.ttft ||= now;
    stats.seconds = (now - stats.ttft) / 1000;
    stats.chunks += 1;
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function takeCall(part, tools) {
  const tool = (tools[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
  if (part.id) tool.id = part.id;
  if (part.function?.name) tool.name += part.function.name;
  if (part.function?.arguments) tool.arguments += part.function.arguments;
}

// ---------------------------------------------------------------- taking it along

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  for (const message of conversation.messages) {
    const said = message.role === "assistant" ? message.answers[message.at] : message;
    const calls = (said.tools ?? []).map((t) => `\n\n\`\`\`json\n${JSON.stringify({ tool: t.name, arguments: t.arguments })}\n\`\`\``);
    const text = message.role === "assistant" ? split(said).content : said.content;
    parts.push(`## ${message.role === "user" ? "You" : message.role === "tool" ? `Tool ${message.name}` : "Assistant"}\n\n${text}${calls.join("")}`);
  }
  return `${parts.join("\n\n")}\n`;
}
