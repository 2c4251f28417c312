// PDF files as objects. Owns: cross-references, streams and filters, and what reading one may cost. Knows nothing of pages and letters.
//
// Every step of a hostile file costs something of `left`, so that all work has an end, and `breathe` gives the page its turns.

import { find, joined, latin, Reader, Ref } from "./pdfsyntax.js";

export class Refusal extends Error {} // what a person reads; anything else that is thrown means: damaged
const MOST_BYTES = 128 << 20; // unpacked and walked over, all streams together
const MOST_PACKED = 1 << 16; // objects in a stream

export class Objects {
  constructor(bytes, breathe) {
    const start = find(bytes, "%PDF-", 0, 1024);
    if (start < 0) throw new Refusal("is no PDF file, whatever its name says.");
    Object.assign(this, { bytes: bytes.subarray(start), breathe, left: MOST_BYTES, places: new Map(), known: new Map(), opening: new Set(), packs: new Map(), trailer: new Map(), rebuilt: false });
  }

  spend(n) {
    this.left -= n;
    if (this.left < 0) throw new Refusal(`takes more than ${MOST_BYTES >> 20} MiB of work to read.`);
  }

  async open() {
    try {
      await this.tables();
    } catch (error) {
      if (error instanceof Refusal) throw error;
    }
    let root = await this.in(this.trailer, "/Root");
    if (!(root instanceof Map && root.has("/Pages")) && !this.rebuilt) {
      await this.rebuild();
      root = await this.in(this.trailer, "/Root");
    }
    if (this.trailer.get("/Encrypt")) throw new Refusal("is encrypted: save a copy of it without protection, and add that.");
    if (!(root instanceof Map)) throw new Error("no root");
    return root;
  }

  // ---------------------------------------------------------------- where objects are

  async tables() {
    const { bytes } = this;
    const seen = new Set();
    let start = -1;
    for (let at = find(bytes, "startxref", bytes.length - 2048); at >= 0; at = find(bytes, "startxref", at + 1)) start = at;
    if (start < 0) throw new Error("no startxref");
    const waiting = [new Reader(bytes, start + 9).next()];
    while (waiting.length) {
      const at = waiting.shift();
      if (typeof at !== "number" || seen.has(at)) continue;
      seen.add(at);
      const reader = new Reader(bytes, at);
      const found = reader.next() === "xref" ? await this.table(reader) : await this.crossStream(at);
      this.trailer = new Map([...found, ...this.trailer]); // what is newer came first, and stands
      waiting.push(found.get("/XRefStm"), found.get("/Prev"));
    }
  }

  place(number, place) {
    if (!this.places.has(number)) this.places.set(number, place);
  }

  async table(reader) {
    for (;;) {
      const from = reader.next();
      if (from === "trailer") return reader.next();
      const count = reader.next();
      if (typeof from !== "number") throw new Error("no table");
      for (let i = 0; i < count; i += 1) {
        const at = reader.next();
        reader.next();
        const kind = reader.next();
        if (kind !== "n" && kind !== "f") throw new Error("no entry");
        this.place(from + i, kind === "n" ? { at } : null);
        if (i % 1024 === 0) await this.breathe();
      }
    }
  }

  async crossStream(at) {
    const stream = this.parse(at);
    const { dict } = stream;
    const data = await this.data(stream);
    const widths = dict.get("/W");
    const index = dict.get("/Index") ?? [0, dict.get("/Size")];
    if (!(widths[0] + widths[1] + widths[2] > 0)) throw new Error("no fields");
    let here = 0;
    const field = (width, otherwise) => {
      let value = width ? 0 : otherwise;
      for (let i = 0; i < width; i += 1) value = value * 256 + data[here++];
      return value;
    };
    for (let i = 0; i + 1 < index.length; i += 2) {
      for (let n = 0; n < index[i + 1] && here < data.length; n += 1) {
        const [kind, second, third] = [field(widths[0], 1), field(widths[1], 0), field(widths[2], 0)];
        this.place(index[i] + n, kind === 1 ? { at: second } : kind === 2 ? { within: second, index: third } : null);
        if (n % 1024 === 0) await this.breathe();
      }
    }
    return dict;
  }

