// What is said. Owns: the open conversation, its list, asking the server, and keeping all of it in the browser.
import { explain, getJson } from "./api.js";
import * as db from "./db.js";
import { FORMATS, readFile, toMarkdown } from "./exchange.js";
import { requestFields, settings } from "./settings.js";
import { kept, makeStore } from "./store.js";
import { isRunning, measure, run, stopAnswer } from "./stream.js";
import { add, choose, emptyAnswer, emptyConversation, fork, path, prune, remember, siblings, split, spoken, takeOver, wordsOf } from "./tree.js";

const lastModel = kept("localStorage", "tokenmill.model", "");
export const chat = makeStore({ list: [], open: emptyConversation(), models: [], model: lastModel.read(), card: null, problem: null, said: "", editing: "", unkept: "", fleeting: false });

const working = new Map(); // answer -> its conversation
const forgotten = new Set(); // ids of deleted conversations: what still runs for them must not bring them back
const SAVE_MS = 2000; // a growing answer is kept this often, in case the page is closed

const redraw = () => chat.set({});
export const shownPath = () => path(chat.get().open);
export const variants = (node) => siblings(chat.get().open, node);
export const runningIn = (conversation) => [...working].find(([, c]) => c.id === conversation.id)?.[0];

// ---------------------------------------------------------------- models and the list

export async function loadModels() {
  try {
    const before = chat.get().model;
    const { data: models } = await getJson("v1/models");
    const model = models.some((m) => m.id === before) ? before : (models[0]?.id ?? "");
    const card = await getJson(`v1/card?model=${encodeURIComponent(model)}`);
    if (chat.get().model !== before) return; // another one was chosen meanwhile, and asks for itself
    chat.set({ models, model, card, problem: null });
  } catch (error) {
    chat.set({ problem: error.status === 401 ? null : explain(error) });
  }
}

export function chooseModel(model) {
  lastModel.write(model);
  chat.set({ model });
  void loadModels(); // its card is another one
}

export const loadList = async () => chat.set({ list: await db.list(), fleeting: await db.forbidden() });

// Several tabs may show one conversation: each hears what the others keep, so that none overwrites it.
const tabs = globalThis.BroadcastChannel ? new BroadcastChannel("tokenmill.conversations") : null;

async function heard({ data: id }) {
  await loadList();
  const mine = inMemory(id);
  const found = mine && (await db.load(id));
  if (!found) return;
  if (runningIn(mine)) takeOver(mine, found);
  else if (mine === chat.get().open) chat.set({ open: found });
  redraw();
}
tabs?.addEventListener("message", heard);

export const begin = () => chat.set({ open: emptyConversation(), editing: "" });

// Edit a message, or (with nothing) none.
export const editNode = (node) => chat.set({ editing: node?.id ?? "" });
export const lastQuestion = (above = null) => {
  const shown = shownPath();
  return shown.slice(0, above ? shown.indexOf(above) : undefined).findLast((node) => node.role === "user");
};

const inMemory = (id) => [...working.values(), chat.get().open].find((c) => c.id === id);
export const whole = async (id) => inMemory(id) ?? db.load(id);

export async function openConversation(id) {
  if (id === chat.get().open.id) return;
  const found = await whole(id);
  if (found) chat.set({ open: found, editing: "" });
  else await loadList();
}

export async function rename(id, title) {
  const conversation = await whole(id);
  if (!conversation || !title.trim()) return;
  conversation.title = title.trim();
  await keep(conversation, conversation.updated);
}

// -> a function that brings it back.
export async function forget(id) {
  const conversation = await whole(id);
  forgotten.add(id);
  for (const [answer, owner] of working) if (owner.id === id) stopAnswer(answer);
  await db.remove(id);
  tabs?.postMessage(id);
  if (id === chat.get().open.id) begin();
  await loadList();
  return async () => {
    forgotten.delete(id);
    await keep(conversation, conversation.updated);
    chat.set({ open: conversation });
  };
}

async function keep(conversation, updated = Date.now()) {
  if (forgotten.has(conversation.id)) return;
  conversation.updated = updated;
  try {
    await db.save(conversation);
    if (chat.get().unkept) chat.set({ unkept: "" });
    tabs?.postMessage(conversation.id);
  } catch (error) {
    chat.set({ unkept: error.name === "QuotaExceededError" ? "The browser's storage is full." : `The browser says: ${error.message}` });
  }
  await loadList();
}

export const keepAgain = () => keep(chat.get().open);

// Ids of conversations that hold all these words, anywhere.
export async function search(query) {
  const wanted = query.toLocaleLowerCase().split(/\s+/).filter(Boolean);
  const found = new Set();
  await db.each((conversation) => {
    const text = wordsOf(inMemory(conversation.id) ?? conversation).toLocaleLowerCase();
    if (wanted.every((word) => text.includes(word))) found.add(conversation.id);
  });
  return found;
}

// ---------------------------------------------------------------- files

export async function exported(format, id = null) {
  const all = [];
  if (id === null) await db.each((conversation) => all.push(inMemory(conversation.id) ?? conversation));
  else all.push(await whole(id));
  return format === "markdown" ? all.map(toMarkdown).join("\n---\n\n") : JSON.stringify(FORMATS[format].write(all), null, 2);
}

