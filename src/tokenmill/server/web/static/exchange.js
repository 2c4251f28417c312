// Conversations as files. Owns: writing our own JSON, Open WebUI's, OpenAI's and Markdown, and reading the first three and lists
// of messages. Branches are kept wherever the format has them. Knows nothing of the page or the server.
import { add, emptyAnswer, emptyConversation, path, remember, split, spoken, upgrade } from "./tree.js";

export const FORMATS = {
  own: { label: "tokenmill", hint: "everything, to be read back here", write: (all) => ({ format: "tokenmill", version: 2, conversations: all }) },
  openwebui: { label: "Open WebUI", hint: "chats with all branches", write: (all) => all.map(toOpenWebUI) },
  openai: { label: "OpenAI", hint: "as conversations.json of an account's export", write: (all) => all.map(toOpenAI) },
};

const seconds = (ms) => Math.round(ms) / 1000;
const text = (node) => (node.role === "assistant" ? split(node).content : node.role === "user" ? spoken(node) : node.content);

function toOpenWebUI(conversation) {
  const messages = {};
  for (const node of Object.values(conversation.nodes)) {
    messages[node.id] = { id: node.id, parentId: node.parent, childrenIds: [...node.children], role: node.role, content: text(node), timestamp: Math.floor(node.at / 1000), ...(node.role === "assistant" ? { model: node.model, done: true } : {}) };
  }
  const models = [...new Set(Object.values(conversation.nodes).map((n) => n.model).filter(Boolean))];
  return {
    id: conversation.id, title: conversation.title, created_at: Math.floor(conversation.created / 1000), updated_at: Math.floor(conversation.updated / 1000), pinned: false, archived: false, meta: {},
    chat: { id: conversation.id, title: conversation.title, models, params: {}, timestamp: conversation.created, history: { messages, currentId: conversation.leaf }, messages: path(conversation).map((n) => messages[n.id]) },
  };
}

function toOpenAI(conversation) {
  const top = `root-${conversation.id}`;
  const mapping = { [top]: { id: top, message: null, parent: null, children: [...conversation.roots] } };
  for (const node of Object.values(conversation.nodes)) {
    const author = { role: node.role, name: node.name ?? null, metadata: {} };
    const metadata = node.role === "assistant" && node.model ? { model_slug: node.model } : {};
    mapping[node.id] = {
      id: node.id, parent: node.parent ?? top, children: [...node.children],
      message: { id: node.id, author, create_time: seconds(node.at), content: { content_type: "text", parts: [text(node)] }, status: "finished_successfully", end_turn: true, weight: 1, metadata, recipient: "all" },
    };
  }
  return { id: conversation.id, conversation_id: conversation.id, title: conversation.title, create_time: seconds(conversation.created), update_time: seconds(conversation.updated), mapping, current_node: conversation.leaf };
}

export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  for (const node of path(conversation)) {
    const calls = (node.tools ?? []).map((t) => `\n\n\`\`\`json\n${JSON.stringify({ tool: t.name, arguments: t.arguments })}\n\`\`\``);
    parts.push(`## ${node.role === "user" ? "You" : node.role === "tool" ? `Tool ${node.name}` : "Assistant"}\n\n${text(node)}${calls.join("")}`);
  }
  return `${parts.join("\n\n")}\n`;
}

// ---------------------------------------------------------------- reading

// A file's text -> conversations with ids of their own; throws an Error that a person can read.
export function readFile(source) {
  const trimmed = source.trim();
  let data;
  try {
    data = JSON.parse(trimmed);
  } catch {
    data = lines(trimmed);
  }
  const found = each(data).map(one).filter((c) => c.leaf !== null);
  if (!found.length) throw new Error("There is no conversation in this file.");
  return found;
}

function lines(source) {
  try {
    return source.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
  } catch {
    throw new Error("This file is not JSON. Conversations come as JSON of tokenmill, Open WebUI or OpenAI.");
  }
}

function each(data) {
  if (data?.format === "tokenmill") return Array.isArray(data.conversations) ? data.conversations : [];
  if (Array.isArray(data)) return data.length && data.every((m) => m && typeof m.role === "string" && !m.nodes) ? [{ messages: data }] : data;
  return [data];
}

function one(item) {
  if (isObject(item?.nodes)) return own(item);
  if (isObject(item?.mapping)) return fromOpenAI(item);
  const history = item?.chat?.history ?? item?.history;
  if (isObject(history?.messages)) return fromOpenWebUI(item, history);
  const messages = item?.chat?.messages ?? item?.messages;
  if (Array.isArray(messages)) return messages.some((m) => Array.isArray(m?.answers)) ? own(upgrade({ ...emptyConversation(), title: item.title, messages: messages.filter((m) => isObject(m) && (m.role !== "assistant" || Array.isArray(m.answers))) })) : fromMessages(item, messages);
  throw new Error("This JSON is no conversation that is known here (tokenmill, Open WebUI, OpenAI, or a list of messages).");
}

const ROLES = ["user", "assistant", "tool"];
const STATS = ["chunks", "output", "prompt", "cached", "ttft", "thought", "seconds"];
const isObject = (found) => Boolean(found) && typeof found === "object";

