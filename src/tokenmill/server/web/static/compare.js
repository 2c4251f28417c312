// Two settings or models, side by side. Owns: their questions and answers, which live as long as the tab, and the view.
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { copyCode } from "./chat.js";
import { ModelChoice } from "./composer.js";
import { adopt, apiMessage, chat, withSystem } from "./conversation.js";
import { migrated, requestFields } from "./fields.js";
import { Figures } from "./figures.js";
import { useFollow } from "./follow.js";
import { Body, Trouble } from "./message.js";
import { SettingsFields } from "./settings.js";
import { kept, makeStore, useStore } from "./store.js";
import { isRunning, measure, onGrowth, run, stopAnswer } from "./stream.js";
import { add, alike, emptyAnswer, emptyConversation, split } from "./tree.js";
import { CopyButton, Dialog, enters, html, Icon, IconButton } from "./ui.js";

const NAMES = ["A", "B"];
const stored = kept("localStorage", "tokenmill.compare", [{}, { temperature: 0 }]);
const sides = NAMES.map((_, i) => {
  const { model = "", ...values } = stored.read()[i] ?? {};
  return { choice: makeStore({ model }), settings: makeStore(migrated(values)) };
});
const said = kept("sessionStorage", "tokenmill.comparison", []);
const known = (turn) => typeof turn?.question === "string" && Array.isArray(turn.answers) && turn.answers.length === NAMES.length && turn.answers.every((each) => typeof each?.content === "string");
const talk = makeStore({ turns: [said.read()].flat().filter(known).map((turn) => ({ ...turn, answers: turn.answers.map((each) => ({ ...emptyAnswer(), ...each })) })) }); // {question, answers: [A, B]}
const keep = () => said.write(talk.get().turns);
for (const side of sides) for (const store of [side.choice, side.settings]) store.subscribe(() => stored.write(sides.map((s) => ({ ...s.settings.get(), model: s.choice.get().model }))));

const busy = () => talk.get().turns.some((turn) => turn.answers.some(isRunning));

function request(which, turn) {
  const { system, ...rest } = sides[which].settings.get();
  const messages = [];
  for (const each of talk.get().turns) {
    messages.push({ role: "user", content: each.question });
    if (each === turn) break;
    messages.push(apiMessage(each.answers[which]));
  }
  return { model: sides[which].choice.get().model || chat.get().model, messages: withSystem(system, messages), ...requestFields(rest) };
}

function ask(question) {
  if (busy() || !question.trim()) return;
  const turn = { question: question.trim(), answers: NAMES.map(() => emptyAnswer()) };
  talk.set({ turns: [...talk.get().turns, turn] });
  keep();
  turn.answers.forEach((_, which) => answer(which, turn));
}

async function answer(which, turn) {
  const made = emptyAnswer();
  turn.answers[which] = made;
  await run(made, request(which, turn), { began: () => talk.set({}) });
  talk.set({});
  keep();
  await measure(made);
  talk.set({});
  keep();
}

// One side becomes a conversation of the chat.
async function goOnWith(which) {
  const made = emptyConversation();
  let parent = null;
  for (const turn of talk.get().turns) {
    const question = add(made, parent, { role: "user", content: turn.question });
    parent = add(made, question.id, { ...turn.answers[which] }).id;
  }
  made.title = talk.get().turns[0].question.split("\n")[0].slice(0, 60);
  await adopt(made);
  location.hash = "#chat";
}

