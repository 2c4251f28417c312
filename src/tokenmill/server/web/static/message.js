// One message. Owns: how questions, answers, thoughts, tool calls and errors look, and what can be done with each.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { access } from "./api.js";
import { begin, branchOff, chat, edit, editNode, giveResults, goOn, lastQuestion, regenerate, remove, rewrite, show, variants } from "./conversation.js";
import { Figures, livePace } from "./figures.js";
import { GrowingMarkdown } from "./markdown.js";
import { useStore } from "./store.js";
import { isRunning, onGrowth } from "./stream.js";
import { alike, split, spoken } from "./tree.js";
import { bytes, CopyButton, Dialog, duration, enters, html, Icon, IconButton, toast } from "./ui.js";
import { judge } from "./validate.js";

export function Message({ node, busy, last, held, onSettings, onTimeline }) {
  if (node.role === "user") return html`<${Question} node=${node} busy=${busy} />`;
  if (node.role === "tool") return html`<${Result} node=${node} />`;
  return html`<${Answer} node=${node} busy=${busy} last=${last} held=${held} onSettings=${onSettings} onTimeline=${onTimeline} />`;
}

// A question of more signs or lines is folded: the answer would be far below it.
const MOST_SIGNS = 2500;
const MOST_LINES = 30;

function Question({ node, busy }) {
  const editing = useEditing(node);
  const [whole, setWhole] = useState(false);
  const long = node.content.length > MOST_SIGNS || node.content.split("\n").length > MOST_LINES;
  if (editing) return html`<${Editor} what="question" before=${node.content} with=${node.files ?? []} word="Ask again" onSend=${(text, files) => edit(node, text, files)} />`;
  return html`<article class="message question" aria-label="You" data-node=${node.id}>
    ${node.files?.length > 0 && html`<ul class="files" aria-label="Files">${node.files.map((file) => html`<li key=${file.name}><${FileChip} file=${file} /></li>`)}</ul>`}
    ${node.content && html`<div class=${long && !whole ? "said folded" : "said"} dir="auto">${node.content}</div>`}
    ${long && html`<button type="button" class="quiet small unfold" aria-expanded=${whole} onClick=${() => setWhole(!whole)}>${whole ? "Show less" : `Show all ${node.content.length.toLocaleString("en")} characters`}</button>`}
    <footer>
      <div class="actions">
        <${CopyButton} text=${() => spoken(node)} label="Copy the question" />
        <${IconButton} icon="edit" label="Edit and ask again" disabled=${busy} onClick=${() => editNode(node)} class="icon-button edit" />
      </div>
      <${Variants} node=${node} busy=${busy} what="question" />
    </footer>
  </article>`;
}