  // A file whose tables lead nowhere: look for all objects. The last one of a number stands.
  async rebuild() {
    const { bytes } = this;
    Object.assign(this, { rebuilt: true, places: new Map(), known: new Map(), packs: new Map() });
    this.spend(bytes.length);
    for (let from = 0; from < bytes.length; from += 1 << 18) {
      const text = latin(bytes.subarray(from, from + (1 << 18) + 64));
      for (const found of text.matchAll(/(\d{1,10})\s{1,9}\d{1,5}\s{1,9}obj|trailer/g)) {
        await this.breathe();
        const at = from + found.index;
        if (found[1]) this.places.set(Number(found[1]), { at });
        else this.trailerAt(at + 7);
      }
      await this.breathe();
    }
    for (const [number, { at }] of [...this.places]) {
      await this.breathe();
      const made = this.tried(() => this.parse(at));
      const dict = made?.dict ?? made;
      if (!(dict instanceof Map)) continue;
      const type = dict.get("/Type");
      if (type === "/XRef") this.trailer = new Map([...this.trailer, ...dict]);
      if (type === "/Catalog" && !this.trailer.has("/Root")) this.trailer.set("/Root", new Ref(number));
      if (type === "/ObjStm") for (const inner of (await this.pack(number)).keys()) this.place(inner, { within: number });
    }
  }

  trailerAt(at) {
    const found = this.tried(() => this.read(at, (reader) => reader.next()));
    if (found instanceof Map) this.trailer = new Map([...this.trailer, ...found]);
  }

  tried(read) {
    try {
      return read();
    } catch (error) {
      if (error instanceof Refusal) throw error;
      return null;
    }
  }

  // ---------------------------------------------------------------- objects

  // What `take` reads at a place; it costs as much as it walks over, even where it fails.
  read(at, take, bytes = this.bytes) {
    const reader = new Reader(bytes, at);
    try {
      return take(reader);
    } finally {
      this.spend(reader.at - at);
    }
  }

  // The object at a place: a value, or {dict, start} for a stream.
  parse = (at, number) => this.read(at, (reader) => this.object(reader, number));

  object(reader, number) {
    const [found, , word, value] = [reader.next(), reader.next(), reader.next(), reader.next()];
    if (word !== "obj" || (number !== undefined && found !== number)) throw new Error("no object");
    const after = reader.next();
    if (typeof value === "number" && typeof after === "number" && reader.next() === "R") return new Ref(value);
    if (!(value instanceof Map) || after !== "stream") return value;
    if (this.bytes[reader.at] === 13) reader.at += 1;
    if (this.bytes[reader.at] === 10) reader.at += 1;
    return { dict: value, start: reader.at };
  }

  // What a value is, if it stands elsewhere.
  async get(value) {
    let found = value;
    for (let n = 0; found instanceof Ref; n += 1) found = n < 20 ? await this.fetch(found.number) : null;
    return found ?? null;
  }

  in = (dict, key) => this.get(dict.get(key));

  async fetch(number) {
    if (this.known.has(number)) return this.known.get(number);
    const place = this.places.get(number);
    if (!place || this.opening.has(number)) return null; // nothing is there, or it leads to itself
    this.opening.add(number);
    this.spend(100);
    let made = null;
    try {
      made = place.at === undefined ? (await this.pack(place.within)).get(number)?.() : this.parse(place.at, number);
    } catch (error) {
      if (error instanceof Refusal) throw error;
      if (!this.rebuilt) {
        await this.rebuild();
        this.opening.delete(number);
        return this.fetch(number);
      }
    } finally {
      this.opening.delete(number);
    }
    this.known.set(number, made ?? null);
    return made ?? null;
  }

  // The objects in a stream: number -> a function that reads it.
  async pack(number) {
    if (this.packs.has(number)) return this.packs.get(number);
    const found = new Map();
    this.packs.set(number, found);
    const place = this.places.get(number);
    if (place?.at === undefined) return found;
    const stream = this.tried(() => this.parse(place.at, number));
    if (!stream?.dict) return found;
    const data = await this.data(stream).catch((error) => this.tried(() => { throw error; })) ?? [];
    const first = await this.in(stream.dict, "/First");
    const reader = new Reader(data);
    while (reader.at < first && found.size < MOST_PACKED) {
      const [inner, offset] = [reader.next(), reader.next()];
      if (typeof offset !== "number") break;
      if (!found.has(inner)) found.set(inner, () => this.read(first + offset, (each) => each.next(), data));
    }
    return found;
  }

  // ---------------------------------------------------------------- streams

