// One message. Owns: how questions, answers, thoughts, tool calls and errors look, and what can be done with each.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { access } from "./api.js";
import { edit, giveResults, goOn, isRunning, onGrowth, regenerate, show, split } from "./conversation.js";
import { GrowingMarkdown } from "./markdown.js";
import { CopyButton, count, duration, html, Icon, IconButton, plural, rate } from "./ui.js";

export function Message({ message, busy, last, onSettings, onTimeline }) {
  if (message.role === "user") return html`<${Question} message=${message} busy=${busy} />`;
  if (message.role === "tool") return html`<${Result} message=${message} />`;
  return html`<${Answer} message=${message} busy=${busy} last=${last} onSettings=${onSettings} onTimeline=${onTimeline} />`;
}

function Question({ message, busy }) {
  const [editing, setEditing] = useState(false);
  if (editing) return html`<${Editor} message=${message} onEnd=${() => setEditing(false)} />`;
  return html`<article class="message question" aria-label="You">
    <div class="said">${message.content}</div>
    <div class="actions">
      <${CopyButton} text=${message.content} label="Copy the question" />
      <${IconButton} icon="edit" label="Edit and ask again" disabled=${busy} onClick=${() => setEditing(true)} class="icon-button edit-question" />
    </div>
  </article>`;
}

function Editor({ message, onEnd }) {
  const [text, setText] = useState(message.content);
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  const send = () => {
    onEnd();
    edit(message, text);
  };
  const key = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      onEnd();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  return html`<form class="message editor" onSubmit=${(e) => { e.preventDefault(); send(); }}>
    <textarea ref=${area} aria-label="Edit the question" rows=${Math.min(12, text.split("\n").length + 1)} value=${text}
      onInput=${(e) => setText(e.target.value)} onKeyDown=${key}></textarea>
    <div class="buttons"><button type="button" class="quiet" onClick=${onEnd}>Cancel</button>
      <button type="submit" class="strong">Ask again</button></div>
  </form>`;
}

function Result({ message }) {
  return html`<article class="message result" aria-label=${`Result of ${message.name}`}>
    <details><summary><${Icon} name="right" />Result of <code>${message.name}</code></summary><pre>${message.content}</pre></details>
  </article>`;
}

function Answer({ message, busy, last, onSettings, onTimeline }) {
  const answer = message.answers[message.at];
  const live = isRunning(answer);
  return html`<article class=${live ? "message answer live" : "message answer"} aria-label="Answer" aria-busy=${live}>
    <${Body} key=${`${message.at}/${message.answers.length}`} answer=${answer} live=${live} />
    ${answer.tools.length > 0 && html`<${Calls} message=${message} answer=${answer} asks=${last && !live} />`}
    ${answer.error && html`<${Trouble} error=${answer.error} busy=${busy} onRetry=${() => regenerate(message)} onSettings=${onSettings} />`}
    ${!live && html`<footer>
      <${Variants} message=${message} busy=${busy} />
      <div class="actions">
        <${CopyButton} text=${() => split(answer).content} label="Copy the answer" />
        <${IconButton} icon="redo" label="Answer again" disabled=${busy} onClick=${() => regenerate(message)} />
        ${answer.stats?.request && html`<${IconButton} icon="time" label="Show this request's timeline" onClick=${() => onTimeline(answer.stats.request)} />`}
        ${last && (!answer.finish || answer.finish === "length" || answer.finish === "stopped") && answer.content &&
        html`<button type="button" class="quiet small" disabled=${busy} onClick=${() => goOn(message)}>Go on</button>`}
      </div>
      <${Figures} answer=${answer} />
    </footer>`}
  </article>`;
}

