// The list of conversations. Owns: its groups by date, searching it, and files of conversations coming in and going out.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { begin, exported, forget, imported, loadList, openConversation, rename, runningIn, search } from "./conversation.js";
import { FORMATS } from "./exchange.js";
import { brief, copyText, Dialog, enters, html, Icon, IconButton, plural, saveFile, toast, useFocusBack } from "./ui.js";

const DAY = 86_400_000;

// Entries, the newest first, under headings by their day.
export function grouped(list, now = new Date()) {
  const today = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  const word = (at) => {
    if (at >= today) return "Today";
    if (at >= today - DAY) return "Yesterday";
    if (at >= today - 7 * DAY) return "Last 7 days";
    if (at >= today - 30 * DAY) return "Last 30 days";
    const date = new Date(at);
    return date.toLocaleDateString("en", date.getFullYear() === now.getFullYear() ? { month: "long" } : { month: "long", year: "numeric" });
  };
  const groups = [];
  for (const entry of list) {
    const label = word(entry.updated);
    if (groups.at(-1)?.label !== label) groups.push({ label, entries: [] });
    groups.at(-1).entries.push(entry);
  }
  return groups;
}

export function Conversations({ list, open, fleeting, onClose }) {
  const [query, setQuery] = useState("");
  const [found, setFound] = useState(null);
  const [files, setFiles] = useState(false);
  const panel = useFocusBack();
  useEffect(() => {
    if (!query.trim()) {
      setFound(null);
      return undefined;
    }
    let over = false;
    const timer = setTimeout(() => search(query).then((ids) => over || setFound(ids)), 120);
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [query, list]);
  const choose = (action) => {
    action();
    if (matchMedia("(max-width: 760px)").matches) onClose();
  };
  const shown = found ? list.filter((entry) => found.has(entry.id)) : list;
  return html`<nav class="conversations" aria-label="Conversations" ref=${panel}>
    <header>
      <button type="button" class="new" onClick=${() => choose(begin)}><${Icon} name="plus" />New chat</button>
      <${IconButton} icon="files" label="Import and export" onClick=${() => setFiles(true)} />
      <${IconButton} icon="close" label="Close the list" onClick=${onClose} class="icon-button narrow-only" />
    </header>
    ${list.length > 0 && html`<div class="search"><${Icon} name="search" /><input type="search" aria-label="Search the conversations" placeholder="Search" value=${query} onInput=${(e) => setQuery(e.target.value)}
      onKeyDown=${(e) => { if (e.key === "Escape" && query) { e.stopPropagation(); setQuery(""); } }} /></div>`}
    ${fleeting && html`<p class="none">This browser keeps nothing here: conversations last as long as the page. Export what you need.</p>`}
    ${list.length === 0 && !fleeting && html`<p class="none">Conversations stay in this browser. They appear here.</p>`}
    <div class="list">
      ${found && shown.length === 0 && html`<p class="none" role="status">Nothing holds “${query.trim()}”.</p>`}
      ${grouped(shown).map((group) => html`<section key=${group.label}><h2>${group.label}</h2>
        <ul>${group.entries.map((entry) => html`<${Entry} key=${entry.id} entry=${entry} current=${entry.id === open.id} onChoose=${() => choose(() => openConversation(entry.id))} />`)}</ul></section>`)}
    </div>
    ${files && html`<${Files} count=${list.length} onClose=${() => setFiles(false)} />`}
  </nav>`;
}

function Entry({ entry, current, onChoose }) {
  const [naming, setNaming] = useState(false);
  const row = useRef(null);
  const named = useRef(false);
  const over = useRef(true);
  useLayoutEffect(() => {
    over.current = !naming;
    if (naming) row.current.querySelector("input").select();
    else if (named.current) row.current.querySelector(".open").focus({ preventScroll: true });
    named.current = false;
  }, [naming]);
  const [saving, setSaving] = useState(false);
  const title = entry.title || "Untitled";
  const name = brief(title);
  const remove = async () => {
    const undo = await forget(entry.id);
    if (document.activeElement === document.body) document.querySelector(".conversations .new")?.focus({ preventScroll: true });
    toast(`Deleted “${name}”.`, "Undo", undo);
  };
  if (naming) {
    const end = (value, byKey = false) => {
      if (over.current) return; // an input that goes away loses the focus, too
      over.current = true;
      named.current = byKey;
      setNaming(false);
      if (value !== null) rename(entry.id, value);
    };
    return html`<li ref=${row}><input class="rename" aria-label="New name" dir="auto" value=${entry.title}
      onBlur=${(e) => end(e.target.value)} onKeyDown=${(e) => { if (enters(e)) end(e.target.value, true); if (e.key === "Escape") { e.stopPropagation(); end(null, true); } }} /></li>`;
  }
  return html`<li ref=${row} class=${current ? "current" : ""}>
    <button type="button" class="open" dir="auto" title=${title.length > 24 ? title : undefined} aria-current=${current ? "true" : undefined} onClick=${onChoose}>${title}</button>
    ${runningIn(entry) && html`<span class="answering" title="Answering" aria-hidden="true"></span>`}
    <span class="row-actions">
      <${IconButton} icon="edit" label=${`Rename “${name}”`} onClick=${() => setNaming(true)} />
      <${IconButton} icon="save" label=${`Export “${name}”`} onClick=${() => setSaving(true)} />
      <${IconButton} icon="trash" label=${`Delete “${name}”`} onClick=${remove} />
    </span>
    ${saving && html`<${Dialog} title=${`Export “${name}”`} class="not-listed" onClose=${() => setSaving(false)}><${Formats} id=${entry.id} name=${title} onDone=${() => setSaving(false)} /><//>`}
  </li>`;
}

// ---------------------------------------------------------------- files

function Formats({ id, name, onDone }) {
  const file = name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50);
  const save = async (format) => {
    const markdown = format === "markdown";
    saveFile(`${file}${markdown ? ".md" : format === "own" ? ".json" : `.${format}.json`}`, markdown ? "text/markdown" : "application/json", await exported(format, id));
    onDone();
  };
  const copy = async () => {
    if (await copyText(await exported("markdown", id))) toast("The clipboard has it as Markdown.");
    onDone();
  };
  return html`<ul class="formats">
    ${Object.entries(FORMATS).map(([key, { label, hint }]) => html`<li key=${key}><button type="button" onClick=${() => save(key)}><${Icon} name="save" /><span><b>${label}</b><small>${hint}</small></span></button></li>`)}
    <li><button type="button" onClick=${() => save("markdown")}><${Icon} name="save" /><span><b>Markdown</b><small>to be read by people</small></span></button></li>
    ${id !== null && html`<li><button type="button" onClick=${copy}><${Icon} name="copy" /><span><b>Copy as Markdown</b><small>into the clipboard</small></span></button></li>`}
  </ul>`;
}

function Files({ count, onClose }) {
  const input = useRef(null);
  const [problem, setProblem] = useState("");
  const read = async (event) => {
    try {
      let read = 0;
      for (const file of event.target.files) read += await imported(await file.text());
      toast(`Imported ${plural(read, "conversation")}.`);
      onClose();
    } catch (error) {
      setProblem(error.message);
      await loadList();
    }
    event.target.value = "";
  };
  return html`<${Dialog} title="Import and export" onClose=${onClose}>
    <h3>Import</h3>
    <p class="hint">Files of tokenmill, Open WebUI or OpenAI (conversations.json), or lists of messages. Branches are kept.</p>
    <div class="buttons start"><button type="button" class="strong" onClick=${() => input.current.click()}><${Icon} name="file" />Choose files</button>
      <input ref=${input} type="file" accept=".json,.jsonl,application/json" multiple class="unseen" tabindex="-1" aria-label="Files to import" onChange=${read} /></div>
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
    <h3 class="later">Export${count ? ` ${count > 1 ? "all " : ""}${plural(count, "conversation")}` : ""}</h3>
    ${count ? html`<${Formats} id=${null} name="conversations" onDone=${onClose} />` : html`<p class="hint">There is none yet.</p>`}
  <//>`;
}