// -> how many conversations were read; throws what a person can read.
export async function imported(text) {
  const found = readFile(text);
  try {
    for (const conversation of found) await db.save(conversation);
  } catch (error) {
    throw new Error(error.name === "QuotaExceededError" ? "The browser's storage is full: delete some conversations, or import fewer." : error.message);
  } finally {
    await loadList();
  }
  chat.set({ open: found[0] });
  return found.length;
}

export async function adopt(conversation) {
  await keep(conversation);
  chat.set({ open: conversation });
}

// ---------------------------------------------------------------- asking

export function ask(text, files = []) {
  const { open } = chat.get();
  if (runningIn(open) || (!text.trim() && !files.length)) return;
  const content = text.trim();
  if (!open.title) open.title = (content || files[0].name).split("\n")[0].slice(0, 60);
  const question = add(open, open.leaf, { role: "user", content, ...(files.length ? { files } : {}) });
  answerNext(open, question);
}

// Tools have been called: their results go back to the model.
export function giveResults(node, results) {
  const { open } = chat.get();
  if (runningIn(open)) return;
  let last = node;
  node.tools.forEach((tool, i) => {
    last = add(open, last.id, { role: "tool", name: tool.name, callId: tool.id, content: results[i] });
  });
  answerNext(open, last);
}

// Ask the same again: the old answer stays beside the new one, with all that followed it.
export function regenerate(node) {
  const { open } = chat.get();
  if (runningIn(open)) return;
  const parent = node.parent === null ? null : open.nodes[node.parent];
  if (node.error && !node.content && !node.tools.length) prune(open, node); // nothing came: nothing to keep
  answerNext(open, parent);
}

// Say it in other words: a branch of its own; the old one stays.
export function edit(node, text, files = node.files ?? []) {
  const { open } = chat.get();
  if (runningIn(open) || (!text.trim() && !files.length)) return;
  answerNext(open, add(open, node.parent, { role: "user", content: text.trim(), ...(files.length ? { files } : {}) }));
}

// What the model should have said: another version of the answer, with which the conversation goes on.
export function rewrite(node, text) {
  const { open } = chat.get();
  if (runningIn(open) || !text.trim()) return;
  show(add(open, node.parent, { ...emptyAnswer(text.trim()), model: node.model, finish: "edited" }));
}

// Let an answer that was cut go on where it ended.
export function goOn(node) {
  const { open } = chat.get();
  if (runningIn(open)) return;
  choose(open, node);
  open.leaf = node.id;
  node.finish = "";
  work(open, node, true);
}

export function stop() {
  const answer = runningIn(chat.get().open);
  if (answer) stopAnswer(answer);
}

export function show(node) {
  const { open } = chat.get();
  choose(open, node);
  keep(open, open.updated);
  redraw();
}

export function remove(node) {
  const { open } = chat.get();
  const before = structuredClone(open);
  prune(open, node);
  keep(open, open.updated);
  redraw();
  return () => {
    Object.assign(open, before);
    keep(open, open.updated);
    redraw();
  };
}

export async function branchOff(node) {
  await adopt(fork(chat.get().open, node));
}

function answerNext(conversation, parent) {
  const answer = add(conversation, parent?.id ?? null, emptyAnswer());
  remember(conversation);
  return work(conversation, answer);
}

async function work(conversation, answer, goesOn = false) {
  working.set(answer, conversation);
  const saving = setInterval(() => forgotten.has(conversation.id) || db.save(conversation).catch(() => {}), SAVE_MS);
  const began = () => {
    redraw();
    keep(conversation);
  };
  await run(answer, request(conversation, answer, goesOn), { began });
  working.delete(answer);
  clearInterval(saving);
  const tokens = answer.stats?.output;
  chat.set({ said: answer.error ? answer.error.title : `The answer has ended${tokens ? ` after ${tokens} tokens` : ""}.` });
  await keep(conversation);
  const { problem, models } = chat.get();
  if (!answer.error && (problem || !models.length)) void loadModels(); // it answers again
  await measure(answer);
  if (answer.stats?.engine) await keep(conversation, conversation.updated);
}

function request(conversation, answer, goesOn) {
  const { system, ...rest } = settings.get();
  const shown = [];
  for (let at = goesOn ? answer : conversation.nodes[answer.parent]; at; at = conversation.nodes[at.parent]) shown.unshift(apiMessage(at));
  const body = { model: chat.get().model, messages: withSystem(system, shown), ...requestFields(rest) };
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

export const withSystem = (system, messages) => (system?.trim() ? [{ role: "system", content: system }, ...messages] : messages);

export function apiMessage(node) {
  if (node.role === "tool") return { role: "tool", content: node.content, tool_call_id: node.callId };
  if (node.role !== "assistant") return { role: node.role, content: spoken(node) };
  const found = { role: "assistant", content: split(node).content };
  if (node.tools.length) found.tool_calls = node.tools.map((t) => ({ id: t.id, type: "function", function: { name: t.name, arguments: t.arguments } }));
  return found;
}

export { isRunning };
