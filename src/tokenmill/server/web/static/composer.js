// Where one writes. Owns: the message being written, its files, and the row under it.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { ContextMeter } from "./card.js";
import { ask, chat, chooseModel, editNode, lastQuestion, runningIn, shownPath, stop } from "./conversation.js";
import { changedCount } from "./fields.js";
import { FileChip } from "./message.js";
import { settings } from "./settings.js";
import { kept, useStore } from "./store.js";
import { spoken } from "./tree.js";
import { enters, holdsFiles, html, Icon, IconButton, plural, toast, writeOn } from "./ui.js";

const LONG_PASTE = 3000; // characters: what is longer becomes a file
const LARGEST = 2 << 20;
const LARGEST_PDF = 64 << 20; // mostly pictures; its text is held to what any text is
const BINARY = /\u0000/;

// What is being written in each conversation outlives a look at another one, and the page; files do unless they are large.
const MOST_KEPT = 1 << 20;
const stored = kept("sessionStorage", "tokenmill.drafts", {});
const isFile = (file) => typeof file?.name === "string" && typeof file.text === "string";
const drafts = new Map(Object.entries(stored.read()).map(([id, draft]) => [id, { text: String(draft?.text ?? (typeof draft === "string" ? draft : "")), files: [draft?.files ?? []].flat().filter(isFile) }]));
const ofConversation = (open) => (open.leaf === null ? "new" : open.id);

function keepDraft(id, draft) {
  if (draft.text || draft.files.length) drafts.set(id, draft);
  else drafts.delete(id);
  const size = [...drafts.values()].flatMap((each) => each.files).reduce((sum, file) => sum + file.text.length, 0);
  stored.write(Object.fromEntries([...drafts].map(([key, each]) => [key, size > MOST_KEPT ? { text: each.text } : each])));
}

// -> {name, text, note}. `job` is told how far it is, and may end it.
async function readFile(file, job) {
  if (file.type.startsWith("image/")) throw new Error(`${file.name}: this model does not see pictures.`);
  if (/\.pdf$/i.test(file.name) || (await file.slice(0, 5).text()) === "%PDF-") return readPdf(file, job);
  if (file.size > LARGEST) throw new Error(`${file.name} is larger than 2 MiB.`);
  const text = await file.text();
  if (BINARY.test(text.slice(0, 4000))) throw new Error(`${file.name} is not a text file.`);
  return { name: file.name || "pasted.txt", text };
}

async function readPdf(file, { signal, tell }) {
  if (file.size > LARGEST_PDF) throw new Error(`${file.name} is larger than 64 MiB.`);
  const pdf = await import("./pdf.js").catch(() => {
    throw new Error(`${file.name} cannot be read: the server does not answer.`);
  });
  try {
    const progress = (page, pages) => tell(`page ${page} of ${pages}`);
    const { text, unknown, faults } = await pdf.readPdf(new Uint8Array(await file.arrayBuffer()), { progress, signal });
    const lost = [unknown && `${plural(unknown, "sign")} whose letters the file does not tell became \ufffd`, faults && `${plural(faults, "damaged page")} could be read in part only`].filter(Boolean);
    const note = lost.length ? `${file.name}: ${lost.join(", ")}.` : "";
    return { name: file.name || "pasted.pdf", text, note };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`${file.name} ${error.message}`);
  }
}

// The composer that is on the page: a file that took a while goes there, or to the draft of the conversation it was for.
let shown = null;

function useFiles(id, before) {
  const [files, setFiles] = useState(before);
  const [jobs, setJobs] = useState([]); // files that are being read
  const add = (file) => setFiles((all) => [...all, file]);
  useEffect(() => { shown = { id, add }; });
  const take = async (list) => {
    const notes = [];
    for (const file of list) {
      const stopper = new AbortController();
      const job = { name: file.name, said: "", stop: () => stopper.abort(), signal: stopper.signal };
      job.tell = (said) => setJobs((all) => [...all.filter((each) => each.name !== job.name), { ...job, said }]);
      try {
        const { note, ...read } = await readFile(file, job);
        if (note) notes.push(note);
        const draft = drafts.get(id) ?? { text: "", files: [] };
        if (shown?.id === id) shown.add(read);
        else keepDraft(id, { ...draft, files: [...draft.files, read] });
      } catch (error) {
        if (error.name !== "AbortError") notes.push(error.message);
      }
      setJobs((all) => all.filter((each) => each.name !== job.name));
    }
    if (notes.length) toast(notes.join(" "));
  };
  return { files, setFiles, jobs, take };
}

export function ModelChoice({ value, onChange, label = "Model" }) {
  const { models } = useStore(chat);
  const own = models.filter((m) => !m.parent);
  const adapters = models.filter((m) => m.parent);
  const option = (m) => html`<option key=${m.id} value=${m.id}>${m.id}</option>`;
  return html`<label class="model-choice"><span class="unseen">${label}</span>
    <select value=${value} onChange=${(e) => onChange(e.target.value)} disabled=${models.length === 0}>
      ${models.length === 0 && html`<option value="">no model yet</option>`}
      ${adapters.length ? html`<optgroup label="Models">${own.map(option)}</optgroup><optgroup label="Adapters">${adapters.map(option)}</optgroup>` : own.map(option)}
    </select></label>`;
}

