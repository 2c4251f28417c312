// Markdown as models write it. Owns: what differs from GFM: which HTML is taken, footnotes, folds, notes, emphasis and addresses
// beside Chinese, rows with too many cells, and how a text that is still being written is closed. Knows nothing of the page.
import { Tokenizer } from "marked";

const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

// ---------------------------------------------------------------- HTML

// These words of HTML mean something without attributes, as long as both ends are there. All else is shown as it was written.
const INLINE = "b|i|u|s|em|strong|del|ins|mark|small|sub|sup|kbd|q|ul|ol|li";
const BLOCK = new Set(`${INLINE}|p|div|blockquote|h1|h2|h3|h4|h5|h6|table|thead|tbody|tr|th|td`.split("|"));
const PAIR = new RegExp(`^<(${INLINE})>([\\s\\S]*?)</\\1>`, "i");
const BREAK = /^<br[ ]?\/?>/i;

const pair = {
  name: "htmlPair",
  level: "inline",
  start: (source) => found(source.search(/<(?:br|[bius]|em|strong|del|ins|mark|small|sub|sup|kbd|q|ul|ol|li)\b/i)),
  tokenizer(source) {
    const line = BREAK.exec(source);
    if (line) return { type: "htmlPair", raw: line[0], word: "br" };
    const whole = PAIR.exec(source);
    return whole ? { type: "htmlPair", raw: whole[0], word: whole[1].toLowerCase(), tokens: this.lexer.inlineTokens(whole[2]) } : undefined;
  },
  renderer({ word, tokens }) {
    return word === "br" ? "<br>" : `<${word}>${this.parser.parseInline(tokens)}</${word}>`;
  },
};

const found = (at) => (at < 0 ? undefined : at);

// A block of HTML with those tags only that have both their ends.
function tame(text) {
  const parts = text.split(/(<\/?[a-z][a-z\d]*[ ]?\/?>)/i);
  const open = [];
  parts.forEach((part, i) => {
    const [, end, name] = /^<(\/?)([a-z\d]+)[ ]?\/?>$/i.exec(part) ?? [];
    const word = name?.toLowerCase();
    if (word === "br" || word === "hr") parts[i] = { tag: `<${word}>` };
    else if (!BLOCK.has(word)) return;
    else if (!end) open.push([word, i]);
    else if (open.at(-1)?.[0] === word) {
      parts[open.pop()[1]] = { tag: `<${word}>` };
      parts[i] = { tag: `</${word}>` };
    }
  });
  return parts.map((part) => part.tag ?? escape(part)).join("");
}

const fold = {
  name: "fold",
  level: "block",
  start: (source) => found(source.search(/^ {0,3}<details/im)),
  tokenizer(source) {
    const whole = /^ {0,3}<details(?: open)?>\s*(?:<summary>([\s\S]*?)(?:<\/summary>|$))?([\s\S]*?)(?:<\/details>[ \t]*(?:\n+|$)|$)/i.exec(source);
    if (!whole) return undefined;
    return { type: "fold", raw: whole[0], summary: this.lexer.inlineTokens((whole[1] ?? "Details").trim()), tokens: this.lexer.blockTokens(`${whole[2].trim()}\n`) };
  },
  renderer({ summary, tokens }) {
    return `<details><summary>${this.parser.parseInline(summary)}</summary>${this.parser.parse(tokens)}</details>`;
  },
};

// ---------------------------------------------------------------- footnotes

const NOTE = /^ {0,3}\[\^([^\]\s]+)\]:[ \t]*([^\n]*(?:\n(?![ \t]*\n| {0,3}\[\^)[^\n]+)*)(?:\n+|$)/;
let labels = new Set(); // of the text that is being read: a mark without its note is no footnote

// Do words at the end of this text change what is before them?
export const looksBack = (text) => /^ {0,3}\[[^\]\n]+\]:/m.test(text);

// Which footnotes does this text hold?
export function readNotes(text) {
  labels = new Set([...text.matchAll(/^ {0,3}\[\^([^\]\s]+)\]:/gm)].map((each) => each[1]));
}

const mark = {
  name: "noteMark",
  level: "inline",
  start: (source) => found(source.indexOf("[^")),
  tokenizer(source) {
    const whole = /^\[\^([^\]\s]+)\](?!:)/.exec(source);
    return whole && labels.has(whole[1]) ? { type: "noteMark", raw: whole[0], text: whole[1] } : undefined;
  },
  renderer: ({ text }) => `<sup>[${escape(text)}]</sup>`,
};

const note = {
  name: "note",
  level: "block",
  start: (source) => found(source.search(/^ {0,3}\[\^[^\]\s]+\]:/m)),
  tokenizer(source) {
    const whole = NOTE.exec(source);
    return whole ? { type: "note", raw: whole[0], text: whole[1], tokens: this.lexer.inlineTokens(whole[2].trim()) } : undefined;
  },
  renderer({ text, tokens }) {
    return `<p class="footnote"><sup>[${escape(text)}]</sup> ${this.parser.parseInline(tokens)}</p>`;
  },
};

// ---------------------------------------------------------------- rows, emphasis, addresses