// A text file: a chip that opens.
export function FileChip({ file, onRemove }) {
  const [open, setOpen] = useState(false);
  return html`<span class="file"><button type="button" onClick=${() => setOpen(true)}><${Icon} name="file" /><span class="unseen">Show </span><span dir="auto">${file.name}</span> <small>${bytes(new Blob([file.text]).size)}</small></button>
    ${onRemove && html`<${IconButton} icon="close" label=${`Remove ${file.name}`} onClick=${onRemove} />`}
    ${open && html`<${Dialog} title=${file.name} wide onClose=${() => setOpen(false)}><pre class="file-text" tabindex="0" aria-label="Text of the file" dir="auto">${file.text}</pre><//>`}
  </span>`;
}

// Is this message being edited? Afterwards the focus is where it was.
function useEditing(node) {
  const editing = useStore(chat).editing === node.id;
  const before = useRef(editing);
  useLayoutEffect(() => {
    if (before.current && !editing) focusIn(node, ".edit");
    before.current = editing;
  }, [editing]);
  return editing;
}

const focusIn = (node, selector) => document.querySelector(`[data-node="${node.id}"] ${selector}`)?.focus({ preventScroll: true });

function Editor({ what, before, with: attached = [], word, onSend }) {
  const [text, setText] = useState(before);
  const [files, setFiles] = useState(attached);
  const empty = !text.trim() && !files.length;
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  const send = () => {
    if (empty) return;
    editNode(null);
    onSend(text, files);
  };
  const key = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      editNode(null);
    } else if (enters(event) && (what === "question" ? !event.shiftKey : event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
    }
  };
  return html`<form class="message editor" onSubmit=${(e) => { e.preventDefault(); send(); }}>
    ${files.length > 0 && html`<ul class="files" aria-label="Files to send">${files.map((file, i) => html`<li key=${i}><${FileChip} file=${file} onRemove=${() => setFiles(files.filter((_, k) => k !== i))} /></li>`)}</ul>`}
    <textarea ref=${area} aria-label=${`Edit the ${what}`} dir="auto" rows=${Math.min(12, Math.max(text.split("\n").length, text.length / 80) + 1)} value=${text}
      onInput=${(e) => setText(e.target.value)} onKeyDown=${key}></textarea>
    <div class="buttons"><p class="hint grow">The earlier words stay as a branch.</p><button type="button" class="quiet" onClick=${() => editNode(null)}>Cancel</button>
      <button type="submit" class="strong" disabled=${empty}>${word}</button></div>
  </form>`;
}

function Result({ node }) {
  return html`<article class="message result" aria-label=${`Result of ${node.name}`}>
    <details><summary><${Icon} name="right" />Result of <code>${node.name}</code><span class="glimpse" dir="auto">${node.content.slice(0, 200)}</span></summary><pre dir="auto">${node.content}</pre></details>
  </article>`;
}

function Answer({ node, busy, last, held, onSettings, onTimeline }) {
  const live = isRunning(node);
  const [measured, redraw] = useState(0);
  const editing = useEditing(node);
  useEffect(() => (live ? onGrowth(node, (final) => final && redraw(measured + 1)) : undefined), [live]);
  const said = node.content || node.reasoning || node.tools.length > 0 || !node.error;
  const cut = !node.finish || ["length", "stopped", "edited"].includes(node.finish);
  const away = () => toast("Removed with all that followed.", "Undo", remove(node));
  if (editing) return html`<${Editor} what="answer" before=${split(node).content} word="Keep" onSend=${(text) => rewrite(node, text)} />`;
  return html`<article class=${live ? "message answer live" : "message answer"} aria-label="Answer" aria-busy=${live} data-node=${node.id}>
    <${Body} key=${node.id} answer=${node} live=${live} />
    ${held !== undefined && (last || node.held) && html`<${Validity} answer=${node} schema=${held} live=${live} />`}
    ${node.tools.length > 0 && html`<${Calls} node=${node} asks=${last && !live} />`}
    ${node.error && html`<${Trouble} error=${node.error} busy=${busy} onRetry=${() => regenerate(node)} onSettings=${onSettings} onEdit=${() => editNode(lastQuestion(node))} onNew=${begin} />`}
    ${!live && html`<footer>
      <${Variants} node=${node} busy=${busy} what="answer" />
      ${said && html`<div class="actions">
        ${split(node).content && html`<${CopyButton} text=${() => split(node).content} label="Copy the answer" />`}
        <${IconButton} icon="redo" label="Answer again" disabled=${busy} onClick=${() => regenerate(node)} />
        ${node.tools.length === 0 && html`<${IconButton} icon="edit" label="Edit the answer" disabled=${busy} onClick=${() => editNode(node)} class="icon-button edit" />`}
        <${IconButton} icon="branch" label="New conversation from here" disabled=${busy} onClick=${() => branchOff(node)} />
        <${IconButton} icon="trash" label="Remove this answer" disabled=${busy} onClick=${away} />
        ${node.stats?.request && html`<${IconButton} icon="time" label="Show this request's timeline" onClick=${() => onTimeline(node.stats.request)} />`}
        ${last && cut && split(node).content && html`<button type="button" class="quiet small" disabled=${busy} onClick=${() => goOn(node)}>Go on</button>`}
      </div>`}
      <${Figures} answer=${node} />
    </footer>`}
  </article>`;
}

// Thoughts and text: drawn by hand, outside of the component tree, because a token comes every few milliseconds.
export function Body({ answer, live }) {
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
      <summary><${Icon} name="right" />${live && (thinking || !answer.content) ? "Thinking" : "Thoughts"}${answer.stats?.thought > 0 && html`<small> · ${duration(answer.stats.thought)}</small>`}</summary>
      <div class="prose" dir="auto" ref=${thought}></div>
    </details>
    <div class="prose" ref=${text}></div>
    ${live && html`<p class="pace"><span class="pulse" aria-hidden="true"></span><span ref=${pace}>${livePace(answer)}</span></p>`}`;
}

