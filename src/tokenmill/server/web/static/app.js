// The page. Owns: which view is shown, the header, the key dialog, the theme, and the keyboard.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { access, setKey } from "./api.js";
import { ChatView } from "./chat.js";
import { CompareView, stopAll } from "./compare.js";
import { CompleteView } from "./complete.js";
import { begin, chat, loadList, loadModels, openConversation, regenerate, runningIn, shownPath, stop } from "./conversation.js";
import { EngineView } from "./engine.js";
import { warmUp } from "./markdown.js";
import { useStore } from "./store.js";
import { Dialog, holdsFiles, html, Icon, IconButton, toast, Toasts } from "./ui.js";

const KEYS = [
  ["Enter", "send"],
  ["Shift + Enter", "new line"],
  ["↑", "in an empty message: edit your last one"],
  ["Esc", "stop the answer, or close what is open"],
  ["/", "write a message"],
  ["n", "new chat"],
  ["r", "answer again"],
  ["b", "list of conversations"],
  ["s", "settings"],
  ["c", "chat"],
  ["m", "compare two models or settings"],
  ["w", "continue a text"],
  ["e", "engine"],
  ["t", "light, dark, or as the system"],
  ["k", "API key"],
  ["?", "this list"],
];
const THEMES = ["auto", "light", "dark"];
const THEME_WORDS = { auto: "as the system", light: "light", dark: "dark" };
const wide = () => matchMedia("(min-width: 900px)").matches;
const VIEWS = [["chat", "Chat"], ["compare", "Compare"], ["text", "Text"], ["engine", "Engine"]];
const viewOf = () => VIEWS.find(([name]) => location.hash.startsWith(`#${name}`))?.[0] ?? "chat";
const ofAddress = () => /^#chat\/(.+)/.exec(location.hash)?.[1];

// The address and the title name the conversation that is shown, so that a page that is loaded again shows it again.
function useAddress() {
  useEffect(() => {
    const show = () => ofAddress() && openConversation(ofAddress());
    const name = ({ open }) => {
      const wanted = open.leaf === null ? "#chat" : `#chat/${open.id}`;
      document.title = viewOf() === "chat" && open.title ? `${open.title} · tokenmill` : "tokenmill";
      if (viewOf() === "chat" && (location.hash || "#chat") !== wanted) history.replaceState(null, "", wanted);
    };
    const follow = () => {
      show();
      name(chat.get());
    };
    show();
    addEventListener("hashchange", follow);
    const end = chat.subscribe(name);
    return () => {
      removeEventListener("hashchange", follow);
      end();
    };
  }, []);
}

