// Markdown that grows. Owns: turning a text, token by token, into safe HTML without ever doing finished parts again.
//
// The text is cut into blocks. A block that another one follows is final: it is rendered once and stays. Only the last
// block is rendered again while it grows; an open code fence is not even that, its text is appended.
import { Marked } from "marked";
import { completed, dialect, DIALECT_TAGS, looksBack, readNotes } from "./dialect.js";
import { highlight, highlightLines } from "./highlight.js";
import { closed, formulas, MATH_ATTRIBUTES, MATH_TAGS } from "./mathmark.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[^\n]*\n/;
const LONG_LIST = 1500; // characters after which the finished items or rows of an open list or table become final
const LONG_PARAGRAPH = 1500;
const KEPT_OPEN = 300; // characters at a long paragraph's end that stay open, because marks in them may yet close
const SHARE = 4; // rendering may take one part in so many of the time

const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

const marked = new Marked({
  gfm: true,
  breaks: false,
  renderer: {
    // An image would call a foreign server: it becomes a link.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    code: ({ text, lang }) => codeHtml(text, lang),
    table(token) {
      return `<div class="table" tabindex="0" role="group" aria-label="Table">${tableHtml.call(this, token)}</div>`;
    },
  },
});

marked.use(dialect, formulas);
const lexer = (text) => marked.lexer(text);

function tableHtml(token) {
  const row = (cells, tag) =>
    `<tr>${cells.map((c, i) => `<${tag}${token.align[i] ? ` align="${token.align[i]}"` : ""}>${this.parser.parseInline(c.tokens)}</${tag}>`).join("")}</tr>`;
  return `<table><thead>${row(token.header, "th")}</thead><tbody>${token.rows.map((r) => row(r, "td")).join("")}</tbody></table>`;
}

function codeHtml(text, info) {
  const language = (info || "").trim().split(/\s+/)[0];
  const diagram = /^mermaid$/i.test(language);
  return (
    `<div class="code${diagram ? " diagram" : ""}"><div class="code-head"><span>${diagram ? "Diagram, as Mermaid source" : escape(language || "text")}</span>` +
    `<button type="button" class="copy-code">Copy</button></div>` +
    `<pre tabindex="0" aria-label="Code"><code data-language="${escape(language)}">${escape(text)}\n</code></pre></div>`
  );
}

const ALLOWED = {
  ALLOWED_TAGS: [..."a b blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr i input li ol p pre s span strong sub sup table tbody td th thead tr ul".split(" "), ...DIALECT_TAGS, ...MATH_TAGS],
  ALLOWED_ATTR: [..."align aria-label checked class data-language disabled href role start tabindex title type".split(" "), ...MATH_ATTRIBUTES],
  RETURN_DOM_FRAGMENT: true,
};

const KINDS = { flowchart: "Flow chart", graph: "Flow chart", sequenceDiagram: "Sequence diagram", classDiagram: "Class diagram", stateDiagram: "State diagram", erDiagram: "Entity diagram", gantt: "Gantt chart", pie: "Pie chart", mindmap: "Mind map", timeline: "Timeline", gitGraph: "Commit graph", journey: "Journey" };

// A whole block of code gets its colours; a diagram gets its title, and is drawn if it is of a kind that can be.
function finish(code) {
  highlight(code);
  if (!/^mermaid$/i.test(code.dataset.language || "")) return;
  void drawn(code);
  const text = code.textContent;
  const title = /^\s*(?:pie +(?:showData +)?)?(?:title|accTitle)\s*:?\s+(.+)$/m.exec(text)?.[1].trim();
  const kind = KINDS[/^\s*([A-Za-z]+)/.exec(text.replace(/^---[\s\S]*?---/, ""))?.[1]] ?? "Diagram";
  code.closest(".code").querySelector(".code-head span").textContent = `${title ? `${title} · ` : ""}${kind}, as Mermaid source`;
}

// The picture stands above its source, which a button shows. What is not read in whole stays a source.
async function drawn(code) {
  try {
    const { draw } = await import("./diagram.js");
    const picture = await draw(code.textContent);
    if (!picture) return;
    const box = code.closest(".code");
    const head = box.querySelector(".code-head");
    const title = head.querySelector("span");
    title.textContent = title.textContent.replace(/, as Mermaid source$/, "");
    const button = Object.assign(document.createElement("button"), { type: "button", className: "copy-code show-source", textContent: "Source" });
    button.setAttribute("aria-pressed", "false");
    const shown = Object.assign(document.createElement("div"), { className: "drawing", tabIndex: 0 });
    shown.setAttribute("role", "group");
    shown.setAttribute("aria-label", title.textContent);
    shown.append(picture);
    title.after(button);
    head.after(shown);
    box.querySelector("pre").hidden = true;
  } catch {
    // Its source is shown.
  }
}

