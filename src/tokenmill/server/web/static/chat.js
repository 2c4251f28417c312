// The chat. Owns: the list of conversations, the messages, and the place where one writes.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { ask, asMarkdown, begin, chat, chooseModel, forget, onGrowth, openConversation, rename, runningIn, stop, whole } from "./conversation.js";
import { Message, Trouble } from "./message.js";
import { changedCount, settings, SettingsPanel } from "./settings.js";
import { useStore } from "./store.js";
import { copyText, html, Icon, IconButton, saveFile, toast } from "./ui.js";

const STARTS = ["Tell me a short story about a mill by a river.", "What is 12 + 30?", "What is the capital of France?"];
const NEAR = 90; // pixels from the end that still count as being there

export function ChatView({ panels, setPanels, onTimeline, onReload }) {
  const { open, list, problem, said } = useStore(chat);
  const openSettings = () => setPanels({ ...panels, settings: true });
  return html`<div class="chat">
    <h1 class="unseen">Chat</h1>
    ${panels.list && html`<${Conversations} list=${list} open=${open} onClose=${() => setPanels({ ...panels, list: false })} />`}
    <section class="talk" aria-label="Conversation">
      ${problem && html`<div class="banner"><${Trouble} error=${problem} onRetry=${onReload} onSettings=${openSettings} /></div>`}
      <${Messages} key=${open.id} open=${open} onSettings=${openSettings} onTimeline=${onTimeline} />
      <${Composer} key=${`write-${open.id}`} open=${open} onSettings=${() => setPanels({ ...panels, settings: !panels.settings })} settingsOpen=${panels.settings} />
      <p class="unseen" role="status">${said}</p>
    </section>
    ${panels.settings && html`<${SettingsPanel} onClose=${() => setPanels({ ...panels, settings: false })} />`}
  </div>`;
}

// ---------------------------------------------------------------- the list

function Conversations({ list, open, onClose }) {
  const choose = (action) => {
    action();
    if (matchMedia("(max-width: 760px)").matches) onClose();
  };
  return html`<nav class="conversations" aria-label="Conversations">
    <header>
      <button type="button" class="new" onClick=${() => choose(begin)}><${Icon} name="plus" />New chat</button>
      <${IconButton} icon="close" label="Close the list" onClick=${onClose} class="icon-button narrow-only" />
    </header>
    ${list.length === 0 && html`<p class="none">Conversations stay in this browser. They appear here.</p>`}
    <ul>${list.map((entry) => html`<${Entry} key=${entry.id} entry=${entry} current=${entry.id === open.id} onChoose=${() => choose(() => openConversation(entry.id))} />`)}</ul>
  </nav>`;
}

function Entry({ entry, current, onChoose }) {
  const [naming, setNaming] = useState(false);
  const title = entry.title || "Untitled";
  const remove = async () => {
    const undo = await forget(entry.id);
    toast(`Deleted “${title}”.`, "Undo", undo);
  };
  const exported = async () => {
    const conversation = await whole(entry.id);
    const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50);
    saveFile(`${name}.json`, "application/json", JSON.stringify(conversation, null, 2));
    if (await copyText(asMarkdown(conversation))) toast("Saved as JSON; the clipboard has it as Markdown.");
  };
  if (naming) {
    const end = (value) => {
      setNaming(false);
      if (value !== null) rename(entry.id, value);
    };
    return html`<li><input class="rename" aria-label="New name" value=${entry.title} ref=${(e) => e?.focus()}
      onBlur=${(e) => end(e.target.value)} onKeyDown=${(e) => { if (e.key === "Enter") end(e.target.value); if (e.key === "Escape") { e.stopPropagation(); end(null); } }} /></li>`;
  }
  return html`<li class=${current ? "current" : ""}>
    <button type="button" class="open" aria-current=${current ? "true" : undefined} onClick=${onChoose}>${title}</button>
    <span class="row-actions">
      <${IconButton} icon="edit" label=${`Rename “${title}”`} onClick=${() => setNaming(true)} />
      <${IconButton} icon="save" label=${`Export “${title}”`} onClick=${exported} />
      <${IconButton} icon="trash" label=${`Delete “${title}”`} onClick=${remove} />
    </span>
  </li>`;
}

