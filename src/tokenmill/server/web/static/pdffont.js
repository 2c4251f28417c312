// Letters of PDF files. Owns: from the codes of a font to Unicode, and how wide they are. Knows nothing of pages.
import { latin, Reader } from "./pdfsyntax.js";

const MOST = 200_000; // entries of a font's tables
const MOST_BYTES = 4 << 20; // of a CMap
const MOST_SPACES = 100;
export const UNKNOWN = "\ufffd";

// Adobe's standard encoding from 0xa1 on; below, it is ASCII with two other quotes.
const STANDARD = "¡¢£⁄¥ƒ§¤'“«‹›ﬁﬂ\0–†‡·\0¶•‚„”»…‰\0¿\0`´ˆ˜¯˘˙¨\0˚¸\0˝˛ˇ—" + "\0".repeat(16) + "Æ\0ª\0\0\0\0ŁØŒº\0\0\0\0\0æ\0\0\0ı\0\0łøœß";
const ACCENTS = { grave: 0x300, acute: 0x301, circumflex: 0x302, tilde: 0x303, macron: 0x304, breve: 0x306, dotaccent: 0x307, dieresis: 0x308, ring: 0x30a, hungarumlaut: 0x30b, caron: 0x30c, cedilla: 0x327, commaaccent: 0x326, ogonek: 0x328 };
const GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma1 sigma tau upsilon phi chi psi omega".split(" ");
// Names and what they stand for, in the order of ASCII and then of meaning.
const NAMES = "space exclam quotedbl numbersign dollar percent ampersand quotesingle parenleft parenright asterisk plus comma hyphen period slash zero one two three four five six seven eight nine colon semicolon less equal greater question at bracketleft backslash bracketright asciicircum underscore grave braceleft bar braceright asciitilde quoteleft quoteright quotedblleft quotedblright quotesinglbase quotedblbase guillemotleft guillemotright guilsinglleft guilsinglright endash emdash bullet ellipsis periodcentered dagger daggerdbl section paragraph degree copyright registered trademark sterling yen Euro cent currency florin exclamdown questiondown plusminus multiply divide minus fraction onehalf onequarter threequarters onesuperior twosuperior threesuperior ordfeminine ordmasculine perthousand logicalnot brokenbar germandbls ae AE oe OE oslash Oslash lslash Lslash dotlessi dotlessj eth Eth thorn Thorn infinity summation product integral radical partialdiff lessequal greaterequal notequal approxequal element arrowleft arrowright arrowup arrowdown fi fl ff ffi ffl nbspace sfthyphen acute dieresis macron cedilla circumflex tilde caron ring asteriskmath similar equivalence prime circlecopyrt arrowdblright logicaland logicalor intersection union universal existential emptyset propersubset reflexsubset proportional nabla angbracketleft angbracketright floorleft floorright ceilingleft ceilingright".split(" ");
const SIGNS = [..." !\"#$%&'()*+,-./0123456789:;<=>?@[\\]^_`{|}~‘’“”‚„«»‹›–—•…·†‡§¶°©®™£¥€¢¤ƒ¡¿±×÷−⁄½¼¾¹²³ªº‰¬¦ßæÆœŒøØłŁıȷðÐþÞ∞∑∏∫√∂≤≥≠≈∈←→↑↓ﬁﬂﬀﬃﬄ\u00a0\u00ad´¨¯¸ˆ˜ˇ˚∗∼≡′◯⇒∧∨∩∪∀∃∅⊂⊆∝∇⟨⟩⌊⌋⌈⌉"];
const KNOWN = new Map(NAMES.map((name, i) => [name, SIGNS[i]]));

function letterOf(glyph) {
  const name = glyph.replace(/\..*$|(?<=.)(?:text|display|[Bb]igg?)$/, "");
  if (KNOWN.has(name)) return KNOWN.get(name);
  if (/^[A-Za-z]$/.test(name)) return name;
  const hex = /^(?:uni((?:[0-9A-F]{4})+)|u([0-9A-F]{4,6}))$/.exec(name);
  if (hex) return (hex[1]?.match(/.{4}/g) ?? [hex[2]]).map((each) => String.fromCodePoint(Math.min(parseInt(each, 16), 0x10ffff))).join("");
  const accented = /^(dotlessi|[A-Za-z])([a-z]+)$/.exec(name);
  if (accented && ACCENTS[accented[2]]) return (accented[1].at(1) ? "i" : accented[1]) + String.fromCharCode(ACCENTS[accented[2]]);
  const greek = GREEK.indexOf(name.toLowerCase());
  if (greek >= 0) return String.fromCharCode(0x3b1 + greek - (name[0] < "a" ? 32 : 0));
  return name.includes("_") ? name.split("_").map(letterOf).join("") : "";
}

