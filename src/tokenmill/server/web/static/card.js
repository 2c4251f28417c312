// The served model in a few words. Owns: the card of the empty state, and how full the context is.
import { useEffect, useState } from "preact/hooks";
import { call } from "./api.js";
import { bytes, count, html, Icon } from "./ui.js";

const SIGNS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

export function short(n) {
  const found = SIGNS.find(([size]) => n >= size);
  return found ? `${Number((n / found[0]).toPrecision(3))}${found[1]}` : String(Math.round(n));
}

export const neat = (n) => (n < 100_000 ? count(n) : short(n));
const TYPES = { bfloat16: "BF16", float16: "FP16", float32: "FP32", bf16: "BF16", f16: "FP16", f32: "FP32" };
export const typed = (name) => TYPES[name.toLowerCase()] ?? name.toUpperCase();
export const FORMATS = { gguf: "GGUF", safetensors: "Safetensors" };
const CAN = [["tools", "Tools"], ["thinking", "Thinking"], ["structure", "JSON by schema"], ["fill", "Fills gaps in code"], ["pictures", "Pictures"]];

export function facts(card) {
  const device = card.device_name || card.device;
  const weights = card.quantization ? typed(card.quantization) : typed(card.dtype);
  return [
    ["Size", [card.parameters ? `${short(card.parameters)} parameters` : "", bytes(card.weight_bytes || card.file_bytes).replace(" ", "\u00a0")].filter(Boolean).join(", ")],
    ["Weights in", weights && card.dtype && typed(card.dtype) !== weights ? `${weights}, computes in ${typed(card.dtype)}` : weights],
    ["Context", card.context ? `${count(card.context)} tokens` : ""],
    ["Runs on", device],
  ].filter(([, value]) => value);
}

export function ModelCard({ card, model }) {
  if (!card) return null;
  const can = CAN.filter(([key]) => card.can[key]);
  return html`<section class="model-card" aria-label="What is served">
    <header><span class="model-mark" aria-hidden="true">${(model || card.model).slice(0, 1).toUpperCase()}</span>
      <div><h3 dir="auto">${model || card.model}</h3><p>${[card.family, FORMATS[card.format] ?? card.format].filter(Boolean).join(" · ") || "served here"}</p></div></header>
    <dl>${facts(card).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <ul class="can" aria-label="What it can do">
      <li>${card.can.chat ? html`<${Icon} name="check" />Chat` : html`<${Icon} name="check" />Continues text`}</li>
      ${can.map(([key, word]) => html`<li key=${key}><${Icon} name="check" />${word}</li>`)}
    </ul>
  </section>`;
}

// How much of the context is taken: what the last answer left, and what is being written.
export function ContextMeter({ card, used, text, model }) {
  const written = useTokens(text, model);
  if (!card?.context || (!used && !written)) return null;
  const all = used + written;
  const share = Math.min(1, all / card.context);
  const tone = all > card.context ? "full" : share > 0.85 ? "high" : "";
  const words = `${count(all)} of ${count(card.context)} tokens of the context${written ? `, ${count(written)} of them being written` : ""}`;
  const round = 2 * Math.PI * 7;
  return html`<span class=${`meter ${tone}`} role="img" aria-label=${words} title=${words}>
    <svg viewBox="0 0 18 18" aria-hidden="true"><circle cx="9" cy="9" r="7" /><circle class="part" cx="9" cy="9" r="7" stroke-dasharray=${`${Math.max(share * round, share > 0 ? 1.2 : 0)} ${round}`} transform="rotate(-90 9 9)" /></svg>
    <span>${all > card.context ? "over the context" : `${neat(all)} / ${neat(card.context)}`}</span>
  </span>`;
}

// The tokens of a text, counted by the server when writing pauses; short texts are not worth asking.
function useTokens(text, model) {
  const [found, setFound] = useState(0);
  useEffect(() => {
    if (text.length < 40 || !model) {
      setFound(0);
      return undefined;
    }
    const controller = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const body = { model, prompt: text, add_special_tokens: false };
        setFound((await (await call("tokenize", { body, signal: controller.signal })).json()).count);
      } catch {
        // The meter then shows what is known.
      }
    }, 350);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [text, model]);
  return found;
}