export function CompareView() {
  const { turns } = useStore(talk);
  const { model, card } = useStore(chat);
  const [text, setText] = useState("");
  const { box, follow, toEnd, onScroll } = useFollow();
  const live = busy();
  useLayoutEffect(toEnd, [turns.length]);
  useEffect(() => {
    const growing = turns.at(-1)?.answers.filter(isRunning) ?? [];
    const ends = growing.map((each) => onGrowth(each, follow));
    return () => ends.forEach((end) => end());
  });
  const send = (event) => {
    event?.preventDefault();
    if (live || !text.trim()) return;
    ask(text);
    setText("");
  };
  return html`<div class="compare">
    <h1 class="unseen">Compare</h1>
    <div class="sides-head">${sides.map((side, i) => html`<${SideHead} key=${i} which=${i} side=${side} model=${model} card=${card} turns=${turns} live=${live} />`)}</div>
    <div class="messages compare-messages" ref=${box} onScroll=${onScroll} role="log" aria-live="off" aria-label="Questions and both answers" tabindex="0" onClick=${copyCode}>
      ${turns.length === 0 && html`<div class="welcome"><h2>One question, two answers</h2><p>Choose a model and settings for each side, then ask. Both answer at the same time, on the same engine.</p></div>`}
      ${turns.map((turn, n) => html`<section key=${n} class="turn" aria-label=${`Question ${n + 1}`}>
        <article class="message question" aria-label="You"><div class="said" dir="auto">${turn.question}</div></article>
        <div class="beside">${turn.answers.map((each, i) => html`<${Side} key=${i} which=${i} answer=${each} again=${n === turns.length - 1 && !live ? () => answer(i, turn) : null} />`)}</div>
        ${!turn.answers.some(isRunning) && turn.answers.every((a) => a.content) && html`<p class="alike">${alike(...turn.answers)}</p>`}
      </section>`)}
    </div>
    <form class="composer" onSubmit=${send}>
      <textarea id="write" rows="2" dir="auto" aria-label="Question to both" placeholder="Ask both" value=${text} onInput=${(e) => setText(e.target.value)}
        onKeyDown=${(e) => { if (enters(e) && !e.shiftKey) send(e); }}></textarea>
      <div class="composer-row">
        <button type="button" class="chip" disabled=${live || turns.length === 0} onClick=${() => { talk.set({ turns: [] }); keep(); }}><${Icon} name="plus" /><span>Begin anew</span></button>
        <span class="grow"></span>
        ${live
          ? html`<button type="button" class="send stop" aria-label="Stop" onClick=${() => turns.forEach((t) => t.answers.forEach(stopAnswer))}><${Icon} name="stop" /></button>`
          : html`<button type="submit" class="send" aria-label="Send" disabled=${!text.trim()}><${Icon} name="send" /></button>`}
      </div>
    </form>
  </div>`;
}

export const stopAll = () => talk.get().turns.forEach((turn) => turn.answers.forEach(stopAnswer));

function SideHead({ which, side, model, card, turns, live }) {
  const [open, setOpen] = useState(false);
  const value = useStore(side.settings);
  const { model: chosen } = useStore(side.choice);
  const name = NAMES[which];
  return html`<section class="side-head" aria-label=${`Side ${name}`}>
    <b class=${`side-mark side-${name}`} aria-hidden="true">${name}</b>
    <${ModelChoice} label=${`Model of ${name}`} value=${chosen || model} onChange=${(m) => side.choice.set({ model: m })} />
    <button type="button" class="chip" aria-label=${`${summary(value)}, settings of ${name}`} onClick=${() => setOpen(true)}><${Icon} name="tune" /><span class="what">${summary(value)}</span></button>
    <span class="grow"></span>
    <${IconButton} icon="branch" label=${`Go on with ${name} in the chat`} disabled=${live || turns.length === 0} onClick=${() => goOnWith(which)} />
    ${open && html`<${Dialog} title=${`Settings of ${name}`} onClose=${() => setOpen(false)}><div class="settings-body"><${SettingsFields} store=${side.settings} card=${card} model=${model} lean /></div><//>`}
  </section>`;
}

const WORDS = { temperature: "temperature", top_p: "top p", top_k: "top k", min_p: "min p", max_tokens: "at most", seed: "seed" };

function summary(value) {
  const parts = Object.entries(WORDS).filter(([key]) => value[key] !== undefined && value[key] !== "").map(([key, word]) => `${word} ${value[key]}`);
  if (value.system?.trim()) parts.unshift("system prompt");
  return parts.join(", ") || "defaults";
}

function Side({ which, answer: shown, again }) {
  const live = isRunning(shown);
  return html`<article class="message answer" aria-label=${`Answer ${NAMES[which]}`} aria-busy=${live}>
    <b class=${`side-mark side-${NAMES[which]}`} aria-hidden="true">${NAMES[which]}</b>
    <${Body} answer=${shown} live=${live} />
    ${shown.error && html`<${Trouble} error=${shown.error} onRetry=${again} />`}
    ${!live && html`<footer><div class="actions"><${CopyButton} text=${() => split(shown).content} label=${`Copy answer ${NAMES[which]}`} />
      ${again && html`<${IconButton} icon="redo" label=${`Answer ${NAMES[which]} again`} onClick=${again} />`}</div><${Figures} answer=${shown} bare /></footer>`}
  </article>`;
}