const all256 = (name) => [...new TextDecoder(name).decode(Uint8Array.from({ length: 256 }, (_, i) => i))];

function standard() {
  const found = Array.from({ length: 256 }, (_, i) => (i > 31 && i < 127 ? String.fromCharCode(i) : i > 160 ? (STANDARD[i - 161] ?? "") : ""));
  return Object.assign(found, { 39: "’", 96: "‘" });
}

const number = (bytes) => bytes.reduce((sum, byte) => sum * 256 + byte, 0);

// The text in bytes, its last letter so many further.
function utf16(bytes, further = 0) {
  if (!(bytes instanceof Uint8Array)) return "";
  const last = number(bytes.subarray(-2)) + further;
  return new TextDecoder("utf-16be").decode(Uint8Array.from([...bytes.subarray(0, -2), (last >> 8) & 255, last & 255]));
}

// A CMap: {map: code -> text, spaces: which codes are how long}.
function cmap(data) {
  const [map, spaces] = [new Map(), []];
  const reader = new Reader(data.subarray(0, MOST_BYTES));
  let [held, left] = [[], MOST];
  for (let item = reader.next(); item !== undefined && left > 0; item = reader.next()) {
    if (typeof item !== "string" || item[0] === "/") {
      held.push(item);
      continue;
    }
    const texts = held.filter((each) => each instanceof Uint8Array || Array.isArray(each));
    if (item === "endcodespacerange") for (let i = 0; i + 1 < texts.length; i += 2) spaces.push([number(texts[i]), number(texts[i + 1]), texts[i].length]);
    if (item === "endbfchar") for (let i = 0; i + 1 < texts.length; i += 2) map.set(number(texts[i]), utf16(texts[i + 1]));
    if (item === "endbfrange") {
      for (let i = 0; i + 2 < texts.length; i += 3) {
        const [from, to, text] = [number(texts[i]), number(texts[i + 1]), texts[i + 2]];
        for (let code = from; code <= to && left > 0; code += 1, left -= 1) map.set(code, Array.isArray(text) ? utf16(text[code - from]) : utf16(text, code - from));
      }
    }
    held = [];
  }
  return { map, spaces: spaces.slice(0, MOST_SPACES) };
}

// East Asian encodings that browsers know, by the names that PDF has for them.
const FOREIGN = [[/UCS2|UTF16/, "utf-16be"], [/^\/GB/, "gbk"], [/RKSJ/, "shift_jis"], [/B5|^\/HK/, "big5"], [/^\/KSC/, "euc-kr"]];

// -> {codes(bytes): [[code, length]], text(code), width(code)}; widths are parts of the size.
export async function readFont(objects, dict) {
  const encoding = await objects.in(dict, "/Encoding");
  const told = await objects.in(dict, "/ToUnicode");
  const unicode = told?.dict ? cmap(await objects.data(told)).map : new Map();
  const made = (await objects.in(dict, "/Subtype")) === "/Type0" ? await composed(objects, dict, encoding) : await simple(objects, dict, encoding);
  const kept = new Map();
  const text = (code) => (unicode.get(code) || "").replace(/\0/g, "") || made.text(code) || UNKNOWN;
  return { ...made, text: (code) => kept.get(code) ?? kept.set(code, text(code).replace(/[ﬀ-ﬆ\ufb50-\ufdff\ufe70-\ufefc]/g, (c) => c.normalize("NFKC")).normalize("NFC")).get(code) };
}

