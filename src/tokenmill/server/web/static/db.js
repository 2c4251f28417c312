// Conversations in this browser. Owns: an IndexedDB with a light list and whole conversations. Nothing leaves the browser.
import { takeOver, upgrade } from "./tree.js";

let opening = null;
const memory = new Map(); // where the browser forbids storage, conversations live as long as the page

function open() {
  opening ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("tokenmill", 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("list", { keyPath: "id" });
        request.result.createObjectStore("whole", { keyPath: "id" });
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opening;
}

// Does the browser forbid keeping anything?
export const forbidden = async () => (await open()) === null;

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// All of a change is asked for: let it be written now. Without commit() it waits for the page to hear of each part, and a
// page that is closed or loaded again in between loses it.
function written(change) {
  return new Promise((resolve, reject) => {
    change.oncomplete = () => resolve();
    change.onabort = () => reject(change.error ?? new Error("the browser gave it up"));
    change.commit();
  });
}

const entry = ({ id, title, created, updated }) => ({ id, title, created, updated });

export async function list() {
  const db = await open();
  const found = db ? await done(db.transaction("list").objectStore("list").getAll()) : [...memory.values()].map(entry);
  return found.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  const db = await open();
  const found = db ? await done(db.transaction("whole").objectStore("whole").get(id)) : memory.get(id);
  return found && upgrade(found);
}

// What another tab has kept meanwhile is taken over, and kept with ours. It is asked for in the same change, but the
// change does not wait for the answer: a page that is closed right now keeps at least what was said here.
export async function save(conversation) {
  const db = await open();
  if (!db) {
    memory.set(conversation.id, conversation);
    return;
  }
  const change = db.transaction(["list", "whole"], "readwrite");
  const before = done(change.objectStore("whole").get(conversation.id)).catch(() => null);
  change.objectStore("list").put(entry(conversation));
  change.objectStore("whole").put(conversation);
  await written(change);
  const theirs = await before;
  if (theirs && takeOver(conversation, upgrade(theirs))) await save(conversation);
}

export async function remove(id) {
  const db = await open();
  if (!db) {
    memory.delete(id);
    return;
  }
  const change = db.transaction(["list", "whole"], "readwrite");
  change.objectStore("list").delete(id);
  change.objectStore("whole").delete(id);
  await written(change);
}

// Look at every conversation, the newest first.
export async function each(look) {
  const db = await open();
  const found = db ? await done(db.transaction("whole").objectStore("whole").getAll()) : [...memory.values()];
  for (const conversation of found.sort((a, b) => b.updated - a.updated)) look(upgrade(conversation));
}