// ---------------------------------------------------------------- messages

function Messages({ open, onSettings, onTimeline }) {
  const box = useRef(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  const live = runningIn(open);
  const toEnd = () => {
    box.current.scrollTop = box.current.scrollHeight;
  };
  useLayoutEffect(() => {
    if (follows.current) toEnd();
  });
  useEffect(() => (live ? onGrowth(live, () => follows.current && toEnd()) : undefined), [live]);
  const scrolled = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current;
    const near = scrollHeight - scrollTop - clientHeight < NEAR;
    follows.current = near;
    setAway(!near);
  };
  const copyCode = async (event) => {
    const button = event.target.closest?.(".copy-code");
    if (!button) return;
    const done = await copyText(button.closest(".code").querySelector("code").textContent);
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return html`<div class="messages-frame">
    <div class="messages" ref=${box} onScroll=${scrolled} onClick=${copyCode} role="log" aria-live="off" aria-label="Messages" tabindex="0">
      ${open.messages.length === 0 && html`<${Welcome} />`}
      ${open.messages.map((message, i) => html`<${Message} key=${message.id} message=${message} busy=${Boolean(live)} last=${i === open.messages.length - 1}
        onSettings=${onSettings} onTimeline=${onTimeline} />`)}
    </div>
    ${away && html`<button type="button" class="to-end" aria-label="To the newest" onClick=${toEnd}><${Icon} name="down" /></button>`}
  </div>`;
}

function Welcome() {
  const { model } = useStore(chat);
  return html`<div class="welcome">
    <h2>What shall we talk about?</h2>
    <p>${model ? html`<strong>${model}</strong> answers. ` : ""}What you write goes to this server only, and is kept in this browser only.</p>
    <div class="starts">${STARTS.map((text) => html`<button type="button" onClick=${() => ask(text)}>${text}</button>`)}</div>
  </div>`;
}

// ---------------------------------------------------------------- writing

function Composer({ open, onSettings, settingsOpen }) {
  const [text, setText] = useState("");
  const area = useRef(null);
  const { models, model } = useStore(chat);
  const changed = changedCount(useStore(settings));
  const live = runningIn(open);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, 260)}px`;
  }, [text]);
  useEffect(() => {
    if (matchMedia("(hover: hover)").matches) area.current.focus({ preventScroll: true });
  }, []);
  const send = (event) => {
    event?.preventDefault();
    if (live || !text.trim()) return;
    ask(text);
    setText("");
  };
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "ArrowUp" && !text) {
      const edits = document.querySelectorAll(".edit-question:not([disabled])");
      if (edits.length) {
        event.preventDefault();
        edits[edits.length - 1].click();
      }
    }
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea id="write" ref=${area} rows="1" aria-label="Message" placeholder="Write a message" value=${text}
      onInput=${(e) => setText(e.target.value)} onKeyDown=${key}></textarea>
    <div class="composer-row">
      <label class="model"><span class="unseen">Model</span>
        <select value=${model} onChange=${(e) => chooseModel(e.target.value)} disabled=${models.length === 0}>
          ${models.length === 0 && html`<option value="">no model yet</option>`}
          ${models.map((m) => html`<option key=${m.id} value=${m.id}>${m.id}</option>`)}
        </select></label>
      <button type="button" class="chip" aria-label=${changed ? `Settings, ${changed} changed` : "Settings"} aria-expanded=${Boolean(settingsOpen)} onClick=${onSettings}><${Icon} name="tune" />
        <span>Settings</span>${changed > 0 && html`<b>${changed}</b>`}</button>
      <span class="grow"></span>
      ${live
        ? html`<button type="button" key="stop" class="send stop" aria-label="Stop" title="Stop (Esc)" onClick=${stop}><${Icon} name="stop" /></button>`
        : html`<button type="submit" key="send" class="send" aria-label="Send" title="Send (Enter)" disabled=${!text.trim()}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}
