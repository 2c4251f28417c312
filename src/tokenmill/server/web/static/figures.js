// What an answer took, in words. Owns: which figures are shown, and that none is shown which was not measured.
import { liveRate } from "./stream.js";
import { count, duration, html, plural, rate } from "./ui.js";

export function livePace({ stats }) {
  if (!stats?.chunks) return "Waiting for the first token";
  const speed = liveRate(stats);
  return `${plural(stats.output || stats.chunks, "token")}${speed ? ` · ${rate(speed)} tok/s` : ""}`;
}

export function Figures({ answer, bare = false }) {
  const { stats, finish } = answer;
  if (!stats?.output) return finish === "stopped" || finish === "edited" ? html`<p class="figures">${finish === "edited" ? "Edited" : "Stopped"}</p>` : null;
  const parts = [plural(stats.output, "token")];
  if (stats.engine?.rate) parts.push(html`<b>${rate(stats.engine.rate)}</b> tok/s`);
  const first = stats.engine?.first ?? stats.ttft;
  if (first) parts.push(`first after ${duration(first)}`);
  if (stats.prompt && !bare) parts.push(`prompt ${count(stats.prompt)}${stats.cached ? ` (${count(stats.cached)} cached)` : ""}`);
  if (finish === "length") parts.push("cut at the token limit");
  if (finish === "stopped") parts.push("stopped");
  return html`<p class="figures" title="Measured by the engine; a speed is shown only where the answer took long enough to have one">${parts.map((part, i) => html`<span key=${i}>${i > 0 ? " · " : ""}${part}</span>`)}</p>`;
}