// Does the answer hold to what was asked? Said while it grows, too.
function Validity({ answer, schema, live }) {
  const [, redraw] = useState(0);
  useEffect(() => (live ? onGrowth(answer, () => redraw((n) => n + 1)) : undefined), [answer, live]);
  if (answer.tools.length || answer.error) return null;
  const { tone, text, more } = judge(split(answer).content, schema, live);
  return html`<div class=${`validity ${tone}`} role="status"><${Icon} name=${tone === "bad" ? "close" : tone === "good" ? "check" : "time"} />
    <div><span>${text}</span>${more.length > 0 && html`<ul>${more.map((line) => html`<li><code>${line}</code></li>`)}</ul>`}</div></div>`;
}

function Variants({ node, busy, what }) {
  const all = variants(node);
  const [beside, setBeside] = useState(false);
  if (all.length < 2) return null;
  const at = all.indexOf(node);
  const step = (by, word) => {
    const next = all[at + by];
    show(next);
    const end = at + by === 0 || at + by === all.length - 1; // there the button of this direction is off
    requestAnimationFrame(() => focusIn(next, end ? ".variants button:enabled" : `.variants [aria-label^="${word}"]`));
  };
  return html`<div class="variants">
    <${IconButton} icon="left" label=${`Earlier ${what}`} disabled=${busy || at === 0} onClick=${() => step(-1, "Earlier")} />
    <span>${at + 1} / ${all.length}</span>
    <${IconButton} icon="right" label=${`Later ${what}`} disabled=${busy || at === all.length - 1} onClick=${() => step(1, "Later")} />
    ${what === "answer" && html`<${IconButton} icon="columns" label="Compare the answers side by side" onClick=${() => setBeside(true)} />`}
    ${beside && html`<${SideBySide} all=${all} at=${at} onClose=${() => setBeside(false)} />`}
  </div>`;
}

function SideBySide({ all, at, onClose }) {
  const [left, setLeft] = useState(at === 0 ? 0 : at - 1);
  const [right, setRight] = useState(at === 0 ? 1 : at);
  const column = (which, set, word) => html`<section aria-label=${`${word} answer`}>
    <div class="beside-head"><select aria-label=${`${word} answer`} value=${which} onChange=${(e) => set(Number(e.target.value))}>${all.map((_, i) => html`<option value=${i}>Answer ${i + 1}</option>`)}</select>
      <button type="button" class="quiet small" onClick=${() => { show(all[which]); onClose(); }}>Go on with this</button></div>
    <${Body} key=${all[which].id} answer=${all[which]} live=${false} />
    <${Figures} answer=${all[which]} />
  </section>`;
  return html`<${Dialog} title="Two answers side by side" class="widest" onClose=${onClose}><div class="beside">${column(left, setLeft, "Left")}${column(right, setRight, "Right")}</div>
    <p class="alike">${alike(all[left], all[right])}</p><//>`;
}

function Calls({ node, asks }) {
  const [results, setResults] = useState(node.tools.map(() => ""));
  const change = (i, value) => setResults(node.tools.map((_, j) => (i === j ? value : (results[j] ?? ""))));
  const send = (event) => {
    event.preventDefault();
    giveResults(node, results);
  };
  return html`<form class="calls" onSubmit=${send}>
    ${node.tools.map((tool, i) => html`<div class="call" key=${i}>
      <p class="call-head"><${Icon} name="tool" />calls <code>${tool.name}</code></p>
      <pre tabindex="0" aria-label="Arguments">${pretty(tool.arguments)}</pre>
      ${asks && html`<label>Result<textarea rows="2" class="mono" dir="auto" placeholder="what the function answers" value=${results[i] ?? ""} onInput=${(e) => change(i, e.target.value)}></textarea></label>`}
    </div>`)}
    ${asks && html`<div class="buttons"><button type="submit" class="strong">Send ${node.tools.length > 1 ? "results" : "the result"}</button></div>`}
  </form>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function Trouble({ error, busy, onRetry, onSettings, onEdit, onNew }) {
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
      ${error.help === "key" && html`<button type="button" class="strong" onClick=${() => access.set({ asked: true })}>Give the API key</button>`}
      ${error.help === "settings" && onSettings && html`<button type="button" class="strong" onClick=${onSettings}>Open the settings</button>`}
      ${error.help === "edit" && onEdit && html`<button type="button" class="strong" disabled=${busy} onClick=${onEdit}>Edit the question</button>`}
      ${error.help === "edit" && onNew && html`<button type="button" class="quiet" onClick=${onNew}>New chat</button>`}
      ${onRetry && error.help && html`<button type="button" class=${error.help === "retry" ? "strong" : "quiet"} disabled=${busy || left > 0} onClick=${onRetry}>
        ${left > 0 ? `Try again in ${left} s` : "Try again"}</button>`}
    </div>
  </div>`;
}