// Tokens that the shown path takes, as far as the engine said.
function usedBy(nodes) {
  const last = nodes.findLast((n) => n.role === "assistant" && n.stats?.prompt);
  return last ? last.stats.prompt + last.stats.output : 0;
}

// Files may be dropped anywhere on the chat. -> whether some are held above it.
function useDroppedFiles(take) {
  const [over, setOver] = useState(false);
  const latest = useRef(take);
  latest.current = take;
  useEffect(() => {
    const drag = (event) => setOver(holdsFiles(event) && (event.type === "dragover" || event.relatedTarget !== null));
    const drop = (event) => {
      if (!holdsFiles(event)) return;
      setOver(false);
      latest.current([...event.dataTransfer.files]);
    };
    const heard = [["dragover", drag], ["dragleave", drag], ["drop", drop]];
    for (const [name, each] of heard) addEventListener(name, each);
    return () => heard.forEach(([name, each]) => removeEventListener(name, each));
  }, []);
  return over;
}

export function Composer({ open, onSettings, settingsOpen }) {
  const before = drafts.get(ofConversation(open));
  const [text, setText] = useState(before?.text ?? "");
  const { files, setFiles, jobs, take } = useFiles(ofConversation(open), before?.files ?? []);
  useEffect(() => keepDraft(ofConversation(open), { text, files }), [text, files]);
  const area = useRef(null);
  const picker = useRef(null);
  const { model, card } = useStore(chat);
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
    if (jobs.length) toast(`${jobs[0].name} is still being read.`);
    if (live || jobs.length || (!text.trim() && !files.length)) return;
    keepDraft(ofConversation(open), { text: "", files: [] });
    ask(text, files);
    setText("");
    setFiles([]);
  };
  const paste = (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      take(event.clipboardData.files);
      return;
    }
    const pasted = event.clipboardData.getData("text/plain");
    if (pasted.length < LONG_PASTE) return;
    event.preventDefault();
    setFiles((before) => [...before, { name: `pasted-${before.length + 1}.txt`, text: pasted }]);
    toast("The long text was added as a file.", "As text", () => {
      setFiles((before) => before.filter((f) => f.text !== pasted));
      setText((before) => before + pasted);
    });
  };
  const key = (event) => {
    if (enters(event) && !event.shiftKey) send(event);
    if (event.key === "ArrowUp" && !text && !live && lastQuestion()) {
      event.preventDefault();
      editNode(lastQuestion());
    }
  };
  const over = useDroppedFiles(take);
  return html`<form class=${over ? "composer over" : "composer"} onSubmit=${send}>
    ${files.length + jobs.length > 0 && html`<ul class="files" aria-label="Files to send">${files.map((file, i) => html`<li key=${i}><${FileChip} file=${file} onRemove=${() => setFiles(files.filter((_, j) => j !== i))} /></li>`)}
      ${jobs.map((job) => html`<li key=${job.name}><span class="file job"><${Icon} name="file" /><span dir="auto">${job.name}</span><small>${job.said}</small><${IconButton} icon="close" label=${`Stop reading ${job.name}`} onClick=${job.stop} /></span></li>`)}</ul>`}
    <textarea id="write" ref=${area} rows="1" dir="auto" aria-label="Message" placeholder=${over ? "Drop text or PDF files here" : "Write a message"} value=${text}
      onInput=${(e) => setText(e.target.value)} onKeyDown=${key} onPaste=${paste}></textarea>
    <div class="composer-row">
      <${IconButton} icon="clip" label="Add text or PDF files" onClick=${() => picker.current.click()} />
      <input ref=${picker} type="file" multiple class="unseen" tabindex="-1" aria-label="Text or PDF files" onChange=${(e) => { take([...e.target.files]); e.target.value = ""; }} />
      <${ModelChoice} value=${model} onChange=${chooseModel} />
      <button type="button" class="chip" aria-label=${changed ? `Settings ${changed} changed` : "Settings"} aria-expanded=${Boolean(settingsOpen)} onClick=${onSettings}><${Icon} name="tune" />
        <span>Settings</span>${changed > 0 && html` <b>${changed}</b>`}</button>
      <span class="grow"></span>
      <${ContextMeter} card=${card} model=${model} used=${usedBy(shownPath())} text=${live ? "" : spoken({ content: text, files })} />
      ${live
        ? html`<button type="button" key="stop" class="send stop" aria-label="Stop" title="Stop (Esc)" onClick=${() => { stop(); writeOn(); }}><${Icon} name="stop" /></button>`
        : html`<button type="submit" key="send" class="send" aria-label="Send" title="Send (Enter)" disabled=${jobs.length > 0 || (!text.trim() && !files.length)}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}