function App() {
  const [view, setView] = useState(viewOf());
  const [panels, setPanels] = useState({ list: wide(), settings: false });
  const [picked, setPicked] = useState(null);
  const [help, setHelp] = useState(false);
  const [menu, setMenu] = useState(false);
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || "auto");
  const dark = useDark(theme);
  const { asked, refused, key } = useStore(access);
  const main = useRef(null);
  const seen = useRef(false);

  const go = (next) => {
    location.hash = `#${next}`;
    setView(next);
  };
  const write = (event) => {
    event?.preventDefault();
    if (view === "engine") go("chat");
    requestAnimationFrame(() => document.getElementById("write")?.focus());
  };
  const nextTheme = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("tokenmill.theme", next);
    } catch {
      // Then the choice lasts as long as the page.
    }
    setTheme(next);
    toast(`Colours: ${THEME_WORDS[next]}`);
  };
  const askKey = () => access.set({ asked: true, refused: false });
  const showTimeline = (id) => {
    setPicked(id);
    go("engine");
  };

  useEffect(() => {
    const follow = () => setView(viewOf());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useAddress();
  useEffect(() => {
    if (seen.current && document.activeElement === document.body) main.current.focus({ preventScroll: true }); // the next Tab begins in the new view
    seen.current = true;
  }, [view]);
  useEffect(() => {
    loadModels();
  }, [key]);
  useEffect(() => {
    loadList();
    const again = () => chat.get().problem && loadModels();
    const heard = [["focus", loadList], ["focus", again], ["online", again]]; // another tab may have changed the list, the server may be back
    for (const [name, each] of heard) addEventListener(name, each);
    return () => heard.forEach(([name, each]) => removeEventListener(name, each));
  }, []);
  useEffect(() => {
    const held = (event) => { // a browser that is not told otherwise leaves the page for a file that is dropped on it
      if (!holdsFiles(event)) return;
      event.preventDefault();
      if (event.type === "drop" && view !== "chat") toast("Files are taken in the chat.");
    };
    for (const name of ["dragover", "drop"]) addEventListener(name, held);
    return () => ["dragover", "drop"].forEach((name) => removeEventListener(name, held));
  }, [view]);
  useShortcuts({
    "?": () => setHelp(true),
    "/": write,
    n: () => { go("chat"); begin(); },
    r: () => { const last = shownPath().at(-1); if (view === "chat" && last?.role === "assistant") regenerate(last); },
    b: () => { go("chat"); setPanels({ ...panels, list: !panels.list }); },
    s: () => { if (view !== "text") go("chat"); setPanels({ ...panels, settings: !panels.settings }); },
    c: () => go("chat"),
    m: () => go("compare"),
    w: () => go("text"),
    e: () => go("engine"),
    t: nextTheme,
    k: askKey,
    Escape: () => {
      if (view === "compare") stopAll();
      else if (runningIn(chat.get().open)) stop();
      else if (panels.settings) setPanels({ ...panels, settings: false });
      else if (panels.list && !wide()) setPanels({ ...panels, list: false });
    },
  });

  return html`${view !== "engine" && html`<a class="skip" href="#write" onClick=${write}>${view === "text" ? "To the text" : "To the message"}</a>`}
    <header class="top">
      <${IconButton} icon="list" label="List of conversations" aria-expanded=${view === "chat" && panels.list} onClick=${() => { go("chat"); setPanels({ ...panels, list: view !== "chat" || !panels.list }); }} />
      <span class="brand"><img src="static/icon.svg" alt="" width="22" height="22" /><span>tokenmill</span></span>
      <nav class="tabs" aria-label="Views">${VIEWS.map(([name, word]) => html`<a key=${name} href=${`#${name}`} aria-current=${view === name ? "page" : undefined}>${word}</a>`)}</nav>
      <span class="grow"></span>
      <${IconButton} icon="key" label=${key ? "API key: given" : "Give an API key"} onClick=${askKey} class="icon-button wide-only" />
      <${IconButton} icon="theme" label=${`Colours: ${THEME_WORDS[theme]}`} onClick=${nextTheme} class="icon-button wide-only" />
      <${IconButton} icon="help" label="Keyboard shortcuts" onClick=${() => setHelp(true)} class="icon-button wide-only" />
      <${IconButton} icon="more" label="More" onClick=${() => setMenu(true)} class="icon-button narrow-only" />
    </header>
    <main ref=${main} tabindex="-1">
      ${view === "chat" && html`<${ChatView} panels=${panels} setPanels=${setPanels} onTimeline=${showTimeline} onReload=${loadModels} onComplete=${() => go("text")} />`}
      ${view === "compare" && html`<${CompareView} />`}
      ${view === "text" && html`<${CompleteView} panels=${panels} setPanels=${setPanels} />`}
      ${view === "engine" && html`<${EngineView} theme=${dark} picked=${picked} onPick=${setPicked} key=${key} />`}
    </main>
    ${help && html`<${Dialog} title="Keyboard" onClose=${() => setHelp(false)}>
      <dl class="keys">${KEYS.map(([name, text]) => html`<div><dt>${name.split(" + ").map((k, i) => html`${i > 0 && " + "}<kbd>${k}</kbd>`)}</dt><dd>${text}</dd></div>`)}</dl>
    <//>`}
    ${menu && html`<${Dialog} title="More" onClose=${() => setMenu(false)}><ul class="formats">
      <li><button type="button" onClick=${() => { setMenu(false); askKey(); }}><${Icon} name="key" /><span><b>API key</b><small>${key ? "given, for this tab" : "none given"}</small></span></button></li>
      <li><button type="button" onClick=${nextTheme}><${Icon} name="theme" /><span><b>Colours</b><small>${THEME_WORDS[theme]}</small></span></button></li>
      <li><button type="button" onClick=${() => { setMenu(false); setHelp(true); }}><${Icon} name="help" /><span><b>Keyboard shortcuts</b><small>where there is a keyboard</small></span></button></li>
    </ul><//>`}
    ${asked && html`<${KeyDialog} refused=${refused} given=${key} />`}
    <${Toasts} />`;
}

function KeyDialog({ refused, given }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const save = (event) => {
    event.preventDefault();
    setKey(field.current.value.trim());
  };
  return html`<${Dialog} title="API key" onClose=${() => access.set({ asked: false })}>
    <form class="key-form" onSubmit=${save}>
      <p>${refused ? html`<strong class="bad">The server does not know that API key.</strong> ` : ""}A server started with <code>--api-key</code> answers only with its API key. It is kept for this tab, and forgotten when the tab is closed.</p>
      <label for="key">API key</label>
      <input id="key" ref=${field} autofocus type="password" autocomplete="off" spellcheck="false" aria-invalid=${refused ? "true" : undefined} />
      <div class="buttons">
        ${given && html`<button type="button" class="quiet" onClick=${() => setKey("")}>Forget it</button>`}
        <button type="submit" class="strong">Use it</button>
      </div>
    </form>
  <//>`;
}

// Is the page dark now? Plots are drawn anew when that changes.
function useDark(theme) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(system.matches);
  useEffect(() => {
    const follow = () => setDark(system.matches);
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  return theme === "auto" ? dark : theme === "dark";
}

// Single keys work where nothing is being written.
function useShortcuts(actions) {
  const latest = useRef(actions);
  latest.current = actions;
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      const writing = event.target.closest?.("input, textarea, select, [contenteditable]");
      if (writing && event.key !== "Escape") return;
      const action = latest.current[event.key];
      if (!action) return;
      if (event.key !== "Escape") event.preventDefault();
      action();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

(globalThis.requestIdleCallback ?? setTimeout)(warmUp);
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
