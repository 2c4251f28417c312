// TeX's words. Owns: which character, operator or function a command stands for. Knows nothing of layout.
const table = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => [pair.slice(0, pair.indexOf("=")), pair.slice(pair.indexOf("=") + 1)]));

export const LETTERS = table(`
alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ
omicron=ο pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω
ell=ℓ hbar=ℏ imath=ı jmath=ȷ wp=℘ aleph=ℵ beth=ℶ partial=∂ nabla=∇ infty=∞ emptyset=∅ varnothing=∅ Re=ℜ Im=ℑ complement=∁
varkappa=ϰ digamma=ϝ eth=ð hslash=ℏ Bbbk=𝕜`);

// Upright: capital Greek, and signs that are no variables.
export const UPRIGHT = table(`
Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
top=⊤ bot=⊥ angle=∠ triangle=△ square=□ Box=□ blacksquare=■ diamond=⋄ Diamond=◇ clubsuit=♣ diamondsuit=♦ heartsuit=♥ spadesuit=♠
flat=♭ natural=♮ sharp=♯ checkmark=✓ dagger=† ddagger=‡ S=§ P=¶ copyright=© pounds=£ degree=° prime=′ backprime=‵ bigstar=★ bigcirc=◯ lozenge=◊ blacktriangle=▲ triangledown=▽
measuredangle=∡ exists=∃ nexists=∄ forall=∀ dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ dotsc=… dotsb=⋯ dotsm=⋯ dotsi=⋯ textdegree=°`);

export const OPERATORS = table(`
pm=± mp=∓ times=× div=÷ cdot=⋅ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ oslash=⊘ odot=⊙ wedge=∧ land=∧ vee=∨ lor=∨
cap=∩ cup=∪ uplus=⊎ sqcap=⊓ sqcup=⊔ setminus=∖ smallsetminus=∖ wr=≀ amalg=⨿ dotplus=∔ ltimes=⋉ rtimes=⋊ bowtie=⋈ neg=¬ lnot=¬
leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠ equiv=≡ sim=∼ simeq=≃ approx=≈ cong=≅ propto=∝ ll=≪ gg=≫ prec=≺ succ=≻ preceq=⪯ succeq=⪰ asymp=≍ doteq=≐
subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ subsetneq=⊊ supsetneq=⊋ sqsubseteq=⊑ sqsupseteq=⊒ in=∈ ni=∋ notin=∉ mid=∣ nmid=∤ parallel=∥ nparallel=∦ perp=⟂
vdash=⊢ dashv=⊣ models=⊨ vDash=⊨ Vdash=⊩ lt=< gt=> leqslant=⩽ geqslant=⩾ lesssim=≲ gtrsim=≳ lessgtr=≶ triangleq=≜ coloneqq=≔ trianglelefteq=⊴ trianglerighteq=⊵ triangleleft=◁ triangleright=▷
to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹ impliedby=⟸ iff=⟺ mapsto=↦ longmapsto=⟼
longrightarrow=⟶ longleftarrow=⟵ longleftrightarrow=⟷ Longrightarrow=⟹ Longleftarrow=⟸ Longleftrightarrow=⟺ uparrow=↑ downarrow=↓ updownarrow=↕ Uparrow=⇑ Downarrow=⇓ Updownarrow=⇕
nearrow=↗ searrow=↘ swarrow=↙ nwarrow=↖ rightleftarrows=⇄ leftrightarrows=⇆ rightrightarrows=⇉ twoheadrightarrow=↠ nrightarrow=↛ nRightarrow=⇏ nleq=≰ ngeq=≱ nsubseteq=⊈ hookrightarrow=↪ hookleftarrow=↩ rightharpoonup=⇀ rightharpoondown=⇁ leftharpoonup=↼ leftharpoondown=↽ rightleftharpoons=⇌ leadsto=⇝ rightsquigarrow=⇝
therefore=∴ because=∵ colon=: ldotp=. cdotp=· lbrace={ rbrace=} lbrack=[ rbrack=] langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ vert=| lvert=| rvert=| Vert=‖ lVert=‖ rVert=‖ backslash=\\ surd=√ lgroup=⟮ rgroup=⟯ lparen=( rparen=) slash=/`);

// Large operators; those of sums take their limits above and below when displayed.
export const SUMS = table(`
sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigvee=⋁ bigwedge=⋀ bigoplus=⨁ bigotimes=⨂ bigodot=⨀ biguplus=⨄ bigsqcup=⨆`);
export const INTEGRALS = table("int=∫ iint=∬ iiint=∭ oint=∮ oiint=∯ smallint=∫");

const words = (text) => new Set(text.split(" "));
export const FUNCTIONS = words("arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan tanh sgn arccot arcsec Tr tr rank diag softmax");
export const LIMITS = words("lim liminf limsup max min sup inf det gcd Pr argmax argmin lcm plim");
export const SPOKEN = { liminf: "lim inf", limsup: "lim sup", argmax: "arg max", argmin: "arg min" };

export const ACCENTS = table(`
hat=^ widehat=ˆ check=ˇ tilde=~ widetilde=˜ acute=´ grave=\` dot=˙ ddot=¨ dddot=⃛ breve=˘ bar=¯ vec=→ mathring=˚ overrightarrow=→ overleftarrow=← overleftrightarrow=↔
overbrace=⏞ overparen=⏜ overbracket=⎴`);
export const WIDE = words("widehat widetilde overrightarrow overleftarrow overleftrightarrow overbrace overparen overbracket");
export const BELOW = table("underbrace=⏟ underrightarrow=→ underleftarrow=← underparen=⏝ underbracket=⎵ underbar=_");

export const SPACES = { ",": "0.167em", ":": "0.222em", ">": "0.222em", ";": "0.278em", "!": "-0.167em", " ": "0.25em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.167em", medspace: "0.222em", thickspace: "0.278em", negthinspace: "-0.167em", "~": "0.25em" };

// Alphabets of Unicode: where A, a and 0 begin, and the letters that stand elsewhere.
const plane = (upper, lower, digit = 0, other = {}) => ({ upper, lower, digit, other });
export const ALPHABETS = {
  mathbf: plane(0x1d400, 0x1d41a, 0x1d7ce),
  mathit: plane(0x1d434, 0x1d44e, 0, { h: "ℎ" }),
  boldsymbol: plane(0x1d468, 0x1d482, 0x1d7ce),
  mathbb: plane(0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }),
  mathcal: plane(0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }),
  mathfrak: plane(0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }),
  mathsf: plane(0x1d5a0, 0x1d5ba, 0x1d7e2),
  mathtt: plane(0x1d670, 0x1d68a, 0x1d7f6),
};
Object.assign(ALPHABETS, { mathscr: ALPHABETS.mathcal, bm: ALPHABETS.boldsymbol, pmb: ALPHABETS.boldsymbol, bold: ALPHABETS.mathbf, Bbb: ALPHABETS.mathbb });

export function inAlphabet(name, letter) {
  if (!ALPHABETS[name]) return letter; // upright
  const { upper, lower, digit, other } = ALPHABETS[name];
  if (other[letter]) return other[letter];
  const code = letter.codePointAt(0);
  if (code >= 65 && code <= 90) return String.fromCodePoint(upper + code - 65);
  if (code >= 97 && code <= 122) return String.fromCodePoint(lower + code - 97);
  if (code >= 48 && code <= 57 && digit) return String.fromCodePoint(digit + code - 48);
  return letter;
}
