// Answers as they come. Owns: sending a request, growing an answer token by token, stopping it, and the engine's own figures of it.
// Knows nothing of conversations: an answer is {content, reasoning, tools, finish, error, stats, model}.
import { call, events, explain, getJson } from "./api.js";
import { split } from "./tree.js";

const running = new Map(); // answer -> AbortController
const growing = new Map(); // answer -> functions that draw it
const LEAST_MS = 10; // shorter spans say nothing of speed
const LEAST_LIVE_S = 0.3;

export const isRunning = (answer) => running.has(answer);
export const stopAnswer = (answer) => running.get(answer)?.abort();

export function onGrowth(answer, draw) {
  const draws = growing.get(answer) ?? new Set();
  growing.set(answer, draws.add(draw));
  return () => draws.delete(draw);
}

// Let an answer grow to its end; never throws, what went wrong is in answer.error. `began` is called when it is under way.
export async function run(answer, body, { path = "v1/chat/completions", began = () => {} } = {}) {
  const controller = new AbortController();
  running.set(answer, controller);
  answer.error = null;
  answer.model = body.model;
  began();
  try {
    await receive(path, body, answer, controller.signal);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = { ...explain(error), retryAfter: error.retryAfter || 0, status: error.status };
  } finally {
    running.delete(answer);
    growing.get(answer)?.forEach((draw) => draw(true));
    growing.delete(answer);
  }
}

async function receive(path, body, answer, signal) {
  const began = performance.now();
  const stats = { request: "", chunks: 0, output: 0, prompt: 0, cached: 0, ttft: 0, thought: 0, seconds: 0, engine: null };
  answer.stats = stats;
  const response = await call(path, { body: { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }, signal });
  let frame = 0;
  const draw = () => {
    frame = 0;
    growing.get(answer)?.forEach((each) => each(false));
  };
  try {
    for await (const batch of events(response)) {
      const now = performance.now() - began;
      const before = stats.chunks;
      for (const event of batch) take(event, answer, stats, now);
      if (!stats.thought && stats.ttft) stats.thought = thoughtFor(answer, now - stats.ttft);
      if (!before && stats.chunks) stats.atOnce = stats.output || stats.chunks; // what came with the first read has no speed
      if (!frame && batch.length) frame = requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(frame);
    stats.output ||= stats.chunks;
  }
}

// How long it thought, once it says something: from its first token on.
function thoughtFor(answer, ms) {
  const { reasoning, content } = split(answer);
  return reasoning && content ? ms : 0;
}

function take(event, answer, stats, now) {
  stats.request ||= event.id;
  if (event.usage) {
    stats.output = event.usage.completion_tokens;
    stats.prompt = event.usage.prompt_tokens;
    stats.cached = event.usage.prompt_tokens_details?.cached_tokens ?? stats.cached;
  }
  const choice = event.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? { content: choice.text };
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

// ---------------------------------------------------------------- figures

// When tokens came is known where they are made: the page only sees reads of a socket.
export async function measure(answer) {
  const stats = answer.stats;
  if (!stats?.request || !stats.chunks) return;
  try {
    const { prompts } = await getJson(`v1/requests/${encodeURIComponent(stats.request)}`);
    stats.engine = engineFigures(prompts[0], stats.output);
  } catch {
    // Without them no speed is shown.
  }
}

export function engineFigures(prompt, output) {
  const at = Object.fromEntries(prompt.events.map((e) => [e.event, e.at_ms]));
  if (at.first_token === undefined) return null;
  const span = (at.last_token ?? at.first_token) - at.first_token;
  const count = output || prompt.output_tokens;
  return { first: at.first_token, queue: (at.started ?? at.first_token) - (at.accepted ?? 0), rate: count > 1 && span >= LEAST_MS ? ((count - 1) / span) * 1000 : null };
}

// Tokens per second while it grows; null: nothing true can be said yet.
export function liveRate(stats) {
  const later = stats.output - (stats.atOnce ?? 0);
  return later > 2 && stats.seconds >= LEAST_LIVE_S ? later / stats.seconds : null;
}
