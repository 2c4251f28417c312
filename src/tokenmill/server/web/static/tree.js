// A conversation as a tree. Owns: its nodes, the path that is shown, and branching. Knows nothing of the page or the server.
//
// {id, title, created, updated, nodes, roots, leaf}: nodes by id, each {id, parent, children, role, at, ...}; the path from
// a root to `leaf` is what is shown and sent. A user's node has content and files; an assistant's has content, reasoning,
// tools, finish, error, stats and model; a tool's has name, callId and content.

let last = 0;
export const newId = () => `${Date.now().toString(36)}${(last = (last + 1) % 46656).toString(36).padStart(3, "0")}${Math.random().toString(36).slice(2, 8)}`;

export function emptyConversation() {
  const now = Date.now();
  return { id: globalThis.crypto?.randomUUID?.() ?? newId(), title: "", created: now, updated: now, nodes: {}, roots: [], leaf: null };
}

export const emptyAnswer = (content = "") => ({ role: "assistant", content, reasoning: "", tools: [], finish: "", error: null, stats: null, model: "" });

// A new node under `parent` (null: a new beginning); it becomes the end of the path.
export function add(conversation, parent, node) {
  const made = { ...node, id: node.id ?? newId(), parent, children: [], at: node.at ?? Date.now() };
  conversation.nodes[made.id] = made;
  siblingsOf(conversation, parent).push(made.id);
  conversation.leaf = made.id;
  return made;
}

const siblingsOf = (conversation, parent) => (parent === null ? conversation.roots : conversation.nodes[parent].children);

export function path(conversation) {
  const found = [];
  for (let id = conversation.leaf; id !== null && conversation.nodes[id]; id = conversation.nodes[id].parent) found.push(conversation.nodes[id]);
  return found.reverse();
}

// The nodes that are alternatives of this one, itself included, in the order in which they came.
export const siblings = (conversation, node) => siblingsOf(conversation, node.parent).map((id) => conversation.nodes[id]);

// Show this node, and under it what was shown or said last.
export function choose(conversation, node) {
  let at = node;
  while (at.children.length) {
    const shown = at.children.includes(at.shown) ? at.shown : at.children.at(-1);
    at = conversation.nodes[shown];
  }
  conversation.leaf = at.id;
  remember(conversation);
}

// Each node of the path remembers which child was shown.
export function remember(conversation) {
  for (const node of path(conversation)) if (node.parent !== null) conversation.nodes[node.parent].shown = node.id;
}

const pruned = new Set(); // ids of what was taken away here

// Take a node and all under it away.
export function prune(conversation, node) {
  const others = siblingsOf(conversation, node.parent);
  const at = others.indexOf(node.id);
  others.splice(at, 1);
  const gone = [node.id];
  while (gone.length) {
    const id = gone.pop();
    gone.push(...conversation.nodes[id].children);
    delete conversation.nodes[id];
    pruned.add(id);
  }
  if (conversation.nodes[conversation.leaf]) return;
  const next = others[Math.min(at, others.length - 1)];
  if (next) choose(conversation, conversation.nodes[next]);
  else conversation.leaf = node.parent;
}

// Nodes that another tab has added to the same conversation; what was taken away here does not come back.
export function takeOver(conversation, other) {
  let came = false;
  for (const node of Object.values(other.nodes)) {
    const known = node.parent === null || conversation.nodes[node.parent];
    if (conversation.nodes[node.id] || pruned.has(node.id) || !known) continue;
    conversation.nodes[node.id] = { ...node, children: [] };
    siblingsOf(conversation, node.parent).push(node.id);
    came = true;
  }
  return came;
}

// A new conversation of the path up to a node.
export function fork(conversation, node) {
  const made = emptyConversation();
  made.title = conversation.title;
  let parent = null;
  for (const each of path(conversation)) {
    parent = add(made, parent, structuredClone({ ...each, id: undefined, shown: undefined })).id;
    if (each.id === node.id) break;
  }
  return made;
}

// A thought that came within the text instead of in a field of its own.
export function split(answer) {
  const text = answer.content;
  const opens = /^\s*<think>/.exec(text);
  if (!opens) return { reasoning: answer.reasoning, content: text, thinking: false };
  const end = text.indexOf("</think>");
  const thought = text.slice(opens[0].length, end < 0 ? undefined : end);
  return { reasoning: answer.reasoning + thought, content: end < 0 ? "" : text.slice(end + 8).replace(/^\s+/, ""), thinking: end < 0 };
}

// What a question says with its files, as the model reads it.
export function spoken(node) {
  const files = (node.files ?? []).map((file) => `\n\n${fenced(file)}`).join("");
  return `${node.content}${files}`.trim();
}

function fenced({ name, text }) {
  const mark = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map((m) => m[0].length + 1)));
  return `File ${name}:\n${mark}\n${text.replace(/\n$/, "")}\n${mark}`;
}

// Conversations of the first version were lists of messages, with the answers of each.
export function upgrade(conversation) {
  if (!Array.isArray(conversation.messages)) return conversation;
  const made = { ...emptyConversation(), id: conversation.id, title: conversation.title, created: conversation.created, updated: conversation.updated };
  let parent = null;
  for (const message of conversation.messages) {
    if (message.role !== "assistant") {
      parent = add(made, parent, { ...message, id: undefined }).id;
      continue;
    }
    const nodes = message.answers.map((answer) => add(made, parent, { ...emptyAnswer(), ...answer, id: undefined }));
    parent = nodes[Number.isInteger(message.at) ? message.at : -1]?.id ?? nodes.at(-1)?.id ?? parent;
  }
  made.leaf = parent;
  remember(made);
  return made;
}

// What is searched in.
export const wordsOf = (conversation) => [conversation.title, ...Object.values(conversation.nodes).map((n) => `${n.content ?? ""} ${(n.files ?? []).map((f) => f.name).join(" ")}`)].join("\n");

// How two answers differ, in words.
export function alike(a, b) {
  const [one, two] = [split(a).content, split(b).content];
  if (one === two) return "Both say exactly the same.";
  let at = 0;
  while (at < one.length && one[at] === two[at]) at += 1;
  return at ? `The same for the first ${at} characters, then they part.` : "They differ from the first character on.";
}
