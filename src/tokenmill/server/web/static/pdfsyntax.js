// PDF files as words. Owns: names, numbers, strings, arrays and dictionaries. Knows nothing of where they stand.
//
// Names are strings with their slash ("/Type"), operators strings without, strings Uint8Arrays, dictionaries Maps.

const DEEPEST = 60; // arrays and dictionaries within each other
const MOST_ITEMS = 200_000; // in one of them: what is read at once may not take long
const LONGEST = 1 << 20; // bytes of a string

export class Ref {
  constructor(number) {
    this.number = number;
  }
}

const KIND = new Uint8Array(256); // 1: white, 2: ends a word and stands for itself
for (const c of [0, 9, 10, 12, 13, 32]) KIND[c] = 1;
for (const c of "()<>[]{}/%") KIND[c.charCodeAt(0)] = 2;
const ESCAPED = { n: 10, r: 13, t: 9, b: 8, f: 12 };

export function latin(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return text;
}

export function joined(parts) {
  const out = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

export function find(bytes, word, from, to = bytes.length) {
  for (let at = Math.max(0, from); at < to; at += 1 << 16) {
    const found = latin(bytes.subarray(at, Math.min(at + (1 << 16), to) + word.length - 1)).indexOf(word);
    if (found >= 0) return at + found;
  }
  return -1;
}

export class Reader {
  constructor(bytes, at = 0) {
    Object.assign(this, { bytes, at });
  }

  skip() {
    const { bytes } = this;
    for (; this.at < bytes.length; this.at += 1) {
      if (bytes[this.at] === 37) while (this.at < bytes.length && bytes[this.at] !== 10 && bytes[this.at] !== 13) this.at += 1;
      else if (KIND[bytes[this.at]] !== 1) return;
    }
  }

  // -> the next thing; undefined at the end.
  next(depth = 0) {
    this.skip();
    const { bytes, at } = this;
    if (!depth) this.items = 0;
    if (at >= bytes.length) return undefined;
    if (depth > DEEPEST) throw new Error("too deep");
    const c = String.fromCharCode(bytes[at]);
    if (c === "/") {
      this.at += 1;
      return `/${this.word().replace(/#([0-9a-f]{2})/gi, (_, hex) => String.fromCharCode(parseInt(hex, 16)))}`;
    }
    if (KIND[bytes[at]] !== 2) {
      const word = this.word();
      return /^[+-]*\d*\.?\d*$/.test(word) && /\d/.test(word) ? Number(word.replace(/^[+-]*(?=[+-])/, "")) : word;
    }
    if (c === "(") return this.string();
    const twice = (c === "<" || c === ">") && bytes[at + 1] === bytes[at];
    if (c === "<" && !twice) return this.hex();
    this.at += twice ? 2 : 1;
    if (c === "[") return this.list("]", depth);
    if (c !== "<") return twice ? ">>" : c;
    const items = this.list(">>", depth);
    const made = new Map();
    for (let i = 0; i + 1 < items.length; i += 2) made.set(items[i], items[i + 1]);
    return made;
  }

  word() {
    const start = this.at;
    while (this.at < this.bytes.length && !KIND[this.bytes[this.at]]) this.at += 1;
    return latin(this.bytes.subarray(start, Math.min(this.at, start + 200))); // a longer one means nothing
  }

  list(end, depth) {
    const items = [];
    for (let item = this.next(depth + 1); item !== end && item !== undefined; item = this.next(depth + 1)) {
      if ((this.items += 1) > MOST_ITEMS) throw new Error("too many items");
      if (item === "R" && items.length > 1) items.splice(-2, 2, new Ref(items.at(-2)));
      else items.push(item === "null" ? null : item);
    }
    return items;
  }

  string() {
    const { bytes } = this;
    const made = [];
    for (let [open, at] = [1, this.at + 1]; ; at += 1) {
      let c = bytes[at];
      if (c === 40) open += 1;
      if (c === 41) open -= 1;
      if (!open || at >= bytes.length || made.length > LONGEST) {
        this.at = at + 1;
        if (made.length > LONGEST) throw new Error("too long");
        return Uint8Array.from(made);
      }
      if (c === 92) {
        at += 1;
        const octal = /^[0-7]{1,3}/.exec(latin(bytes.subarray(at, at + 3)));
        if (octal) {
          c = parseInt(octal[0], 8);
          at += octal[0].length - 1;
        } else if (bytes[at] === 10 || bytes[at] === 13) {
          if (bytes[at] === 13 && bytes[at + 1] === 10) at += 1;
          continue;
        } else c = ESCAPED[String.fromCharCode(bytes[at])] ?? bytes[at];
      }
      made.push(c);
    }
  }

  hex() {
    const held = this.bytes.subarray(this.at + 1, this.at + 2 * LONGEST);
    const end = held.indexOf(62);
    const digits = latin(end < 0 ? held : held.subarray(0, end)).replace(/[^0-9a-f]/gi, "");
    this.at += (end < 0 ? held.length : end) + 2;
    return Uint8Array.from({ length: Math.ceil(digits.length / 2) }, (_, i) => parseInt(digits.slice(2 * i, 2 * i + 2).padEnd(2, "0"), 16));
  }
}
