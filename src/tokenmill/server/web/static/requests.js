// Recent requests. Owns: their list, and the timeline of one of them as a bar.
import { useEffect, useRef, useState } from "preact/hooks";
import { access, explain, getJson } from "./api.js";
import { phases } from "./series.js";
import { clock, count, Dialog, duration, html, plural, rate } from "./ui.js";

const PERIOD_MS = 1500;
const MOST = 120;
const LISTED = 40;
const ENDS = { stop: "the model, or a stop string", length: "the token limit", tool_calls: "a tool call", abort: "the client", error: "an error" };
function Bar({ prompt, total, scale }) {
  const { found } = phases(prompt, total);
  return html`<span class="bar" aria-hidden="true">${found.map((p) =>
    html`<i class=${p.key} style=${{ insetInlineStart: `${(p.from / scale) * 100}%`, width: `max(1.5px, ${((p.to - p.from) / scale) * 100}%)` }}></i>`)}</span>`;
}

// The newest requests of this key, while one looks.
export function useRequests(paused) {
  const [list, setList] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    if (paused) return undefined;
    let timer = 0;
    const controller = new AbortController();
    const poll = async () => {
      try {
        if (document.visibilityState === "visible") {
          setList((await getJson(`v1/requests?limit=${MOST}`, controller.signal)).data);
          setProblem(null);
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        setProblem(explain(error));
      }
      timer = setTimeout(poll, PERIOD_MS);
    };
    poll();
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [paused]);
  return { list, problem };
}

export function Requests({ requests: { list: all, problem }, picked, onPick }) {
  const list = all?.slice(0, LISTED);
  const scale = Math.max(1, ...(list ?? []).map((r) => r.duration_ms));
  return html`<section class="card requests">
    <header><h2>Recent requests</h2><p class="hint">${access.get().key ? "Those of your API key. " : ""}Choose one to see its timeline.</p></header>
    ${list && list.length === 0 && html`<p class="none">No requests yet. Chat a little, or point a client at this server.</p>`}
    ${!list && problem && html`<p class="none">${problem.text}</p>`}
    ${list && list.length > 0 && html`<div class="table" tabindex="0" role="region" aria-label="Recent requests"><table>
      <thead><tr><th scope="col">Started</th><th scope="col" class="wide-only">Request</th><th scope="col" class="number">In</th><th scope="col" class="number wide-only">Cached</th><th scope="col" class="number">Out</th><th scope="col" class="number">Duration</th><th scope="col" class="timeline-cell">Timeline</th></tr></thead>
      <tbody>${list.map((r) => html`<${Row} key=${r.id} request=${r} scale=${scale} onPick=${onPick} />`)}</tbody>
    </table></div>`}
    ${picked && html`<${Timeline} id=${picked} onClose=${() => onPick(null)} />`}
  </section>`;
}

function Row({ request, scale, onPick }) {
  const sum = (name) => request.prompts.reduce((total, p) => total + p[name], 0);
  const open = request.state === "open";
  const short = request.id.replace(/^(chatcmpl|cmpl|resp|msg)[-_]/, "").slice(0, 10);
  return html`<tr class=${open ? "open" : ""} onClick=${() => onPick(request.id)}>
    <td>${clock(request.created)}</td>
    <td class="wide-only"><code>${short}</code></td>
    <td class="number">${count(sum("prompt_tokens"))}</td>
    <td class="number wide-only">${count(sum("cached_tokens"))}</td>
    <td class="number">${count(sum("output_tokens"))}</td>
    <td class="number">${open ? "running" : duration(request.duration_ms)}</td>
    <td class="timeline-cell"><button type="button" aria-label=${`Timeline of request ${short}, ${open ? "running" : duration(request.duration_ms)}`}
      onClick=${(e) => { e.stopPropagation(); onPick(request.id); }}>${request.prompts.slice(0, 1).map((p) => html`<${Bar} prompt=${p} total=${request.duration_ms} scale=${scale} />`)}</button></td>
  </tr>`;
}

// ---------------------------------------------------------------- one request