  async data({ dict, start }) {
    let out = this.bytes.subarray(start, await this.end(dict, start));
    const filters = [await this.in(dict, "/Filter") ?? []].flat();
    const parms = [await this.in(dict, "/DecodeParms")].flat();
    this.spend(500 + out.length);
    for (let i = 0; i < filters.length; i += 1) {
      await this.breathe();
      const told = (await this.get(parms[i])) ?? new Map();
      const filter = await this.get(filters[i]);
      if (filter === "/FlateDecode") out = await this.predicted((await this.inflate(out, 1 << 14)) ?? (await this.inflate(out, 512, true)), told);
      else if (filter === "/ASCII85Decode") out = await this.un85(out);
      else throw new Refusal(`is packed in a way that is not read here (${filter.slice(1)}).`);
    }
    return out;
  }

  // Where a stream ends: its length may be wrong.
  async end(dict, start) {
    const length = await this.in(dict, "/Length");
    if (typeof length === "number" && length >= 0) {
      const reader = new Reader(this.bytes, start + length);
      reader.skip();
      if (reader.word() === "endstream") return start + length;
    }
    const end = find(this.bytes, "endstream", start);
    this.spend((end < 0 ? this.bytes.length : end) - start);
    return end < 0 ? this.bytes.length : end;
  }

  // -> null if something is wrong with it; to be lenient is to keep what came until then. An error of the stream takes what
  // was not read yet with it, so its last bytes come one by one.
  async inflate(bytes, step, lenient = false) {
    const stream = new DecompressionStream("deflate");
    const [writer, reader] = [stream.writable.getWriter(), stream.readable.getReader()];
    const write = async () => {
      for (let at = 0, n; at < bytes.length; at += n) {
        n = lenient && bytes.length - at < 64 ? 1 : Math.min(step, bytes.length - at - (lenient ? 32 : 0)) || 1;
        await writer.write(bytes.subarray(at, at + n));
      }
      await writer.close();
    };
    write().catch(() => {});
    const parts = [];
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        parts.push(value);
        this.spend(value.length);
        await this.breathe();
      }
    } catch (error) {
      reader.cancel().catch(() => {});
      if (!(error instanceof TypeError)) throw error;
      if (!lenient) return null;
    }
    return joined(parts);
  }

  async un85(bytes) {
    const whole = bytes.reduce((n, byte) => n + (byte === 122 ? 4 : 1), 4);
    this.spend(whole);
    const out = new Uint8Array(whole);
    let [value, held, to] = [0, 0, 0];
    const write = (n) => [24, 16, 8, 0].slice(0, n).forEach((shift) => { out[to++] = Math.floor(value / 2 ** shift); });
    for (let at = 0; at < bytes.length && bytes[at] !== 126; at += 1) {
      if (at % 4096 === 0) await this.breathe();
      if (bytes[at] === 122 && !held) to += 4;
      if (bytes[at] < 33 || bytes[at] > 117) continue;
      value = value * 85 + bytes[at] - 33;
      if ((held += 1) < 5) continue;
      write(4);
      [value, held] = [0, 0];
    }
    for (let n = held; held && n < 5; n += 1) value = value * 85 + 84;
    write(held && held - 1);
    return out.subarray(0, to);
  }

  // Rows that were written as differences.
  async predicted(data, parms) {
    const [kind, colors, bits, columns] = ["/Predictor", "/Colors", "/BitsPerComponent", "/Columns"].map((key, i) => Number(parms.get(key) ?? [1, 1, 8, 1][i]));
    if (!(kind > 9)) return data;
    const pixel = Math.max(1, (colors * bits) >> 3);
    const row = Math.min(data.length, Math.max(1, Math.ceil((colors * bits * columns) / 8)));
    const rows = Math.ceil(data.length / (row + 1));
    const out = new Uint8Array(rows * row);
    for (let r = 0; r < rows; r += 1) {
      if (r % 1024 === 0) await this.breathe();
      const [from, to] = [r * (row + 1) + 1, r * row];
      const way = data[from - 1];
      for (let i = 0; i < row && from + i < data.length; i += 1) {
        const left = i < pixel ? 0 : out[to + i - pixel];
        const above = r ? out[to + i - row] : 0;
        const corner = r && i >= pixel ? out[to + i - row - pixel] : 0;
        out[to + i] = data[from + i] + (way === 1 ? left : way === 2 ? above : way === 3 ? (left + above) >> 1 : way === 4 ? paeth(left, above, corner) : 0);
      }
    }
    return out;
  }
}

function paeth(left, above, corner) {
  const [a, b, c] = [left, above, corner].map((each) => Math.abs(left + above - corner - each));
  return a <= b && a <= c ? left : b <= c ? above : corner;
}