async function simple(objects, dict, encoding) {
  const named = encoding instanceof Map ? await objects.in(encoding, "/BaseEncoding") : encoding;
  const usual = (await objects.in(dict, "/Subtype")) === "/TrueType" ? "/WinAnsiEncoding" : "";
  const own = named ? "" : await programOf(objects, dict);
  const table = { "/WinAnsiEncoding": () => all256("windows-1252"), "/MacRomanEncoding": () => all256("macintosh") }[named ?? usual]?.() ?? standard();
  const differences = encoding instanceof Map ? await objects.in(encoding, "/Differences") : null;
  for (const [, code, glyph] of own.matchAll(/dup\s+(\d{1,3})\s*\/(\S+)\s+put/g)) table[Math.min(code, 255)] = letterOf(glyph);
  let at = 0;
  for (const item of Array.isArray(differences) ? differences : []) {
    if (typeof item === "number") at = item;
    else if (at < 256) table[at++] = letterOf(String(item).slice(1));
  }
  const widths = await objects.in(dict, "/Widths");
  const first = (await objects.in(dict, "/FirstChar")) ?? 0;
  const matrix = await objects.in(dict, "/FontMatrix"); // of a font whose letters are drawn by operators
  const scale = Array.isArray(matrix) ? Math.abs(matrix[0]) : 0.001;
  const known = [];
  for (const each of Array.isArray(widths) ? widths.slice(0, 256) : []) known.push(await objects.get(each));
  const mono = /Cour|Mono/.test(await objects.in(dict, "/BaseFont"));
  return {
    codes: (bytes) => [...bytes].map((code) => [code, 1]),
    text: (code) => table[code]?.replace(/[\0-\x08\x0e-\x1f]/g, ""),
    width: (code) => (known.length ? (known[code - first] ?? 0) * scale : mono ? 0.6 : guessed(table[code])),
  };
}

// The beginning of an embedded font of the first kind is plain: it says which codes have which glyphs.
async function programOf(objects, dict) {
  const about = await objects.in(dict, "/FontDescriptor");
  const file = about instanceof Map ? await objects.in(about, "/FontFile") : null;
  return file?.dict ? latin((await objects.data(file)).subarray(0, 1 << 14)) : "";
}

// Widths of a font that every reader is expected to have.
const guessed = (letter) => (/[ijltfI.,:;'!|()[\]\/\\ -]/.test(letter) ? 0.28 : /[mwMW@%—…]/.test(letter) ? 0.85 : /[A-Z]/.test(letter) ? 0.68 : 0.53);

async function composed(objects, dict, encoding) {
  const inner = await objects.get((await objects.in(dict, "/DescendantFonts"))?.[0]);
  const spaces = encoding?.dict ? cmap(await objects.data(encoding)).spaces : [];
  const foreign = FOREIGN.find(([names]) => names.test(encoding))?.[1];
  const wide = (inner instanceof Map && (await objects.in(inner, "/DW"))) || 1000;
  const widths = await widthsOf(objects, inner instanceof Map ? await objects.in(inner, "/W") : null);
  const mixed = foreign && foreign !== "utf-16be";
  const lengthAt = (bytes, at) => {
    if (mixed) return bytes[at] > 0x80 ? 2 : 1;
    return [1, 2, 3, 4].find((n) => spaces.some(([low, high, length]) => length === n && number(bytes.subarray(at, at + n)) >= low && number(bytes.subarray(at, at + n)) <= high)) ?? 2;
  };
  return {
    codes(bytes) {
      const found = [];
      for (let at = 0, n; at < bytes.length; at += n) {
        n = lengthAt(bytes, at);
        found.push([number(bytes.subarray(at, at + n)), n]);
      }
      return found;
    },
    text: (code) => (foreign ? new TextDecoder(foreign).decode(Uint8Array.from(mixed && code < 256 ? [code] : [code >> 8, code & 255])) : ""),
    width: (code) => (widths.get(code) ?? (mixed && code < 256 ? 500 : wide)) / 1000,
  };
}

// [first [w w w] first last w ...]
async function widthsOf(objects, list) {
  const found = new Map();
  let left = MOST;
  for (let i = 0; Array.isArray(list) && i + 1 < list.length; ) {
    const [first, second, third] = [list[i], await objects.get(list[i + 1]), list[i + 2]];
    const many = Array.isArray(second);
    for (let k = 0; k < (many ? second.length : second - first + 1) && left > 0; k += 1, left -= 1) found.set(first + k, many ? second[k] : third);
    i += many ? 2 : 3;
  }
  return found;
}
