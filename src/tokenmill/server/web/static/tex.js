// Formulas. Owns: reading TeX's mathematics and writing MathML, which browsers draw.
//
// A recursive descent over tokens; what it does not know is shown in red as it was written, and the rest goes on. Depth
// and size are bounded: a model may write anything.
import { chemToTex } from "./chem.js";
import { ACCENTS, ALPHABETS, BELOW, FUNCTIONS, inAlphabet, INTEGRALS, LETTERS, LIMITS, OPERATORS, SPACES, SPOKEN, SUMS, UPRIGHT, WIDE } from "./texwords.js";

const DEEPEST = 60;
const LONGEST = 20_000;
const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const row = (parts) => (parts.length === 1 ? parts[0] : `<mrow>${parts.join("")}</mrow>`);
const mo = (text, more = "") => `<mo${more}>${escape(text)}</mo>`;
const space = (width) => `<mspace width="${width}"></mspace>`;
const COLUMNS = { matrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", smallmatrix: "" };
const LINES = new Set(["align", "align*", "aligned", "alignat", "alignat*", "alignedat", "split", "eqnarray", "eqnarray*", "gather", "gather*", "gathered", "equation", "equation*", "multline", "multline*", "flalign", "flalign*"]);
const SIZES = { big: "1.2em", Big: "1.8em", bigg: "2.4em", Bigg: "3em" };
const ENDS = new Set(["}", "&", "\\\\", "\\end", "\\right", "\\middle"]);
const COLOURS = new Set("red blue green orange purple brown gray black teal magenta cyan olive navy maroon".split(" "));

class Reader {
  constructor(source, depth = 0) {
    this.tokens = source.replace(/(^|[^\\])%[^\n]*/g, "$1").match(/\\(?:[a-zA-Z]+\*?|[\s\S])|[0-9]+(?:[.,][0-9]+)*|\s+|[\s\S]/gu) ?? [];
    this.at = 0;
    this.depth = depth;
  }

  peek() {
    while (/^\s+$/.test(this.tokens[this.at] ?? "")) this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    this.at += 1;
    return token;
  }

  take(wanted) {
    if (this.peek() !== wanted) return false;
    this.at += 1;
    return true;
  }

  // The characters of {...}, as they were written.
  raw() {
    if (this.peek() !== "{") return this.next() ?? "";
    this.at += 1;
    let open = 1;
    const found = [];
    while (this.at < this.tokens.length) {
      const token = this.tokens[this.at];
      this.at += 1;
      if (token === "{") open += 1;
      if (token === "}" && (open -= 1) === 0) break;
      found.push(token);
    }
    return found.join("");
  }

  optional() {
    if (this.peek() !== "[") return null;
    this.at += 1;
    const found = [];
    while (this.at < this.tokens.length && this.tokens[this.at] !== "]") found.push(this.tokens[this.at++]);
    this.at += 1;
    return found.join("");
  }
}

// -> MathML, as text that still has to be sanitised. A formula that is too much for this takes no answer with it.
export function texToMathml(source, display = false) {
  try {
    return written(source, display);
  } catch {
    return `<math>${unknown(source.slice(0, 2000))}</math>`;
  }
}

function written(source, display) {
  const head = `<math${display ? ' display="block"' : ""}>`;
  if (source.length > LONGEST) return `${head}<mtext>${escape(source.slice(0, 200))} …</mtext></math>`;
  const reader = new Reader(source);
  const parts = [];
  while (reader.peek() !== undefined) {
    parts.push(...list(reader, { display }));
    if (reader.peek() !== undefined) parts.push(unknown(reader.next())); // an end without its beginning
  }
  return `${head}${row(parts)}</math>`;
}

const unknown = (text) => `<merror><mtext>${escape(text)}</mtext></merror>`;

// Atoms up to what ends a group.
function list(r, style) {
  const parts = [];
  if (r.depth > DEEPEST) return [unknown(r.next() ?? "")];
  r.depth += 1;
  for (let token = r.peek(); token !== undefined && !ENDS.has(token); token = r.peek()) {
    if (INFIX[token]) {
      r.next();
      const above = row(parts.splice(0));
      parts.push(INFIX[token](above, row(list(r, style))));
    } else if (token === "\\displaystyle" || token === "\\textstyle") {
      r.next();
      const on = token === "\\displaystyle";
      parts.push(`<mstyle displaystyle="${on}">${row(list(r, { ...style, display: on }))}</mstyle>`);
    } else {
      const part = scripted(r, style);
      if (part) parts.push(part);
    }
  }
  r.depth -= 1;
  return parts;
}

const INFIX = {
  "\\over": (a, b) => `<mfrac>${a}${b}</mfrac>`,
  "\\choose": (a, b) => `<mrow>${mo("(")}<mfrac linethickness="0">${a}${b}</mfrac>${mo(")")}</mrow>`,
  "\\atop": (a, b) => `<mfrac linethickness="0">${a}${b}</mfrac>`,
};

// An atom with what hangs on it.
function scripted(r, style) {
  const token = r.peek();
  const base = token === "^" || token === "_" ? { text: "<mrow></mrow>" } : atom(r, style);
  let below = null;
  let above = null;
  let limits = base.limits ?? false;
  for (;;) {
    const mark = r.peek();
    if (mark === "\\limits" || mark === "\\nolimits") {
      r.next();
      limits = mark === "\\limits" ? "always" : false;
    } else if (mark === "_" && below === null) {
      r.next();
      below = argument(r, style);
    } else if (mark === "^" && above === null) {
      r.next();
      above = argument(r, style);
    } else if (mark === "'" && (above === null || above.primes)) {
      let primes = "";
      while (r.take("'")) primes += "′";
      if (r.peek() === "^") {
        r.next();
        above = `<mrow>${mo(primes)}${argument(r, style)}</mrow>`;
      } else above = mo(primes);
    } else break;
  }
  if (below === null && above === null) return base.after ? `<mrow>${base.text}${base.after}</mrow>` : base.text; // one element: it may be an argument
  const stacked = limits === "always" || (limits && style.display);
  if (base.leans && above !== null && !stacked) above = `<mrow><mspace width="${style.display ? "0.5em" : "0.2em"}"></mspace>${above}</mrow>`; // browsers set it into the sign
  const [sub, sup, both] = stacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  const made = below !== null && above !== null ? `<${both}>${base.text}${below}${above}</${both}>`
    : below !== null ? `<${sub}>${base.text}${below}</${sub}>` : `<${sup}>${base.text}${above}</${sup}>`;
  return base.after ? `<mrow>${made}${base.after}</mrow>` : made;
}

// One argument of a command: a group, or a single atom.
function argument(r, style, display = false) {
  const token = r.peek();
  if (token === undefined || token === "}" || token === "&") return "<mrow></mrow>";
  if (/^[0-9]/.test(token) && token.length > 1) { // x^12 raises 1 alone
    r.tokens[r.at] = token.slice(1);
    return `<mn>${token[0]}</mn>`;
  }
  return atom(r, { ...style, display }).text;
}

function atom(r, style) {
  const token = r.next();
  if (r.depth > DEEPEST) return { text: unknown(token) };
  r.depth += 1;
  try {
    return one(r, token, style);
  } finally {
    r.depth -= 1;
  }
}

function one(r, token, style) {
  if (token === "{") {
    const parts = list(r, style);
    r.take("}");
    return { text: row(parts) };
  }
  if (token.startsWith("\\")) return command(r, token.slice(1), style);
  if (/^[0-9]/.test(token)) {
    const drawn = DRAWN[style.alphabet];
    return { text: `<mn${drawn ? ` class="${drawn}"` : ""}>${style.alphabet && !drawn ? [...token].map((c) => inAlphabet(style.alphabet, c)).join("") : token}</mn>` };
  }
  if (/^\p{L}$/u.test(token)) return { text: /[\u0391-\u03a9]/.test(token) && !style.alphabet ? upright(token) : letter(token, style) };
  if (token === "~") return { text: space("0.25em") };
  const signs = { "-": "−", "*": "∗", "/": "/", "'": "′", ":": ":" };
  const still = "()[]|".includes(token) ? ' stretchy="false"' : "";
  return { text: mo(signs[token] ?? token, still) };
}

const upright = (text, drawn = "") => `<mi mathvariant="normal"${drawn && ` class="${drawn}"`}>${escape(text)}</mi>`;

// Letters of these alphabets come from the page's own fonts, or are made heavier: fonts of formulas rarely have them.
const DRAWN = { mathsf: "sans", mathtt: "mono", boldsymbol: "bold", bm: "bold", pmb: "bold" };

function letter(text, style) {
  const { alphabet } = style;
  if (!alphabet) return `<mi>${text}</mi>`;
  if (alphabet === "mathrm") return upright(text);
  if (DRAWN[alphabet] === "bold") return `<mi class="bold">${text}</mi>`;
  if (DRAWN[alphabet]) return upright(text, DRAWN[alphabet]);
  const found = inAlphabet(alphabet, text);
  if (found !== text || !/bf|bold/.test(alphabet)) return upright(found);
  return /[\u03b1-\u03f5]/.test(text) ? `<mi class="bold">${text}</mi>` : upright(text, "bold");
}

function command(r, name, style) {
  if (LETTERS[name]) return { text: letter(LETTERS[name], style) };
  if (UPRIGHT[name]) return { text: name.endsWith("dots") || name.startsWith("dots") ? mo(UPRIGHT[name]) : style.alphabet ? letter(UPRIGHT[name], style) : upright(UPRIGHT[name]) };
  if (OPERATORS[name]) return { text: mo(OPERATORS[name], "⟨⟩⌊⌋⌈⌉|‖{}[]()".includes(OPERATORS[name]) ? ' stretchy="false"' : "") };
  if (SUMS[name]) return { text: mo(SUMS[name]), limits: true };
  if (INTEGRALS[name]) return { text: mo(INTEGRALS[name]), leans: true };
  if (SPACES[name]) return { text: space(SPACES[name]) };
  if (FUNCTIONS.has(name) || LIMITS.has(name)) return { text: `<mi>${SPOKEN[name] ?? name}</mi>`, limits: LIMITS.has(name), after: opens(r) ? "" : space("0.167em") };
  if (ALPHABETS[name] || name === "mathrm" || name === "mathnormal" || name === "mathup") {
    const alphabet = name === "mathup" ? "mathrm" : name === "mathnormal" ? undefined : name;
    return { text: alphabet === "mathrm" && r.peek() === "{" ? word(r, style) : argument(r, { ...style, alphabet }, style.display) };
  }
  if (name === "overline" || name === "underline") return { text: `<mrow class="${name}">${argument(r, style, style.display)}</mrow>` };
  if (ACCENTS[name]) return { text: `<mover accent="true">${argument(r, style, style.display)}${mo(ACCENTS[name], ` stretchy="${WIDE.has(name)}"`)}</mover>`, limits: name === "overbrace" ? "always" : false };
  if (BELOW[name]) return { text: `<munder accentunder="true">${argument(r, style, style.display)}${mo(BELOW[name], ' stretchy="true"')}</munder>`, limits: name === "underbrace" ? "always" : false };
  const known = COMMANDS[name];
  if (known) return known(r, style, name);
  const sized = /^(big|Big|bigg|Bigg)([lrm]?)$/.exec(name);
  if (sized) return { text: mo(delimiter(r), ` stretchy="true" symmetric="true" minsize="${SIZES[sized[1]]}" maxsize="${SIZES[sized[1]]}"`) };
  if (/^[#$%&_]$/.test(name)) return { text: upright(name) };
  if (/^[{}|]$/.test(name)) return { text: mo(name === "|" ? "‖" : name, ' stretchy="false"') };
  return { text: unknown(`\\${name}`) };
}

const opens = (r) => r.peek() === "(" || r.peek() === "\\left";

// \mathrm{max flow}: letters in a row are one word.
function word(r, style) {
  const start = r.at;
  const raw = r.raw();
  if (/^[\p{L}\d .,-]+$/u.test(raw)) return upright(raw.trim());
  r.at = start;
  return argument(r, { ...style, alphabet: "mathrm" }, style.display);
}

function delimiter(r) {
  const token = r.next() ?? ".";
  if (token === ".") return "";
  if (!token.startsWith("\\")) return token === "<" ? "⟨" : token === ">" ? "⟩" : token;
  const name = token.slice(1);
  return name === "|" ? "‖" : (OPERATORS[name] ?? name);
}

function text(r) {
  // Within text, $...$ is mathematics again. A row around it: what hangs on a base gets its size there, not in the style of text.
  const parts = r.raw().replace(/\\([#$%&_{} ])/g, "$1").split(/(\$[^$]+\$)/);
  return `<mrow>${parts.filter(Boolean).map((part) =>
    part.length > 2 && part.startsWith("$") && part.endsWith("$") ? row(list(new Reader(part.slice(1, -1), r.depth + 1), {})) : `<mtext>${escape(part.replace(/^\s+|\s+$/g, "\u00a0"))}</mtext>`).join("")}</mrow>`;
}

const fraction = (display) => (r, style) => {
  const made = `<mfrac>${argument(r, style)}${argument(r, style)}</mfrac>`;
  return { text: display === undefined ? made : `<mstyle displaystyle="${display}" scriptlevel="0">${made}</mstyle>` };
};
const binomial = (r, style) => ({ text: `<mrow>${mo("(")}<mfrac linethickness="0">${argument(r, style)}${argument(r, style)}</mfrac>${mo(")")}</mrow>` });
const inText = (r) => ({ text: text(r) });
const struck = (how) => (r, style) => ({ text: `<mrow class="${how}">${argument(r, style, style.display)}</mrow>` });
const chemical = (r) => ({ text: row(list(new Reader(chemToTex(r.raw()), r.depth + 1), {})) });
const EM = { em: 1, ex: 0.43, pt: 0.1, mm: 0.28, cm: 2.8, in: 7.2, px: 0.075, mu: 0.056 };
const spaced = (r) => {
  const [, size, unit] = /^\s*(-?[\d.]+)\s*([a-z]+)\s*$/.exec(r.raw()) ?? [];
  return { text: EM[unit] ? space(`${Math.max(-3, Math.min(20, size * EM[unit])).toFixed(2)}em`) : "" };
};
const ignored = () => ({ text: "" });
const skipped = (r) => {
  r.raw();
  return { text: "" };
};
const arrow = (sign) => (r, style) => {
  const below = r.optional();
  const above = argument(r, style);
  const under = below === null ? "" : row(list(new Reader(below, r.depth + 1), style));
  return { text: under ? `<munderover>${mo(sign, ' stretchy="true"')}${under}${above}</munderover>` : `<mover>${mo(sign, ' stretchy="true"')}${above}</mover>` };
};

const COMMANDS = {
  frac: fraction(), tfrac: fraction(false), dfrac: fraction(true), cfrac: fraction(true),
  binom: binomial, tbinom: binomial, dbinom: binomial,
  text: inText, textrm: inText, textnormal: inText, textbf: inText, textit: inText, textsf: inText, texttt: inText, mbox: inText, hbox: inText,
  sqrt(r, style) {
    const index = r.optional();
    const inner = argument(r, style, style.display);
    return { text: index === null ? `<msqrt>${inner}</msqrt>` : `<mroot>${inner}${row(list(new Reader(index, r.depth + 1), {}))}</mroot>` };
  },
  left(r, style) {
    const parts = [mo(delimiter(r), ' stretchy="true" form="prefix"'), ...list(r, style)];
    while (r.take("\\middle")) parts.push(mo(delimiter(r), ' stretchy="true"'), ...list(r, style));
    if (r.take("\\right")) parts.push(mo(delimiter(r), ' stretchy="true" form="postfix"'));
    return { text: `<mrow>${parts.join("")}</mrow>` };
  },
  begin(r, style) {
    return { text: environment(r, r.raw(), style) };
  },
  operatorname: (r) => ({ text: `<mi>${escape(r.raw().replace(/\\[,;: ]/g, " "))}</mi>`, after: opens(r) ? "" : space("0.167em") }),
  "operatorname*": (r) => ({ text: `<mi>${escape(r.raw().replace(/\\[,;: ]/g, " "))}</mi>`, limits: true }),
  overset: (r, style) => stacked("mover", r, style),
  stackrel: (r, style) => stacked("mover", r, style),
  underset: (r, style) => stacked("munder", r, style),
  substack(r) {
    return { text: environment(new Reader(`${r.raw()}\\end{gathered}`, r.depth + 1), "gathered", {}) };
  },
  xrightarrow: arrow("→"), xleftarrow: arrow("←"), xRightarrow: arrow("⇒"), xleftrightarrow: arrow("↔"), xmapsto: arrow("↦"), xrightleftharpoons: arrow("⇌"),
  boxed: (r, style) => ({ text: `<mrow class="boxed">${argument(r, style, style.display)}</mrow>` }),
  phantom: (r, style) => ({ text: `<mphantom>${argument(r, style, style.display)}</mphantom>` }),
  vphantom: (r, style) => ({ text: `<mpadded width="0"><mphantom>${argument(r, style)}</mphantom></mpadded>` }),
  not(r, style) {
    const token = r.peek() ?? "";
    const sign = token.startsWith("\\") ? OPERATORS[token.slice(1)] : token;
    if (!sign || sign.length > 1 || token === "{") return { text: argument(r, style) };
    r.next();
    return { text: mo(`${sign}\u0338`.normalize("NFC")) };
  },
  bmod: () => ({ text: `<mrow>${space("0.22em")}<mi>mod</mi>${space("0.22em")}</mrow>` }),
  pmod: (r, style) => ({ text: `<mrow>${space("0.5em")}${mo("(", ' stretchy="false"')}<mi>mod</mi>${space("0.3em")}${argument(r, style)}${mo(")", ' stretchy="false"')}</mrow>` }),
  color(r, style) {
    return coloured(r.raw(), row(list(r, style)));
  },
  textcolor(r, style) {
    return coloured(r.raw(), argument(r, style, style.display));
  },
  tag: (r) => ({ text: `<mrow>${space("2em")}<mtext>(${escape(r.raw())})</mtext></mrow>` }),
  ce: chemical, pu: chemical,
  hspace: spaced, "hspace*": spaced, mspace: spaced, hskip: ignored, kern: ignored,
  genfrac(r, style) {
    const [open, close, line] = [r.raw(), r.raw(), r.raw()];
    r.raw(); // the style
    const made = `<mfrac${/^0/.test(line) ? ' linethickness="0"' : ""}>${argument(r, style)}${argument(r, style)}</mfrac>`;
    return { text: open || close ? `<mrow>${mo(open, ' stretchy="true" form="prefix"')}${made}${mo(close, ' stretchy="true" form="postfix"')}</mrow>` : made };
  },
  cancel: struck("cancel"), bcancel: struck("cancel back"), xcancel: struck("cancel both"), sout: struck("cancel level"),
  hphantom: (r, style) => ({ text: `<mphantom>${argument(r, style)}</mphantom>` }),
  smash: (r, style) => ({ text: argument(r, style, style.display) }),
  label: skipped, ref: skipped, nonumber: ignored, notag: ignored, scriptstyle: ignored, scriptscriptstyle: ignored, rm: ignored, bf: ignored, cal: ignored, it: ignored, allowbreak: ignored, mathstrut: ignored, strut: ignored, nolimits: ignored, "/": ignored, "-": ignored,
  mathop: (r, style) => ({ text: argument(r, style), limits: true }), mathbin: (r, style) => ({ text: argument(r, style) }), mathrel: (r, style) => ({ text: argument(r, style) }), mathord: (r, style) => ({ text: argument(r, style) }), ensuremath: (r, style) => ({ text: argument(r, style, style.display) }),
};

function coloured(name, inner) {
  return { text: COLOURS.has(name.trim()) ? `<mstyle mathcolor="${name.trim()}">${inner}</mstyle>` : inner };
}

function stacked(tag, r, style) {
  const over = argument(r, style);
  return { text: `<${tag}>${argument(r, style)}${over}</${tag}>` };
}

function environment(r, name, style) {
  let columns = null;
  if (/^(array|aligned|gathered|split|multlined)$/.test(name) && r.peek() === "[") r.optional();
  if (name === "array" || name === "subarray" || name.startsWith("alignat") || name === "alignedat") columns = r.raw();
  else if (name.endsWith("matrix*")) r.optional();
  const lines = LINES.has(name);
  const inner = { ...style, display: lines || name === "dcases" };
  const rows = [[]];
  const ruled = new Set(); // rows with a line above
  for (;;) {
    while (r.take("\\hline")) ruled.add(rows.length - 1);
    rows.at(-1).push(row(list(r, inner)));
    if (r.take("&")) continue;
    if (r.take("\\\\")) {
      r.optional();
      rows.push([]);
      continue;
    }
    if (r.take("\\end")) r.raw();
    else if (r.peek() !== undefined) {
      rows.at(-1).push(unknown(r.next()));
      continue;
    }
    break;
  }
  if (rows.length > 1 && rows.at(-1).length === 1 && rows.at(-1)[0] === "<mrow></mrow>") rows.pop();
  const shape = name === "array" ? (columns ?? "").replace(/[^lcr|]/g, "") : "";
  const letters = shape.replace(/\|/g, "");
  const bars = new Set([...shape.matchAll(/\|/g)].map((each) => shape.slice(0, each.index).replace(/\|/g, "").length)); // columns with a line before them
  const side = (i) => letters[i] ?? (name.includes("cases") ? "l" : lines && !name.startsWith("gather") && !name.startsWith("equation") && !name.startsWith("multline") ? "rl"[i % 2] : "c");
  const lined = (y, i, last) => [bars.has(i) && " before", bars.has(i + 1) && i === last && " after", ruled.has(y) && " above", ruled.has(y + 1) && y === rows.length - 1 && " below"].filter(Boolean).join("");
  const cells = rows.map((cols, y) => `<mtr>${cols.map((c, i) => `<mtd class="${side(i)}${lined(y, i, cols.length - 1)}">${c}</mtd>`).join("")}</mtr>`).join("");
  const made = `<mtable class="${lines ? "lines" : "grid"}"${inner.display ? ' displaystyle="true"' : ""}>${cells}</mtable>`;
  if (name.includes("cases")) return `<mrow>${mo("{", ' stretchy="true" form="prefix"')}${made}</mrow>`;
  const fence = COLUMNS[name.replace("*", "")];
  return fence ? `<mrow>${mo(fence[0], ' stretchy="true" form="prefix"')}${made}${mo(fence[1], ' stretchy="true" form="postfix"')}</mrow>` : made;
}
