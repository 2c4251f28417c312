// Small parts that every view uses. Owns: html, icons, dialogs, toasts, copying, words for numbers and times.
import { h } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import htm from "htm";
import { makeStore, useStore } from "./store.js";

export const html = htm.bind(h);

const PATHS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  redo: "M20 11a8 8 0 1 0-2.3 6.2M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  left: "M14.5 6L8.5 12l6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  tune: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5v5M8 14.5v5",
  list: "M4 6h16M4 12h16M4 18h10",
  close: "M6 6l12 12M18 6L6 18",
  key: "M7.5 8.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7M11 12h10M17 12v3.5M21 12v2.5",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  help: "M9 9.2a3 3 0 1 1 4.3 2.7c-.9.5-1.3 1-1.3 2.1M12 17.5v.2",
  time: "M12 7v5l3.5 2M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17",
  pause: "M8 5v14M16 5v14",
  play: "M8 5l11 7-11 7z",
  file: "M7 3.5h7l4 4v13H7zM14 3.5v4h4",
  files: "M4 8h16M8 4L4 8l4 4M20 16H4M16 12l4 4-4 4",
  clip: "M19 11.5l-7.2 7.2a4.6 4.6 0 0 1-6.5-6.5l7.6-7.6a3.1 3.1 0 0 1 4.4 4.4l-7.5 7.5a1.5 1.5 0 0 1-2.2-2.2l6.9-6.9",
  search: "M10.5 4.5a6 6 0 1 0 0 12 6 6 0 0 0 0-12M15 15l5 5",
  branch: "M7 4v16M7 14c6 0 10-2 10-8M17 4v2",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  tool: "M14.7 6.3a4 4 0 0 0-5.3 5.2L4 17l3 3 5.5-5.4a4 4 0 0 0 5.2-5.3l-2.6 2.6-2.4-.6-.6-2.4z",
  more: "M5 11.4v1.2M12 11.4v1.2M19 11.4v1.2",
  undo: "M9 8H15a4.5 4.5 0 0 1 0 9H8M9 8l3-3.5M9 8l3 3.5",
};

export const Icon = ({ name }) =>
  html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;

// A button with an icon; its label is spoken, and shown as a tip.
export function IconButton({ icon, label, onClick, ...rest }) {
  return html`<button type="button" class="icon-button" aria-label=${label} title=${label} onClick=${onClick} ...${rest}>
    <${Icon} name=${icon} />
  </button>`;
}

// A modal dialog: the browser keeps the focus inside and closes it on Escape.
export function Dialog({ title, onClose, children, wide = false, class: extra = "" }) {
  const ref = useRef(null);
  useEffect(() => {
    const dialog = ref.current;
    const before = document.activeElement;
    if (!dialog.open) dialog.showModal();
    return () => {
      dialog.close(); // as long as it is open, nothing else can have the focus
      if (before instanceof HTMLElement && before.isConnected) before.focus();
    };
  }, []);
  const outside = (event) => event.target === ref.current && onClose();
  return html`<dialog ref=${ref} class=${`dialog ${wide ? "wide" : ""} ${extra}`} aria-labelledby="dialog-title"
    onCancel=${(event) => { event.preventDefault(); onClose(); }} onMouseDown=${outside}>
    <div class="dialog-body">
      <header><h2 id="dialog-title">${title}</h2><${IconButton} icon="close" label="Close" onClick=${onClose} /></header>
      ${children}
    </div>
  </dialog>`;
}

// Enter, and not the one that ends a composition (Safari says so only by the code).
export const enters = (event) => event.key === "Enter" && !event.isComposing && event.keyCode !== 229;

// Does one drag files? Words that are dragged are the browser's.
export const holdsFiles = (event) => Boolean(event.dataTransfer?.types.includes("Files"));

// Write on in the message, where that does not bring up a keyboard on the screen.
export function writeOn() {
  if (matchMedia("(hover: hover)").matches) document.getElementById("write")?.focus({ preventScroll: true });
}

// A panel that had the focus gives it back to what opened it when it goes.
export function useFocusBack() {
  const ref = useRef(null);
  useLayoutEffect(() => {
    const before = document.activeElement;
    return () => {
      if (!ref.current?.contains(document.activeElement)) return;
      if (before instanceof HTMLElement && before.isConnected && before !== document.body) before.focus({ preventScroll: true });
      else writeOn();
    };
  }, []);
  return ref;
}

// ---------------------------------------------------------------- toasts

const toasts = makeStore({ text: "", action: null, label: "", id: 0 });
let timer = 0;

export function toast(text, label = "", action = null) {
  clearTimeout(timer);
  toasts.set({ text, label, action, id: toasts.get().id + 1 });
  timer = setTimeout(() => toasts.set({ text: "", label: "", action: null }), Math.max(action ? 8000 : 3500, text.length * 60));
}

export function Toasts() {
  const { text, label, action } = useStore(toasts);
  const act = () => {
    action();
    toasts.set({ text: "", label: "", action: null });
  };
  return html`<div class="toasts" role="status">
    ${text && html`<div class="toast"><span>${text}</span>${action && html`<button type="button" onClick=${act}>${label}</button>`}</div>`}
  </div>`;
}

// ---------------------------------------------------------------- copying and saving

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without https the clipboard API is missing: the old way still works.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    (document.querySelector("dialog[open]") || document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function CopyButton({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    if (!(await copyText(typeof text === "function" ? text() : text))) {
      toast("The browser did not allow copying.");
      return;
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${IconButton} icon=${done ? "check" : "copy"} label=${done ? "Copied" : label} onClick=${copy} />`;
}

export function saveFile(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// ---------------------------------------------------------------- words

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (n) => WHOLE.format(n);

// A name in a sentence.
export const brief = (text) => (text.length > 60 ? `${[...text].slice(0, 58).join("").trimEnd()} …` : text);

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function rate(n) {
  if (n === 0) return "0";
  return n >= 100 ? count(n) : n >= 10 ? n.toFixed(1) : n.toFixed(2).replace(/0$/, "");
}

export function bytes(n) {
  if (!n) return "";
  const step = n >= 1 << 30 ? [1 << 30, "GiB"] : n >= 1 << 20 ? [1 << 20, "MiB"] : n >= 1024 ? [1024, "KiB"] : [1, "bytes"];
  return `${Number((n / step[0]).toPrecision(3))} ${step[1]}`;
}

export function duration(ms) {
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.round((ms % 60_000) / 1000)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}