// Figures are numbers, and the name of a request is a text.
function stats(found) {
  if (!isObject(found)) return null;
  const { first, queue, rate } = found.engine ?? {};
  const engine = isObject(found.engine) ? { first: number(first), queue: number(queue), rate: number(rate) || null } : null;
  return { request: words(found.request), engine, ...Object.fromEntries(STATS.map((name) => [name, number(found[name])])) };
}

// Only what we know is taken, so that a foreign file cannot bring anything else.
function own(item) {
  const made = begun(item.title, item.created, item.updated);
  copyTree(made, Object.values(item.nodes), (n) => (ROLES.includes(n.role) ? {
    ...(n.role === "assistant" ? { ...emptyAnswer(), reasoning: words(n.reasoning), tools: tools(n.tools), finish: words(n.finish), model: words(n.model), stats: stats(n.stats) } : {}),
    role: n.role, content: words(n.content), at: number(n.at),
    ...(n.role === "tool" ? { name: words(n.name), callId: words(n.callId) } : {}),
    ...(Array.isArray(n.files) ? { files: n.files.map((f) => ({ name: words(f?.name), text: words(f?.text) })) } : {}),
  } : null), (n) => n.parent, item.leaf);
  return made;
}

function fromOpenWebUI(item, history) {
  const made = begun(item.title ?? item.chat?.title, number(item.created_at) * 1000 || item.chat?.timestamp, number(item.updated_at) * 1000);
  copyTree(made, Object.values(history.messages), (m) => said(m.role, m.content, number(m.timestamp) * 1000, m.model), (m) => m.parentId ?? null, history.currentId);
  return made;
}

function fromOpenAI(item) {
  const made = begun(item.title, number(item.create_time) * 1000, number(item.update_time) * 1000);
  copyTree(made, Object.values(item.mapping), ({ message }) => {
    if (!message || message.metadata?.is_visually_hidden_from_conversation) return null;
    const parts = Array.isArray(message.content?.parts) ? message.content.parts : [message.content?.text ?? message.content?.result ?? ""];
    const content = parts.map((p) => (typeof p === "string" ? p : words(p?.text ?? (p ? "[attachment]" : "")))).join("\n").trim();
    const role = message.author?.role;
    return content || role === "user" ? said(role, content, number(message.create_time) * 1000, message.metadata?.model_slug) : null;
  }, (n) => n.parent ?? null, item.current_node);
  return made;
}

function fromMessages(item, messages) {
  const made = begun(item.title, item.created, item.updated);
  let parent = null;
  for (const message of messages) {
    const node = said(message?.role, content(message?.content), 0, "");
    if (!node) continue;
    if (node.role === "assistant") node.tools = tools((Array.isArray(message.tool_calls) ? message.tool_calls : []).map((c) => ({ id: c?.id, ...c?.function })));
    if (node.role === "tool") Object.assign(node, { name: words(message.name), callId: words(message.tool_call_id) });
    parent = add(made, parent, node).id;
  }
  if (!made.title) made.title = titleOf(made);
  return made;
}

const content = (found) => (Array.isArray(found) ? found.map((p) => words(p?.text)).join("\n") : found);
const words = (found) => (typeof found === "string" ? found : found === null || found === undefined ? "" : JSON.stringify(found));
const number = (found) => (Number.isFinite(found) && found > 0 && found < 8.64e15 ? found : 0); // the last moment that has a date
const tools = (found) => (Array.isArray(found) ? found.map((t) => ({ id: words(t?.id), name: words(t?.name), arguments: words(t?.arguments) })) : []);
const titleOf = (c) => path(c).find((n) => n.role === "user")?.content.split("\n")[0].slice(0, 60) ?? "";

// A message of another program; instructions (system, developer) are not part of a conversation here.
function said(role, found, at, model) {
  if (role === "user" || role === "tool") return { role, content: words(found), at: number(at), ...(role === "tool" ? { name: "tool", callId: "" } : {}) };
  return role === "assistant" ? { ...emptyAnswer(words(found)), finish: "stop", at: number(at), model: words(model) } : null;
}

function begun(title, created, updated) {
  const made = emptyConversation();
  made.title = words(title).slice(0, 200);
  made.created = number(created) || made.created;
  made.updated = number(updated) || made.created;
  return made;
}

// Nodes under their parents; one that says nothing here gives its children to its own parent. Cycles are cut.
function copyTree(made, items, read, parentOf, leaf) {
  const byId = new Map(items.filter((i) => i && typeof i === "object").map((i) => [i.id, i]));
  const done = new Map(); // id -> new id, or null for what is above the first message
  const place = (id, trail) => {
    if (id === null || id === undefined || !byId.has(id) || trail.has(id)) return null;
    if (done.has(id)) return done.get(id);
    const above = [];
    for (let at = id; at !== null && at !== undefined && byId.has(at) && !done.has(at) && !trail.has(at); at = parentOf(byId.get(at)) ?? null) {
      trail.add(at);
      above.push(at);
    }
    for (const at of above.reverse()) {
      const parent = done.get(parentOf(byId.get(at)) ?? "") ?? null;
      const node = read(byId.get(at));
      done.set(at, node ? add(made, parent, { ...node, id: undefined, at: node.at || made.created }).id : parent);
    }
    return done.get(id);
  };
  for (const item of byId.values()) place(item.id, new Set());
  made.leaf = done.get(leaf) ?? made.leaf;
  remember(made);
  if (!made.title) made.title = titleOf(made);
}