// Thoughts and text: drawn by hand, outside of the component tree, because a token comes every few milliseconds.
function Body({ answer, live }) {
  const text = useRef(null);
  const thought = useRef(null);
  const pace = useRef(null);
  const parts = useRef(null);
  const [thinks, setThinks] = useState(Boolean(split(answer).reasoning));
  const draw = (final) => {
    const { reasoning, content } = split(answer);
    if (reasoning) {
      setThinks(true);
      parts.current.thoughts.update(reasoning, final);
    }
    parts.current.text.update(content, final);
    if (!final && pace.current) pace.current.textContent = livePace(answer);
  };
  useLayoutEffect(() => {
    parts.current = { text: new GrowingMarkdown(text.current), thoughts: new GrowingMarkdown(thought.current) };
    draw(!live);
  }, [answer]);
  useLayoutEffect(() => {
    if (!live) return undefined;
    parts.current.text.reset(); // an answer that goes on continues its last block
    return onGrowth(answer, draw);
  }, [answer, live]);
  const { thinking } = split(answer);
  return html`<details class="thoughts" hidden=${!thinks} open=${false}>
      <summary><${Icon} name="right" />${live && (thinking || !answer.content) ? "Thinking" : "Thoughts"}</summary>
      <div class="prose" ref=${thought}></div>
    </details>
    <div class="prose" ref=${text}></div>
    ${live && html`<p class="pace"><span class="pulse" aria-hidden="true"></span><span ref=${pace}>waiting for the first token</span></p>`}`;
}

function livePace({ stats }) {
  if (!stats?.chunks) return "waiting for the first token";
  const speed = stats.chunks > 1 && stats.seconds > 0 ? ` · ${rate((stats.chunks - 1) / stats.seconds)} tok/s` : "";
  return `${plural(stats.chunks, "token")}${speed}`;
}

function Figures({ answer }) {
  const { stats, finish } = answer;
  if (!stats?.output) return finish === "stopped" ? html`<p class="figures">stopped</p>` : null;
  const parts = [plural(stats.output, "token")];
  // Everything may come in one read: a millisecond is the clock's step.
  if (stats.output > 1) parts.push(`${rate((stats.output - 1) / Math.max(stats.seconds, 0.001))} tok/s`);
  parts.push(`first after ${duration(stats.ttft)}`);
  if (stats.prompt) parts.push(`prompt ${count(stats.prompt)}${stats.cached ? ` (${count(stats.cached)} cached)` : ""}`);
  if (finish === "length") parts.push("cut at the token limit");
  if (finish === "stopped") parts.push("stopped");
  return html`<p class="figures">${parts.join(" · ")}</p>`;
}

function Variants({ message, busy }) {
  const { at, answers } = message;
  if (answers.length < 2) return null;
  return html`<div class="variants">
    <${IconButton} icon="left" label="Earlier answer" disabled=${busy || at === 0} onClick=${() => show(message, at - 1)} />
    <span>${at + 1} / ${answers.length}</span>
    <${IconButton} icon="right" label="Later answer" disabled=${busy || at === answers.length - 1} onClick=${() => show(message, at + 1)} />
  </div>`;
}

function Calls({ message, answer, asks }) {
  const [results, setResults] = useState(answer.tools.map(() => ""));
  const change = (i, value) => setResults(answer.tools.map((_, j) => (i === j ? value : (results[j] ?? ""))));
  const send = (event) => {
    event.preventDefault();
    giveResults(message, results);
  };
  return html`<form class="calls" onSubmit=${send}>
    ${answer.tools.map((tool, i) => html`<div class="call" key=${i}>
      <p class="call-head">calls <code>${tool.name}</code></p>
      <pre tabindex="0" aria-label="Arguments">${pretty(tool.arguments)}</pre>
      ${asks && html`<label>Result<textarea rows="2" class="mono" value=${results[i] ?? ""} onInput=${(e) => change(i, e.target.value)}></textarea></label>`}
    </div>`)}
    ${asks && html`<div class="buttons"><button type="submit" class="strong">Send ${answer.tools.length > 1 ? "results" : "the result"}</button></div>`}
  </form>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function Trouble({ error, busy, onRetry, onSettings }) {
  const [left, setLeft] = useState(Math.ceil(error.retryAfter || 0));
  useEffect(() => {
    if (left <= 0) return undefined;
    const timer = setTimeout(() => setLeft(left - 1), 1000);
    return () => clearTimeout(timer);
  }, [left]);
  return html`<div class="trouble" role="alert">
    <h3>${error.title}</h3>
    <p>${error.text}</p>
    <div class="buttons">
      ${error.help === "key" && html`<button type="button" class="strong" onClick=${() => access.set({ asked: true })}>Give the key</button>`}
      ${error.help === "settings" && html`<button type="button" class="quiet" onClick=${onSettings}>Open the settings</button>`}
      ${onRetry && error.help && html`<button type="button" class=${error.help === "retry" ? "strong" : "quiet"} disabled=${busy || left > 0} onClick=${onRetry}>
        ${left > 0 ? `Try again in ${left} s` : "Try again"}</button>`}
    </div>
  </div>`;
}