const SEPARATOR = /(?<!\\)\|/g;
const cellsOf = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").match(SEPARATOR)?.length + 1 || 1;

// A row with more cells than the head would lose the last ones. Bars in code and formulas are no ends of cells; what is
// still too much goes into the last one.
function narrowed(line, width) {
  if (cellsOf(line) <= width) return line;
  const close = (text) => text.replace(SEPARATOR, "\\|");
  const mended = line.replace(/(`+)[^`]+\1|\$[^$\s](?:[^$]*[^$\s])?\$/g, close);
  if (cellsOf(mended) <= width) return mended;
  const lead = /^\s*\|/.test(mended) ? 1 : 0;
  let at = -1;
  for (let i = 0; i < width - 1 + lead; i += 1) at = nextBar(mended, at + 1);
  const end = /(?<!\\)\|\s*$/.exec(mended)?.index ?? mended.length;
  return mended.slice(0, at + 1) + close(mended.slice(at + 1, end)) + mended.slice(end);
}

function nextBar(line, from) {
  SEPARATOR.lastIndex = from;
  return SEPARATOR.exec(line)?.index ?? line.length;
}

const CHINESE = /[\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]/; // and Japanese and Korean: words without spaces between them
const MARKS = /[\p{P}\p{S}]/u;
const STRONG = /^\*\*(?=[^\s*])((?:(?!\*\*|\n[ \t]*\n)[\s\S])*?[^\s\\])\*\*(?!\*)/;
const STOPS = /[\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f\uff08\uff09\u3008-\u3011\u201c\u201d\u2018\u2019]/;

const tokenizer = {
  table(source) {
    const whole = this.rules.block.table.exec(source);
    if (!whole?.[3]) return false;
    const width = cellsOf(whole[1]);
    const rows = whole[3].split("\n").map((line) => narrowed(line, width));
    const token = Tokenizer.prototype.table.call(this, `${whole[1]}\n${whole[2]}\n${rows.join("\n")}`);
    if (token) token.raw = whole[0];
    return token;
  },
  // Where words have no spaces between them, marks of emphasis beside a full stop or a bracket still are some.
  emStrong(source, masked, before) {
    const whole = STRONG.exec(source);
    if (!whole) return false;
    const [raw, text] = whole;
    const beside = (MARKS.test(text[0]) && CHINESE.test(before)) || (MARKS.test(text.at(-1)) && CHINESE.test(source[raw.length] ?? ""));
    return beside ? { type: "strong", raw, text, tokens: this.lexer.inlineTokens(text) } : false;
  },
  // One tilde says "about".
  del: (source) => (source.startsWith("~~") ? false : undefined),
  url: function cut(source) {
    const end = source.search(STOPS);
    return end < 0 ? false : Tokenizer.prototype.url.call(this, source.slice(0, end));
  },
};

const ALERT = /^<p>\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\](?:\s|<br>)*/;

const renderer = {
  // A picture within a link is shown as its words: a link of its own would end the one around it.
  link(token) {
    token.tokens = token.tokens.map((each) => (each.type === "image" ? { type: "text", raw: each.raw, text: each.text || each.href } : each));
    return false;
  },
  html: ({ text, block }) => (block ? tame(text) : escape(text)),
  blockquote({ tokens }) {
    const body = this.parser.parse(tokens);
    const kind = ALERT.exec(body)?.[1].toLowerCase();
    return kind ? `<blockquote class="alert ${kind}"><p><strong>${kind[0].toUpperCase()}${kind.slice(1)}</strong></p>\n${body.replace(ALERT, "<p>").replace(/^<p><\/p>\n?/, "")}</blockquote>\n` : `<blockquote>\n${body}</blockquote>\n`;
  },
};

export const dialect = { extensions: [pair, fold, mark, note], tokenizer, renderer };

export const DIALECT_TAGS = "details ins kbd mark q small summary u".split(" ");

// ---------------------------------------------------------------- a text that is not over

const WHOLE = /(`+)(?!`)[\s\S]*?[^`]\1(?!`)|\$\$[\s\S]*?\$\$|\\\[[\s\S]*?\\\]|\\\([\s\S]*?\\\)/g;

// The text as it would be if its last formula, code or bold words ended here: so it is drawn while they are being written.
export function completed(text) {
  const rest = text.replace(WHOLE, "");
  const formula = /\$\$|\\\[|\\\(/.exec(rest)?.[0];
  if (formula) return text.slice(text.lastIndexOf(formula) + 2).trim() ? `${text.replace(/\\[a-zA-Z]*$/, "")}${{ "$$": "$$", "\\[": "\\]", "\\(": "\\)" }[formula]}` : text;
  const line = rest.slice(rest.lastIndexOf("\n") + 1);
  const code = /`+(?!.*`)/.exec(line)?.[0];
  if (code) return line.endsWith(code) ? text : text + code;
  if (line.split("**").length % 2) return text;
  if (!/\*\*(?:\S|$)/.test(line.slice(line.lastIndexOf("**")))) return text;
  return line.endsWith("**") ? text.replace(/\s*\*\*$/, "") : `${text.trimEnd().replace(/\*$/, "")}**`;
}