// Block tokens as a sanitised fragment.
function fragment(tokens) {
  const made = globalThis.DOMPurify.sanitize(marked.parser(tokens), ALLOWED);
  for (const link of made.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  // What has a direction of its own does not decide that of the sentence around it.
  for (const part of made.querySelectorAll(":not(pre) > code, .formula-inline")) part.setAttribute("dir", "ltr");
  for (const block of made.children) if (!block.matches(".code, .formula")) block.setAttribute("dir", "auto");
  for (const box of made.querySelectorAll("input")) box.setAttribute("aria-label", box.checked ? "done" : "not done");
  return made;
}

// Is no emphasis, code or link open at the end of this text?
function balanced(text) {
  const count = (mark) => text.split(mark).length - 1;
  return count("`") % 2 === 0 && count("*") % 2 === 0 && count("_") % 2 === 0 && count("~~") % 2 === 0 && count("[") === count("]") && closed(text);
}

// Let the libraries do their first, slow work before the first token comes.
export function warmUp() {
  new GrowingMarkdown(document.createElement("div")).update("# a\n\n- *b* `c`\n\n| d |\n|---|\n| e |\n\n```js\nf(1)\n```\n", true);
}

export class GrowingMarkdown {
  // Renders into `element`, which belongs to this object alone.
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.text = "";
    this.settled = 0; // characters whose blocks are final
    this.fence = null;
    this.paragraph = null; // a long paragraph whose beginning is final
    this.table = null; // a long table whose first rows are final
    this.cost = 0;
    this.at = -Infinity;
    this.last = document.createElement("div");
    this.last.className = "growing";
    this.element.replaceChildren(this.last);
  }

  // Show `text`; while it grows, calls may be skipped to keep the page smooth. -> whether it has been shown.
  update(text, final = false) {
    if (!text.startsWith(this.text.slice(0, this.settled)) || text.length < this.text.length) this.reset();
    if (final && this.settled && looksBack(text)) this.reset(); // its end says what marks before it mean
    readNotes(final ? text : text.slice(this.settled));
    const now = performance.now();
    if (!final && now - this.at < this.cost * SHARE) return false;
    this.text = text;
    this.advance(final);
    this.at = performance.now();
    this.cost = this.at - now;
    return true;
  }

  advance(final) {
    if (this.fence && !this.growFence(final)) return;
    if (this.table && this.growTable(final)) return;
    let tail = this.text.slice(this.settled);
    const tokens = lexer(tail);
    let open = tokens.length - 1;
    while (open > 0 && tokens[open].type === "space") open -= 1;
    if (final) open = tokens.length;
    if (open > 0) {
      this.settle(tokens.slice(0, open));
      tail = this.text.slice(this.settled);
    }
    const rest = tokens.slice(Math.max(0, open));
    if (rest[0]?.type === "code" && FENCE.test(tail)) {
      this.openFence(tail);
      return;
    }
    if (rest[0]?.type === "list" && rest[0].items.length > 1 && tail.length > LONG_LIST) {
      this.settleItems(rest[0]);
      this.showRest();
      return;
    }
    if (rest[0]?.type === "table" && rest[0].rows.length > 1 && tail.length > LONG_LIST) {
      this.openTable(rest[0], tail);
      return;
    }
    if (rest[0]?.type === "paragraph" && tail.length > LONG_PARAGRAPH) this.settleWords(tail);
    if (this.paragraph && rest[0]?.type === "paragraph") {
      this.paragraph.end.replaceChildren(...this.rest().firstElementChild.childNodes);
      this.last.replaceChildren();
    } else if (rest.length) this.showRest();
    else this.last.replaceChildren();
  }

  rest() {
    return fragment(lexer(completed(this.text.slice(this.settled))));
  }

  // Folds that the reader has opened stay open.
  showRest() {
    const folds = [...this.last.querySelectorAll("details")].map((each) => each.open);
    const made = this.rest();
    made.querySelectorAll("details").forEach((each, i) => { each.open = Boolean(folds[i]); });
    this.last.replaceChildren(made);
  }

  settle(tokens) {
    if (tokens.some((token) => token.type !== "space")) {
      const made = fragment(tokens);
      for (const code of made.querySelectorAll("pre > code")) finish(code);
      this.joinList(made);
      if (this.paragraph) {
        if (tokens[0].type === "paragraph") {
          this.paragraph.end.replaceWith(...made.firstElementChild.childNodes);
          made.firstElementChild.remove();
        } else this.paragraph.end.remove();
        this.paragraph = null;
      }
      this.last.before(made);
    }
    for (const token of tokens) this.settled += token.raw.length;
  }

  // The beginning of a long paragraph is final, up to a word behind which no mark is open.
  settleWords(tail) {
    for (let at = tail.lastIndexOf(" ", tail.length - KEPT_OPEN); at > KEPT_OPEN; at = tail.lastIndexOf(" ", at - 1)) {
      const piece = tail.slice(0, at + 1);
      if (!/\p{L}/u.test(tail[at + 1]) || !balanced(piece)) continue;
      const made = fragment(lexer(piece)).firstElementChild;
      if (this.paragraph) this.paragraph.end.before(...made.childNodes, " ");
      else {
        this.paragraph = { end: document.createElement("span") };
        made.append(" ", this.paragraph.end);
        this.last.before(made);
      }
      this.settled += piece.length;
      return;
    }
  }

  // The finished items of a long list are final; the list goes on in the growing part.
  settleItems(list) {
    const items = list.items.slice(0, -1);
    const made = fragment([{ ...list, items }]);
    this.joinList(made);
    this.last.before(made);
    for (const item of items) this.settled += item.raw.length;
    this.listGoesOn = true;
  }

  // A list that was cut while it grew becomes one list again.
  joinList(made) {
    const before = this.last.previousElementSibling;
    const first = made.firstElementChild;
    if (this.listGoesOn && before && first && /^[OU]L$/.test(first.tagName) && before.tagName === first.tagName) {
      before.append(...first.children);
      first.remove();
    }
    this.listGoesOn = false;
  }

  // All rows but the last are final; the next ones go under them.
  openTable(table, tail) {
    const made = fragment([{ ...table, rows: [] }]);
    const body = made.querySelector("tbody");
    this.last.before(made);
    this.last.replaceChildren();
    const head = tail.slice(0, tail.indexOf("\n", tail.indexOf("\n") + 1) + 1);
    this.settled += head.length;
    this.table = { head, body, growing: [] };
    this.growTable(false);
  }

  // -> whether the table is still the last block.
  growTable(final) {
    const { head, body, growing } = this.table;
    const tail = this.text.slice(this.settled);
    const [table, ...others] = lexer(head + tail);
    const ends = final || others.some((token) => token.type !== "space");
    const lines = body.ownerDocument.createDocumentFragment();
    lines.append(...fragment([table]).querySelectorAll("tbody tr"));
    for (const row of growing) row.remove();
    this.table.growing = ends || !lines.lastElementChild ? [] : [lines.lastElementChild];
    body.append(lines);
    if (ends) {
      this.settled += table.raw.length - head.length;
      this.table = null;
    } else this.settled += tail.trimEnd().lastIndexOf("\n") + 1;
    return !ends;
  }

  openFence(tail) {
    const head = FENCE.exec(tail);
    const body = tail.slice(head[0].length);
    const info = head[0].slice(head[0].indexOf(head[1]) + head[1].length).trim();
    const made = globalThis.DOMPurify.sanitize(codeHtml("", info), ALLOWED);
    const code = made.querySelector("code");
    const node = document.createTextNode("");
    code.replaceChildren(node);
    this.last.replaceChildren(made);
    const closing = new RegExp(`^ {0,3}\\${head[1][0]}{${head[1].length},}[ \\t]*$`);
    this.fence = { code, node, closing, shown: this.text.length - body.length };
    this.growFence(false);
  }

  // Append what is new to the open code block. -> true when it has been closed and the text goes on.
  growFence(final) {
    const { code, node, closing, shown } = this.fence;
    let at = shown;
    while (at < this.text.length) {
      const end = this.text.indexOf("\n", at);
      const line = this.text.slice(at, end < 0 ? undefined : end);
      if (closing.test(line) && (end >= 0 || final)) {
        node.appendData(this.text.slice(shown, at));
        this.closeFence(code, end < 0 ? this.text.length : end + 1);
        return true;
      }
      if (end < 0) break;
      at = end + 1;
    }
    // The last line may yet become the closing one: it is held back as long as it looks like it.
    const held = /^ {0,3}[`~]+[ \t]*$/.test(this.text.slice(at)) && !final ? at : this.text.length;
    node.appendData(this.text.slice(shown, held));
    this.fence.shown = held;
    if (!final) highlightLines(code, node);
    if (final) this.closeFence(code, this.text.length);
    return final;
  }

  closeFence(code, end) {
    finish(code);
    this.last.before(...this.last.childNodes);
    this.settled = end;
    this.fence = null;
    this.listGoesOn = false;
  }
}
