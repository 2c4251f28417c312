// Formulas in Markdown. Owns: where a formula begins and ends, and its place in the page. Knows nothing of TeX.
import { texToMathml } from "./tex.js";

const BODY = "(?:(?!\\n[ \\t]*\\n)[\\s\\S])+?"; // no empty line within a formula
const SQUARE = new RegExp(`^\\\\\\[(${BODY})\\\\\\]`);
const ROUND = new RegExp(`^\\\\\\((${BODY})\\\\\\)`);
const DOUBLE = new RegExp(`^\\$\\$(${BODY})\\$\\$`);
// One dollar: no space inside of it, no digit behind it, so that prices stay prices.
const SINGLE = /^\$((?:\\[\s\S]|[^$\\\n])+?)\$(?!\d)/;
const ENVIRONMENT = new RegExp(`^\\\\begin\\{(equation|align|gather|multline|eqnarray|flalign|alignat)(\\*?)\\}(${BODY})\\\\end\\{\\1\\2\\}`);

const shown = (tex) => `<div class="formula" tabindex="0" role="group" aria-label="Formula">${texToMathml(tex.trim(), true)}</div>`;

const block = {
  name: "formulaBlock",
  level: "block",
  start(source) {
    const found = /(?:^|\n) {0,3}(?:\\\[|\$\$|\\begin\{(?:equation|align|gather|multline|eqnarray|flalign))/.exec(source);
    return found ? found.index + (source[found.index] === "\n" ? 1 : 0) : undefined;
  },
  tokenizer(source) {
    const lead = /^ {0,3}/.exec(source)[0].length;
    const rest = source.slice(lead);
    const environment = ENVIRONMENT.exec(rest);
    const found = environment ?? SQUARE.exec(rest) ?? DOUBLE.exec(rest);
    if (!found) return undefined;
    const end = /^[ \t]*(?:\n+|$)/.exec(rest.slice(found[0].length));
    if (!end) return undefined; // words follow on its line: it stands within a paragraph
    return { type: "formulaBlock", raw: source.slice(0, lead + found[0].length + end[0].length), tex: environment ? found[0] : found[1] };
  },
  renderer: ({ tex }) => `${shown(tex)}\n`,
};

const inline = {
  name: "formula",
  level: "inline",
  start: (source) => {
    const at = source.search(/\$|\\\(|\\\[/);
    return at < 0 ? undefined : at;
  },
  tokenizer(source) {
    const wide = SQUARE.exec(source) ?? DOUBLE.exec(source);
    const found = wide ?? ROUND.exec(source) ?? spaced(SINGLE.exec(source));
    return found ? { type: "formula", raw: found[0], tex: found[1], wide: Boolean(wide) } : undefined;
  },
  renderer: ({ tex, wide }) => `<span class="${wide ? 'formula" tabindex="0" role="group" aria-label="Formula' : "formula-inline"}">${texToMathml(tex.trim(), wide)}</span>`,
};

const spaced = (found) => (found && !/^\s|\s$/.test(found[1]) && (!/\s/.test(found[1]) || /[\\^_{}=+<>|()/-]/.test(found[1])) ? found : null);

export const formulas = { extensions: [block, inline] };

// Is no formula open at the end of this text?
export function closed(text) {
  const count = (mark) => text.split(mark).length - 1;
  return count("$") % 2 === 0 && count("\\(") === count("\\)") && count("\\[") === count("\\]");
}

export const MATH_TAGS = "math merror mfrac mi mn mo mover mpadded mphantom mroot mrow mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover".split(" ");
export const MATH_ATTRIBUTES = "accent accentunder display displaystyle form linethickness mathcolor mathvariant maxsize minsize scriptlevel stretchy symmetric width".split(" ");
