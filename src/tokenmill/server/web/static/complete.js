// A text that the model continues, without a chat's form: for base models, and for seeing what a model really says.
// Owns: the text, which stays in this browser, and its steps back.
import { useEffect, useRef, useState } from "preact/hooks";
import { ContextMeter } from "./card.js";
import { ModelChoice } from "./composer.js";
import { chat, chooseModel } from "./conversation.js";
import { changedCount, requestFields } from "./fields.js";
import { Figures, livePace } from "./figures.js";
import { Trouble } from "./message.js";
import { settings, SettingsPanel } from "./settings.js";
import { kept, makeStore, useStore } from "./store.js";
import { isRunning, measure, onGrowth, run, stopAnswer } from "./stream.js";
import { emptyAnswer } from "./tree.js";
import { CopyButton, html, Icon, IconButton } from "./ui.js";

const stored = kept("localStorage", "tokenmill.text", "");
const page = makeStore({ text: stored.read(), before: [], answer: null });
page.subscribe(({ text }) => stored.write(text));
const EXAMPLES = ["Once upon a time, by a slow river,", "The three most useful facts about water are:\n1.", "def fibonacci(n: int) -> int:\n"];
const USUAL = 128; // tokens, where the settings say nothing: a text without a chat's end may go on for ever

export const stopText = () => page.get().answer && stopAnswer(page.get().answer);

async function goOn() {
  const { text, before } = page.get();
  const answer = emptyAnswer();
  const { system, form, schema, tools, reasoning_effort, ...rest } = settings.get(); // only chats have these
  const body = { model: chat.get().model, prompt: text, max_tokens: USUAL, ...requestFields(rest) };
  page.set({ before: [...before.slice(-30), text], answer });
  const ends = onGrowth(answer, () => page.set({ text: text + answer.content }));
  await run(answer, body, { path: "v1/completions", began: () => page.set({}) });
  ends();
  page.set({ text: text + answer.content });
  await measure(answer);
  page.set({});
}

const back = () => {
  const { before } = page.get();
  page.set({ text: before.at(-1), before: before.slice(0, -1), answer: null });
};

export function CompleteView({ panels, setPanels }) {
  const { text, before, answer } = useStore(page);
  const { model, card } = useStore(chat);
  const changed = changedCount(useStore(settings));
  const area = useRef(null);
  const [follows, setFollows] = useState(true);
  const live = Boolean(answer && isRunning(answer));
  useEffect(() => {
    if (live && follows) area.current.scrollTop = area.current.scrollHeight;
  });
  useEffect(() => area.current.focus({ preventScroll: true }), []);
  const send = (event) => {
    event?.preventDefault();
    if (!live && text) goOn();
  };
  const key = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
    if (event.key === "Escape" && live) stopText();
  };
  return html`<div class="chat complete-view">
    <h1 class="unseen">Continue a text</h1>
    <form class="complete" onSubmit=${send}>
      <textarea id="write" ref=${area} class="page-text" dir="auto" spellcheck="false" aria-label="Text to continue" aria-busy=${live} readonly=${live} placeholder="Begin a text; the model goes on. Nothing is added to it: no system prompt, no roles."
        value=${text} onInput=${(e) => page.set({ text: e.target.value })} onKeyDown=${key}
        onScroll=${(e) => setFollows(e.target.scrollHeight - e.target.scrollTop - e.target.clientHeight < 60)}></textarea>
      ${!text && html`<div class="starts">${EXAMPLES.map((each) => html`<button type="button" key=${each} onClick=${() => { page.set({ text: each }); area.current.focus(); }}>${each.trim()}</button>`)}</div>`}
      ${answer?.error && html`<${Trouble} error=${answer.error} onRetry=${goOn} onSettings=${() => setPanels({ ...panels, settings: true })} />`}
      <div class="composer-row">
        <${ModelChoice} value=${model} onChange=${chooseModel} />
        <button type="button" class="chip" aria-label=${changed ? `Settings ${changed} changed` : "Settings"} aria-expanded=${Boolean(panels.settings)} onClick=${() => setPanels({ ...panels, settings: !panels.settings })}><${Icon} name="tune" /><span>Settings</span>${changed > 0 && html` <b>${changed}</b>`}</button>
        <${IconButton} icon="undo" label="Take the last continuation back" disabled=${live || before.length === 0} onClick=${back} />
        <${CopyButton} text=${() => text} label="Copy the text" />
        <span class="grow"></span>
        ${live ? html`<p class="figures">${livePace(answer)}</p>` : answer && html`<${Figures} answer=${answer} bare />`}
        <${ContextMeter} card=${card} model=${model} used=${0} text=${live ? "" : text} />
        ${live
          ? html`<button type="button" class="send stop" aria-label="Stop" title="Stop (Esc)" onClick=${stopText}><${Icon} name="stop" /></button>`
          : html`<button type="submit" class="strong" title="Ctrl + Enter" disabled=${!text}>${answer ? "Go on" : "Continue"}</button>`}
      </div>
      <p class="unseen" role="status">${answer && !live ? (answer.error ? answer.error.title : "The text has been continued.") : ""}</p>
    </form>
    ${panels.settings && html`<${SettingsPanel} raw card=${card} model=${model} onClose=${() => setPanels({ ...panels, settings: false })} />`}
  </div>`;
}
