// The chat. Owns: what stands where: the list, the messages, the place where one writes, the settings.
import { useEffect, useErrorBoundary, useLayoutEffect, useRef, useState } from "preact/hooks";
import { ModelCard } from "./card.js";
import { Composer } from "./composer.js";
import { ask, chat, exported, keepAgain, runningIn, shownPath } from "./conversation.js";
import { heldTo } from "./fields.js";
import { useFollow } from "./follow.js";
import { Message, Trouble } from "./message.js";
import { settings, SettingsPanel } from "./settings.js";
import { Conversations } from "./sidebar.js";
import { useStore } from "./store.js";
import { onGrowth } from "./stream.js";
import { copyText, html, Icon, saveFile } from "./ui.js";

const STARTS = ["Tell me a short story about a mill by a river.", "What is 12 + 30?", "What is the capital of France?"];
const AT_ONCE = 40; // messages

export function ChatView({ panels, setPanels, onTimeline, onReload, onComplete }) {
  const { open, list, problem, said, card, model, unkept, fleeting } = useStore(chat);
  const openSettings = () => setPanels({ ...panels, settings: true });
  return html`<div class="chat">
    <h1 class="unseen">Chat</h1>
    ${panels.list && html`<${Conversations} list=${list} open=${open} fleeting=${fleeting} onClose=${() => setPanels({ ...panels, list: false })} />`}
    <section class="talk" aria-label="Conversation">
      ${problem && html`<div class="banner"><${Trouble} error=${problem} onRetry=${onReload} onSettings=${openSettings} /></div>`}
      ${unkept && html`<div class="banner"><${Unkept} why=${unkept} id=${open.id} /></div>`}
      <${Shown} key=${open.id} open=${open} onSettings=${openSettings} onTimeline=${onTimeline} onComplete=${onComplete} />
      <${Composer} key=${`write-${open.id}`} open=${open} onSettings=${() => setPanels({ ...panels, settings: !panels.settings })} settingsOpen=${panels.settings} />
      <p class="unseen" role="status">${said}</p>
    </section>
    ${panels.settings && html`<${SettingsPanel} card=${card} model=${model} onClose=${() => setPanels({ ...panels, settings: false })} />`}
  </div>`;
}

function Unkept({ why, id }) {
  const save = async () => saveFile("conversation.json", "application/json", await exported("own", id));
  return html`<div class="trouble" role="alert">
    <h3>This conversation is not kept</h3>
    <p>${why} What you see lives as long as this page. Save it as a file, or delete other conversations and try again.</p>
    <div class="buttons"><button type="button" class="strong" onClick=${save}>Save as a file</button><button type="button" class="quiet" onClick=${keepAgain}>Try again</button></div>
  </div>`;
}

// Code blocks have a button of their own, outside of the component tree.
export async function copyCode(event) {
  const button = event.target.closest?.(".copy-code");
  if (!button) return;
  if (button.matches(".show-source")) {
    const source = button.closest(".code").querySelector("pre");
    source.hidden = !source.hidden;
    button.closest(".code").querySelector(".drawing").hidden = !source.hidden;
    button.setAttribute("aria-pressed", String(!source.hidden));
    return;
  }
  const done = await copyText(button.closest(".code").querySelector("code").textContent);
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// A conversation that cannot be drawn takes nothing else with it.
function Shown(props) {
  const [broken] = useErrorBoundary();
  return broken
    ? html`<div class="messages-frame"><div class="banner"><${Trouble} error=${{ title: "This conversation cannot be shown", text: `${broken.message}. It can be exported or deleted in the list.` }} /></div></div>`
    : html`<${Messages} ...${props} />`;
}

function Messages({ open, onSettings, onTimeline, onComplete }) {
  const { box, follow, away, toEnd, onScroll } = useFollow();
  const held = heldTo(useStore(settings));
  const live = runningIn(open);
  const nodes = shownPath();
  const asked = useRef(live);
  const first = useFirst(nodes.length, box);
  useLayoutEffect(() => {
    if (live && asked.current !== live) toEnd(); // whoever asks wants to see the answer
    else if (nodes.length) follow();
    asked.current = live;
  });
  useEffect(() => (live ? onGrowth(live, follow) : undefined), [live]);
  useKeptFocus(box);
  return html`<div class="messages-frame">
    <div class="messages" ref=${box} onScroll=${onScroll} onClick=${copyCode} role="log" aria-live="off" aria-label="Messages" tabindex="0">
      ${nodes.length === 0 && html`<${Welcome} onComplete=${onComplete} />`}
      ${nodes.slice(first).map((node, i) => html`<${Message} key=${node.id} node=${node} busy=${Boolean(live)} last=${first + i === nodes.length - 1} held=${held}
        onSettings=${onSettings} onTimeline=${onTimeline} />`)}
    </div>
    ${away && html`<button type="button" class="to-end" aria-label="To the newest" onClick=${toEnd}><${Icon} name="down" /></button>`}
  </div>`;
}

// Of a long conversation the end is drawn at once, what is before it when there is time. -> the first message that is drawn.
function useFirst(count, box) {
  const [first, setFirst] = useState(Math.max(0, count - AT_ONCE));
  const below = useRef(0); // pixels from the top of the view to the end: they stay when more is drawn above
  useLayoutEffect(() => {
    if (below.current) box.current.scrollTop = box.current.scrollHeight - below.current;
    below.current = 0;
    if (!first) return undefined;
    const draw = () => {
      below.current = box.current.scrollHeight - box.current.scrollTop;
      setFirst(Math.max(0, first - AT_ONCE));
    };
    const timer = setTimeout(draw, 30);
    return () => clearTimeout(timer);
  }, [first]);
  return first;
}

// What had the focus may go away with its message: then the messages have it, so that the next Tab begins there.
function useKeptFocus(box) {
  const inside = useRef(false);
  useEffect(() => {
    const note = (event) => { inside.current = Boolean(box.current?.contains(event.target)); };
    addEventListener("focusin", note);
    return () => removeEventListener("focusin", note);
  }, []);
  useEffect(() => {
    if (inside.current && document.activeElement === document.body) box.current.focus({ preventScroll: true });
  });
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
