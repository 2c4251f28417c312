// The server, as the page speaks to it. Owns: addresses, the key (kept for this tab only), errors as objects, event streams.
import { kept, makeStore } from "./store.js";

const BASE = new URL(".", document.baseURI);
const stored = kept("sessionStorage", "tokenmill.key", "");

export const access = makeStore({ key: stored.read(), asked: false, refused: false });

export function setKey(key) {
  stored.write(key);
  access.set({ key, asked: false, refused: false });
}

export class ApiError extends Error {
  // status 0: no answer at all; -1: the answer broke off.
  constructor(status, message, { param = null, code = null, retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

export async function call(path, { body, signal } = {}) {
  const headers = {};
  const { key } = access.get();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "No answer.");
  }
  if (response.ok) return response;
  const error = await refusal(response);
  if (error.status === 401) access.set({ asked: true, refused: Boolean(key) });
  throw error;
}

async function refusal(response) {
  let found = {};
  try {
    found = (await response.json()).error ?? {};
  } catch {
    // A proxy in between may answer with anything.
  }
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  return new ApiError(response.status, found.message || response.statusText || "The request was refused.", {
    param: found.param,
    code: found.code,
    retryAfter,
  });
}

export const getJson = async (path, signal) => (await call(path, { signal })).json();

// The events of a stream as objects; ends at [DONE], and says so when the stream ends without it.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(-1, "The connection was lost.");
      }
      if (piece.done) throw new ApiError(-1, "The stream ended too early.");
      const lines = (rest + piece.value).split("\n");
      rest = lines.pop();
      const batch = [];
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") {
          yield batch;
          return;
        }
        const event = JSON.parse(data);
        if (event.error) {
          yield batch;
          throw new ApiError(event.error.code || 500, event.error.message, { param: event.error.param });
        }
        batch.push(event);
      }
      yield batch;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// What a person can do about an error: a title, the reason, and which help to offer.
export function explain(error) {
  const where = BASE.origin;
  const message = error.message || String(error);
  if (error.code === "context_length_exceeded" && ["messages", "prompt"].includes(error.param)) {
    return { title: "Too long for this model", text: `${message} ${error.param === "prompt" ? "Shorten the text." : "Edit the question, or begin a new chat."}`, help: "edit" };
  }
  switch (error.status) {
    case 0:
      return { title: "The server does not answer", text: `Nothing answers at ${where}. Is “tokenmill serve” still running, and is the network there?`, help: "retry" };
    case -1:
      return { title: "The answer broke off", text: "The connection ended before the answer did. What had come is kept.", help: "retry" };
    case 401:
      return { title: "An API key is needed", text: "This server was started with --api-key. Give that key; it is kept for this tab only.", help: "key" };
    case 403:
      return { title: "The server refuses this page", text: message, help: "" };
    case 400:
    case 404:
    case 422:
      return { title: error.param ? `The server refuses “${error.param}”` : "The server refuses the request", text: message, help: "settings" };
    case 408:
    case 504:
      return { title: "It took too long", text: message, help: "retry" };
    case 413:
      return { title: "The conversation is too large", text: `${message} Begin a new one, or leave files out.`, help: "edit" };
    case 429:
      return { title: "Too much for this API key just now", text: message, help: "retry" };
    case 503:
      return { title: "The server has no room just now", text: `${message} There is room again as soon as an answer ends.`, help: "retry" };
    default:
      return { title: "The server could not do it", text: message, help: "retry" };
  }
}