function Timeline({ id, onClose }) {
  const [request, setRequest] = useState(null);
  const [problem, setProblem] = useState(null);
  const timer = useRef(0);
  useEffect(() => {
    const controller = new AbortController();
    const load = async () => {
      try {
        const found = await getJson(`v1/requests/${encodeURIComponent(id)}`, controller.signal);
        setRequest(found);
        if (found.state === "open") timer.current = setTimeout(load, 400);
      } catch (error) {
        if (error.name !== "AbortError") setProblem(explain(error));
      }
    };
    load();
    return () => {
      clearTimeout(timer.current);
      controller.abort();
    };
  }, [id]);
  return html`<${Dialog} title="Timeline of a request" onClose=${onClose} wide>
    <p class="request-id"><code>${id}</code></p>
    ${problem && html`<p class="bad">${problem.text}</p>`}
    ${!request && !problem && html`<p>Asking ...</p>`}
    ${request && request.prompts.map((prompt, i) => html`<${Life} key=${i} prompt=${prompt} request=${request} number=${request.prompts.length > 1 ? i + 1 : 0} />`)}
  <//>`;
}

function Life({ prompt, request, number }) {
  const total = request.duration_ms;
  const { found, at } = phases(prompt, total);
  const scale = Math.max(1, total);
  const drafts = prompt.drafts;
  const decode = (at.last_token ?? 0) - (at.first_token ?? 0);
  const words = found.map((p) => `${p.label} ${duration(p.to - p.from)}`).join(", ");
  const facts = [
    ["Duration", request.state === "open" ? `${duration(total)}, still running` : duration(total)],
    ["First token after", at.first_token === undefined ? "not yet" : duration(at.first_token)],
    ["Prompt", plural(prompt.prompt_tokens, "token")],
    ["Read in", prompt.prefill?.length ? plural(prompt.prefill.length, "step") : "not yet"],
    ["Answer", `${plural(prompt.output_tokens, "token")}${prompt.output_tokens > 1 && decode > 0 ? `, ${rate(((prompt.output_tokens - 1) / decode) * 1000)} per second` : ""}`],
    ...(drafts ? [["Guesses", `${count(drafts.right)} of ${count(drafts.tried)} right${drafts.saved_ms ? `, about ${duration(Math.abs(drafts.saved_ms))} ${drafts.saved_ms > 0 ? "saved" : "lost"}` : ""}`]] : []),
    ["Preempted", prompt.preemptions ? plural(prompt.preemptions, "time") : "never"],
    ["Engines that died under it", prompt.replays ? count(prompt.replays) : "none"],
    ["Ended by", prompt.finish_reasons.map((reason) => ENDS[reason] ?? reason).join(", ") || "nothing yet"],
  ];
  return html`<section class="life">
    ${number > 0 && html`<h3>Prompt ${number}</h3>`}
    <div class="big-bar" role="img" aria-label=${`Timeline: ${words}`}>
      ${found.map((p) => html`<i class=${p.key} title=${`${p.label}: ${duration(p.to - p.from)}`} style=${{ insetInlineStart: `${(p.from / scale) * 100}%`, width: `max(2px, ${((p.to - p.from) / scale) * 100}%)` }}></i>`)}
      ${(prompt.prefill ?? []).slice(0, -1).map((c) => html`<b class="chunk" title=${`${count(c.tokens)} of ${plural(prompt.prompt_tokens, "prompt token")}`} style=${{ insetInlineStart: `${(c.at_ms / scale) * 100}%` }}></b>`)}
    </div>
    <div class="scale" aria-hidden="true">${[0, 0.25, 0.5, 0.75, 1].map((part) => html`<span>${part === 0 ? "0" : duration(scale * part)}</span>`)}</div>
    <ul class="legend phases">${found.map((p) => html`<li><i class=${`swatch ${p.key}`}></i>${p.label} <b>${duration(p.to - p.from)}</b></li>`)}</ul>
    ${prompt.prompt_tokens > 0 && html`<${Part} part=${prompt.cached_tokens} whole=${prompt.prompt_tokens} words=${["prompt tokens from the cache", "computed", "prompt tokens came from the cache"]} tone="prefill" />`}
    ${drafts && prompt.output_tokens > 0 && html`<${Part} part=${Math.min(drafts.right, prompt.output_tokens)} whole=${prompt.output_tokens} words=${["answer tokens guessed ahead", "made one by one", "answer tokens were guessed ahead"]} tone="decode" />`}
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </section>`;
}

// How much of a number of tokens came for less.
function Part({ part, whole, words, tone }) {
  return html`<ul class="legend cache-words"><li><i class="swatch one"></i>${words[0]} <b>${count(part)}</b></li><li><i class=${`swatch ${tone}`}></i>${words[1]} <b>${count(whole - part)}</b></li></ul>
    <div class=${`cache-bar of-${tone}`} role="img" aria-label=${`${count(part)} of ${count(whole)} ${words[2]}`}><i class="cached" style=${{ width: `${(part / whole) * 100}%` }}></i></div>`;
}
