// Colours for code in any language. Owns: a small scanner for comments, strings, numbers and common keywords.
//
// It knows no grammar: it is right about what makes code readable, and wrong about nothing that matters.
const LONGEST = 30_000;
const KEYWORDS = new Set(
  ("abstract and as assert async await begin bool boolean break byte case catch char class const constexpr continue def default " +
    "defer del delete do double elif else elsif end enum except export extends extern false final finally float fn for foreach from " +
    "func function global go goto if impl implements import in include instanceof int interface is lambda let long loop match " +
    "mod module mut namespace new nil nonlocal not null None of operator or override package pass private protected pub public " +
    "raise readonly return self short signed sizeof static struct super switch template then this throw trait True False true try type " +
    "typedef typename typeof undefined union unless unsafe unsigned until use using val var virtual void volatile when where while with yield " +
    "SELECT FROM WHERE INSERT INTO UPDATE DELETE CREATE TABLE JOIN LEFT INNER ON GROUP BY ORDER LIMIT VALUES SET AS AND OR NOT NULL HAVING DISTINCT LIKE IS UNION ALL CASE WHEN THEN ELSE END WITH IN BETWEEN EXISTS OVER PARTITION").split(" "),
);
const HASH = /^(py|python|sh|bash|zsh|shell|console|ruby|rb|yaml|yml|toml|ini|perl|r|make|makefile|dockerfile|nix|julia|elixir|powershell|ps1|)$/i;
const APART = /^(sh|bash|zsh|shell|console|yaml|yml|make|makefile|dockerfile)$/i; // there a # within a word begins no comment
const MARKUP = /^(html?|xml|svg|vue|jsx|tsx|svelte)$/i;
const TICKS = /^(rust|rs|haskell|hs|ocaml|ml|lisp|scheme|clojure|clj|elisp|racket|latex|tex|matlab|verilog|ada)$/i; // there a ' is not always one end of a string
const KEYED = /^(ya?ml|json5?|jsonc|toml|ini|css|scss|less)$/i; // what stands before a colon or = is a name
const FOLDED = /^(sql|mysql|postgres|postgresql|plsql|sqlite|vb|vbnet|fortran|pascal|ada)$/i; // keywords in any case
const DASH = /^(sql|mysql|postgres|postgresql|plsql|sqlite|lua|haskell|hs|ada|elm)$/i;
const PLAIN = /^(text|txt|plain|plaintext|markdown|md|log|mermaid)$/i;
const LINES = /^(diff|patch)$/i;

function scanner(language) {
  const comments = ["\\/\\*[\\s\\S]*?(?:\\*\\/|$)", "\\/\\/[^\\n]*"];
  if (/^css$/i.test(language)) comments.pop();
  if (HASH.test(language)) comments.push(APART.test(language) ? "(?<![^\\s;&|(){}])#[^\\n]*" : "#[^\\n]*");
  if (DASH.test(language)) comments.push("--[^\\n]*");
  if (MARKUP.test(language)) comments.push("<!--[\\s\\S]*?(?:-->|$)");
  const first = language === "" || HASH.test(language) ? comments.slice(2) : comments;
  const single = TICKS.test(language) ? "'(?:\\\\[^']*|[^'\\\\\\n])'" : "'(?:\\\\.|[^'\\\\\\n])*'";
  const quoted = `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|"(?:\\\\.|[^"\\\\\\n])*"?|${single}|\`(?:\\\\.|[^\`\\\\])*\``;
  const names = MARKUP.test(language) ? "(?<=<\\/?)[a-zA-Z][\\w.-]*" : KEYED.test(language) ? "[\\w.-]+(?=\\s*[:=](?!\\S*[{;]))" : "(?!)";
  return new RegExp(`(${first.join("|") || "(?!)"})|(${quoted})|(${names})|\\b(0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b|([A-Za-z_]\\w*)`, "g");
}

const coloured = (text, language) => text.length <= LONGEST && !PLAIN.test(language);

// [from, to, kind] of each part that has a colour.
function* parts(text, language) {
  if (LINES.test(language)) {
    for (const found of text.matchAll(/^([+-]|@@).*$/gm)) yield [found.index, found.index + found[0].length, { "+": "f", "-": "k", "@@": "n" }[found[1]]];
    return;
  }
  const known = (word) => KEYWORDS.has(word) || (FOLDED.test(language) && KEYWORDS.has(word.toUpperCase()));
  for (const found of text.matchAll(scanner(language))) {
    const end = found.index + found[0].length;
    const named = found[2] && KEYED.test(language) && /^\s*:/.test(text.slice(end, end + 20)); // a quoted name
    const kind = found[1] ? "c" : named || found[3] ? "f" : found[2] ? "s" : found[4] ? "n" : known(found[5]) ? "k" : text[end] === "(" ? "f" : "";
    if (kind) yield [found.index, end, kind];
  }
}

function made(text, found) {
  const nodes = [];
  let at = 0;
  for (const [from, to, kind] of found) {
    if (from > at) nodes.push(text.slice(at, from));
    const span = document.createElement("span");
    span.className = kind;
    span.textContent = text.slice(from, to);
    nodes.push(span);
    at = to;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

export function highlight(code) {
  const text = code.textContent;
  const language = code.dataset.language || "";
  if (coloured(text, language)) code.replaceChildren(...made(text, parts(text, language)));
}

// While code grows: whole lines at the beginning of `node`, the uncoloured end of `code`, get their colours. What may still
// change waits: a comment or a string that is open goes to the end of the text. Only `highlight` knows about backticks.
export function highlightLines(code, node) {
  const text = node.data;
  const language = code.dataset.language || "";
  let end = text.lastIndexOf("\n") + 1;
  if (!end || !coloured(text, language)) return;
  const found = [];
  for (const part of parts(text, language)) {
    if (part[0] >= end) break;
    if (part[1] > end || part[1] === text.length) end = part[0];
    else found.push(part);
  }
  node.before(...made(text.slice(0, end), found));
  node.deleteData(0, end);
}
