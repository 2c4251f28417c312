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
    "SELECT FROM WHERE INSERT INTO UPDATE DELETE CREATE TABLE JOIN LEFT INNER ON GROUP BY ORDER LIMIT VALUES SET AS AND OR NOT NULL").split(" "),
);
const HASH = /^(py|python|sh|bash|zsh|shell|console|ruby|rb|yaml|yml|toml|perl|r|make|makefile|dockerfile|nix|julia|elixir|)$/i;
const DASH = /^(sql|lua|haskell|hs|ada|elm)$/i;
const PLAIN = /^(text|txt|plain|markdown|md|diff|log|mermaid)$/i;

function scanner(language) {
  const comments = ["\\/\\*[\\s\\S]*?(?:\\*\\/|$)", "\\/\\/[^\\n]*"];
  if (HASH.test(language)) comments.push("#[^\\n]*");
  if (DASH.test(language)) comments.push("--[^\\n]*");
  if (/^(html|xml|svg)$/i.test(language)) comments.push("<!--[\\s\\S]*?(?:-->|$)");
  const first = language === "" || HASH.test(language) ? comments.slice(2) : comments;
  const quoted = "\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'''[\\s\\S]*?(?:'''|$)|\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'|`(?:\\\\.|[^`\\\\])*`";
  return new RegExp(`(${first.join("|")})|(${quoted})|\\b(0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b|([A-Za-z_]\\w*)`, "g");
}

export function highlight(code) {
  const text = code.textContent;
  const language = code.dataset.language || "";
  if (text.length > LONGEST || PLAIN.test(language)) return;
  const parts = [];
  let at = 0;
  const put = (from, to, kind) => {
    if (from > at) parts.push(text.slice(at, from));
    const span = document.createElement("span");
    span.className = kind;
    span.textContent = text.slice(from, to);
    parts.push(span);
    at = to;
  };
  for (const found of text.matchAll(scanner(language))) {
    const end = found.index + found[0].length;
    if (found[1]) put(found.index, end, "c");
    else if (found[2]) put(found.index, end, "s");
    else if (found[3]) put(found.index, end, "n");
    else if (KEYWORDS.has(found[4])) put(found.index, end, "k");
    else if (text[end] === "(") put(found.index, end, "f");
  }
  if (at < text.length) parts.push(text.slice(at));
  code.replaceChildren(...parts);
}
