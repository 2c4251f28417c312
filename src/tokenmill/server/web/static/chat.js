// The chat. Owns: what stands where: the list, the messages, the place where one writes, the settings.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { ModelCard } from "./card.js";
import { Composer } from "./composer.js";
import { ask, chat, runningIn, shownPath } from "./conversation.js";
import { heldTo } from "./fields.js";
import { Message, Trouble } from "./message.js";
import { settings, SettingsPanel } from "./settings.js";
import { Conversations } from "./sidebar.js";
import { useStore } from "./store.js";
import { onGrowth } from "./stream.js";
import { copyText, html, Icon } from "./ui.js";

const STARTS = ["Tell me a short story about a mill by a river.", "What is 12 + 30?", "What is the capital of France?"];
const NEAR = 90; // pixels from the end that still count as being there

export function ChatView({ panels, setPanels, onTimeline, onReload, onComplete }) {
  const { open, list, problem, said, card, model } = useStore(chat);
  const openSettings = () => setPanels({ ...panels, settings: true });
  return html`<div class="chat">
    <h1 class="unseen">Chat</h1>
    ${panels.list && html`<${Conversations} list=${list} open=${open} onClose=${() => setPanels({ ...panels, list: false })} />`}
    <section class="talk" aria-label="Conversation">
      ${problem && html`<div class="banner"><${Trouble} error=${problem} onRetry=${onReload} onSettings=${openSettings} /></div>`}
      <${Messages} key=${open.id} open=${open} onSettings=${openSettings} onTimeline=${onTimeline} onComplete=${onComplete} />
      <${Composer} key=${`write-${open.id}`} open=${open} onSettings=${() => setPanels({ ...panels, settings: !panels.settings })} settingsOpen=${panels.settings} />
      <p class="unseen" role="status">${said}</p>
    </section>
    ${panels.settings && html`<${SettingsPanel} card=${card} model=${model} onClose=${() => setPanels({ ...panels, settings: false })} />`}
  </div>`;
}

// Code blocks have a button of their own, outside of the component tree.
export async function copyCode(event) {
  const button = event.target.closest?.(".copy-code");
  if (!button) return;
  const done = await copyText(button.closest(".code").querySelector("code").textContent);
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function Messages({ open, onSettings, onTimeline, onComplete }) {
  const box = useRef(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  const held = heldTo(useStore(settings));
  const live = runningIn(open);
  const nodes = shownPath();
  const toEnd = () => {
    box.current.scrollTop = box.current.scrollHeight;
  };
  useLayoutEffect(() => {
    if (follows.current && nodes.length) toEnd();
  });
  useEffect(() => (live ? onGrowth(live, () => follows.current && toEnd()) : undefined), [live]);
  const scrolled = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current;
    const near = scrollHeight - scrollTop - clientHeight < NEAR;
    follows.current = near;
    setAway(!near && nodes.length > 0);
  };
  return html`<div class="messages-frame">
    <div class="messages" ref=${box} onScroll=${scrolled} onClick=${copyCode} role="log" aria-live="off" aria-label="Messages" tabindex="0">
      ${nodes.length === 0 && html`<${Welcome} onComplete=${onComplete} />`}
      ${nodes.map((node, i) => html`<${Message} key=${node.id} node=${node} busy=${Boolean(live)} last=${i === nodes.length - 1} held=${held}
        onSettings=${onSettings} onTimeline=${onTimeline} />`)}
    </div>
    ${away && html`<button type="button" class="to-end" aria-label="To the newest" onClick=${toEnd}><${Icon} name="down" /></button>`}
  </div>`;
}

function Welcome({ onComplete }) {
  const { model, card } = useStore(chat);
  const base = card && !card.can.chat;
  return html`<div class="welcome">
    <h2>${base ? "A model that continues text" : "What shall we talk about?"}</h2>
    <p>${base ? "It has no chat template, so it does not know questions and answers. " : ""}What you write goes to this server only, and is kept in this browser only.</p>
    <${ModelCard} card=${card} model=${model} />
    ${base ? html`<div class="starts"><button type="button" class="strong" onClick=${onComplete}>Continue a text</button></div>`
      : html`<div class="starts">${STARTS.map((text) => html`<button type="button" key=${text} onClick=${() => ask(text)}>${text}</button>`)}</div>`}
  </div>`;
}
