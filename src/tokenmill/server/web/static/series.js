// From samples to what is drawn. Owns: rates made of totals, and gaps where nothing was measured. Knows nothing of the page.

export const GAP_S = 2.6; // a longer silence between samples: the engine rested, and nobody looked
const TOTALS = { out: "output_tokens", flops: "flops" };

// Samples (rows) -> columns by name, with `at`; a row of nulls stands in every gap, so that no line crosses it.
export function series(columns, samples) {
  const place = Object.fromEntries(columns.map((name, i) => [name, i]));
  const keys = [...columns.filter((name) => name !== "at"), "out", "in", "hits", "bytes_per_s", "flops_per_s"];
  const found = { at: [] };
  for (const key of keys) found[key] = [];
  const put = (at, values) => {
    found.at.push(at);
    for (const key of keys) found[key].push(values[key] ?? null);
  };
  samples.forEach((row, i) => {
    const get = (name) => row[place[name]];
    const values = Object.fromEntries(columns.map((name) => [name, get(name)]));
    const before = samples[i - 1];
    if (before) {
      const grown = (name) => Math.max(0, (get(name) ?? 0) - (before[place[name]] ?? 0));
      let seconds = get("at") - before[place.at];
      if (seconds > GAP_S) {
        put((get("at") + before[place.at]) / 2, {});
        seconds = 1; // samples come a second after work begins: all of it happened in that second
      }
      const computed = grown("prompt_tokens");
      const cached = grown("cached_tokens");
      values.out = grown(TOTALS.out) / seconds;
      values.in = computed / seconds;
      values.hits = computed + cached > 0 ? cached / (computed + cached) : null;
      values.flops_per_s = grown("flops") / seconds;
      values.bytes_per_s = (grown("read_bytes") + grown("written_bytes")) / seconds;
    }
    put(get("at"), values);
  });
  return found;
}

// The mean of a rate over the last seconds, each value as long as it was measured; null: nothing was.
export function recent(columns, key, now, within = 3) {
  let [sum, seconds] = [0, 0];
  for (let i = columns.at.length - 1; i > 0 && columns.at[i] >= now - within; i -= 1) {
    const span = Math.min(columns.at[i] - columns.at[i - 1], 1.5);
    if (columns[key][i] === null) continue;
    sum += columns[key][i] * span;
    seconds += span;
  }
  return seconds > 0 ? sum / seconds : null;
}

// The middle of what was measured since a moment; null: nothing was.
export function middle(columns, key, since) {
  const values = columns.at.map((at, i) => (at >= since ? columns[key][i] : null)).filter((v) => v !== null).sort((a, b) => a - b);
  return values.length ? values[values.length >> 1] : null;
}

// ---------------------------------------------------------------- requests

const PHASES = [
  { key: "prepared", label: "preparing" },
  { key: "queued", label: "in the queue" },
  { key: "prefill", label: "reading the prompt" },
  { key: "decode", label: "writing" },
  { key: "rest", label: "ending" },
];
export const LEGEND = PHASES.slice(0, 4);

// One prompt's life as milliseconds since the request came: phases with their begin and end.
export function phases(prompt, total) {
  const at = Object.fromEntries(prompt.events.map((e) => [e.event, e.at_ms]));
  const end = at.ended ?? total;
  const accepted = at.accepted ?? 0;
  const started = at.started ?? at.first_token ?? end;
  const first = at.first_token ?? end;
  const last = at.ended === undefined ? end : (at.last_token ?? end);
  const found = [
    { ...PHASES[0], from: 0, to: accepted },
    { ...PHASES[1], from: accepted, to: started },
    { ...PHASES[2], from: started, to: Math.max(started, first) },
    { ...PHASES[3], from: first, to: Math.max(first, last) },
    { ...PHASES[4], from: last, to: end },
  ];
  return { found: found.filter((p) => p.to > p.from), at, end };
}

// Requests (newest first) that touch [from, to] in lanes: each takes the first lane that is free again. -> {lanes, left}
export function lanes(requests, from, to, most) {
  const found = [];
  let left = 0;
  const gap = (to - from) / 400; // where there is room, requests do not touch
  const unseen = (to - from) / 1000; // a client's next one may begin while its last one is put away: less than a dot
  const began = (r) => r.at ?? r.created;
  const ended = (r) => (r.state === "open" ? to : began(r) + r.duration_ms / 1000);
  for (const request of [...requests].sort((a, b) => began(a) - began(b))) {
    if (ended(request) < from || began(request) > to) continue;
    let lane = found.find((l) => l.until + gap <= began(request)) ?? found.find((l) => l.until - unseen <= began(request));
    if (!lane) {
      if (found.length === most) {
        left += 1;
        continue;
      }
      lane = { until: 0, requests: [] };
      found.push(lane);
    }
    lane.requests.push(request);
    lane.until = ended(request);
  }
  return { lanes: found.map((l) => l.requests), left };
}

// Blocks of memory as `cells` cells by what they hold; what is there at all has a cell.
export function cells({ blocks, used, shared, idle }, count) {
  if (!blocks) return [];
  const n = Math.min(count, blocks);
  const counts = [["shared", shared], ["used", Math.max(0, used - shared)], ["cached", idle]].map(([kind, size]) => [kind, size > 0 ? Math.max(1, Math.round((size / blocks) * n)) : 0]);
  const made = counts.flatMap(([kind, size]) => Array(size).fill(kind)).slice(0, n);
  return [...made, ...Array(n - made.length).fill("free")];
}
