// Chemical formulas. Owns: reading what \ce{...} of mhchem means, as TeX's mathematics. Knows nothing of layout.
const ARROWS = { "<=>>": "\\rightleftharpoons", "<<=>": "\\rightleftharpoons", "<=>": "\\rightleftharpoons", "<-->": "\\rightleftarrows", "<->": "\\longleftrightarrow", "<--": "\\longleftarrow", "-->": "\\longrightarrow", "->": "\\longrightarrow", "<-": "\\longleftarrow", "=>": "\\Longrightarrow" };
const LABELLED = { "->": "\\xrightarrow", "<-": "\\xleftarrow", "<->": "\\xleftrightarrow", "<=>": "\\xrightleftharpoons" };
const ARROW = /^(?:<=>>|<<=>|<=>|<-->|<->|<--|-->|->|<-|=>)/;
const upright = (text) => `\\mathrm{${text}}`;

// In turn: a pattern, whether an element or a bracket must stand just before it, and what it becomes; what hangs on nothing
// gets an empty base.
const RULES = [
  [/^\s+[\^](?=\s|$)/, null, () => "\\uparrow "],
  [/^\s+v(?=\s|$)/, null, () => "\\downarrow "],
  [/^\s+/, null, () => " "],
  [/^\$([^$]*)\$/, null, (found) => `{${found[1]}}`],
  [/^\^(\{[^{}]*\}|\d*[+-]|\d+|\S)/, null, (found, base) => `${base}^{${upright(bare(found[1]))}}`],
  [/^_(\{[^{}]*\}|\d+|\S)/, null, (found, base) => `${base}_{${upright(bare(found[1]))}}`],
  [/^\d+(?:\.\d+)?|^[xn](?=[+-]?(?:\s|$))/, true, (found) => `_{${found[0]}}`],
  [/^[+-]+(?=[\s)\]},;]|$)/, true, (found) => `^{${found[0]}}`],
  [/^-/, true, () => "{-}"],
  [/^=(?!>)/, true, () => "{=}"],
  [/^#/, true, () => "{\\equiv}"],
  [/^(\d+)\/(\d+)/, false, (found) => `\\tfrac{${found[1]}}{${found[2]}}\\,`],
  [/^\d+(?:[.,]\d+)?/, false, (found) => `${found[0]}\\,`],
  [/^\s*[*.]\s*/, null, () => "\\cdot "],
  [/^\\[a-zA-Z]+\s*|^\\./, null, (found) => found[0]],
  [/^[A-Za-z\u0370-\u03ff]+/, null, (found) => upright(found[0])],
  [/^[\s\S]/, null, (found) => found[0]],
];

const bare = (text) => text.replace(/^\{|\}$/g, "").replace(/-/g, "−");

export function chemToTex(source) {
  let made = "";
  let sticks = false; // does an element or a closing bracket stand just before?
  for (let rest = source; rest;) {
    const arrow = ARROW.exec(rest);
    if (arrow && (!sticks || arrow[0] !== "=>")) {
      rest = rest.slice(arrow[0].length);
      const labels = /^((?:\[[^\]]*\]){0,2})/.exec(rest)[0];
      const [above = "", below = ""] = labels.slice(1, -1).split("][");
      made += labels && LABELLED[arrow[0]] ? `${LABELLED[arrow[0]]}${below ? `[${chemToTex(below)}]` : ""}{${chemToTex(above)}}` : `${ARROWS[arrow[0]]} `;
      rest = rest.slice(labels.length);
      sticks = false;
      continue;
    }
    for (const [pattern, after, write] of RULES) {
      const found = after === null || after === sticks ? pattern.exec(rest) : null;
      if (!found) continue;
      made += write(found, sticks || /[}\d]$/.test(made) ? "" : "{}");
      rest = rest.slice(found[0].length);
      sticks = /[A-Za-z\u0370-\u03ff)\]}]$/.test(found[0]) || (sticks && /^[\^_\d]/.test(found[0]));
      break;
    }
  }
  return made;
}
