"""Markdown and formulas as models write them: nothing is lost, turned round or shown as something else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.conftest import using

SHOWN = """return a.map(([text, final]) => { const box = document.createElement('div');
    new m.GrowingMarkdown(box).update(text, final);
    const last = box.querySelector('.growing');
    last.replaceWith(...last.childNodes);
    return box.innerHTML.replace(/ (dir|tabindex|target|rel|class)="[^"]*"/g, '').trim(); });"""


def shown(page: Any, texts: list[str], final: bool = True) -> list[str]:
    found: list[str] = using(page, "markdown", SHOWN, [[text, final] for text in texts])
    return found


WORDS = {
    "~5 or ~$6 (~$7), ~~gone~~": "<p>~5 or ~$6 (~$7), <del>gone</del></p>",
    "**重点：**这是。**“引号”**后面": "<p><strong>重点：</strong>这是。<strong>“引号”</strong>后面</p>",
    "**텍스트(설명)**은 文字**（注）**文字": "<p><strong>텍스트(설명)</strong>은 文字<strong>（注）</strong>文字</p>",
    "2**(3+1)**2 **and** so": "<p>2**(3+1)**2 <strong>and</strong> so</p>",
    "见https://example.org/a，然后": '<p>见<a href="https://example.org/a">https://example.org/a</a>，然后</p>',
    "H<sub>2</sub>O<br>x<sup>2</sup> <kbd>C</kbd> `<br>`": "<p>H<sub>2</sub>O<br>x<sup>2</sup> "
    "<kbd>C</kbd> <code>&lt;br&gt;</code></p>",
    "<b>open and <i onclick=x>y</i>": "<p>&lt;b&gt;open and &lt;i onclick=x&gt;y&lt;/i&gt;</p>",
    "<ul>\n<li>a</li>\n</ul><script>b</script>": "<ul>\n<li>a</li>\n</ul>&lt;script&gt;b&lt;/script&gt;",
    "[![badge](https://i.org/b.svg)](https://e.org)": '<p><a href="https://e.org">badge</a></p>',
    "So $$x$$ it is": '<p>So <span role="group" aria-label="Formula">'
    '<math display="block"><mi>x</mi></math></span> it is</p>',
    "> [!WARNING]\n> Care.": "<blockquote><p><strong>Warning</strong></p>\n<p>Care.</p>\n</blockquote>",
    "One[^1], [^b-z].\n\n[^1]: https://e.org": "<p>One<sup>[1]</sup>, [^b-z].</p>\n"
    '<p><sup>[1]</sup> <a href="https://e.org">https://e.org</a></p>',
    "<details><summary>More *x*</summary>\n\n- a\n\n</details>\n\nb": "<details><summary>More <em>x</em></summary>"
    "<ul>\n<li>a</li>\n</ul>\n</details><p>b</p>",
}


def test_words_mean_what_models_mean(modules: Any) -> None:
    assert dict(zip(WORDS, shown(modules, list(WORDS)), strict=True)) == WORDS


@pytest.mark.parametrize("times", [1, 40])
def test_a_row_loses_no_cell(modules: Any, times: int) -> None:
    """Whether it comes at once or piece by piece, in a table so long that its first rows are final while it grows."""
    rows = ["`x | y` | z", "$|x|$ | abs", "1 | 2 | 3", r"a \| b | c", "one |", "<ul><li>a</li></ul> | L<br>M"]
    text = "| a | b |\n|---|---|\n" + "".join(f"| {row} |\n" for row in rows) * times
    grown, whole = using(
        modules,
        "markdown",
        """return [true, false].map(grows => {
            const box = document.createElement('div');
            const made = new m.GrowingMarkdown(box);
            for (let i = 1; grows && i < a.length; i += 23) { made.cost = 0; made.update(a.slice(0, i)); }
            made.update(a, true);
            return [...box.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent));
        });""",
        text,
    )
    cells = [["x | y", "z"], ["|x|", "abs"], ["1", "2 | 3"], ["a | b", "c"], ["one", ""], ["a", "LM"]]
    assert grown == whole == cells * times


def test_a_mark_means_the_same_whether_it_came_token_by_token_or_at_once(modules: Any) -> None:
    """What stands at the end says what marks before it mean: footnotes and addresses of links."""
    text = "# One\n\nSee[^1] and [there][2].\n\nMore.\n\n[^1]: A note.\n[2]: https://example.org\n"
    grown, whole = using(
        modules,
        "markdown",
        """const box = () => document.createElement('div');
        const [one, two] = [box(), box()];
        const grows = new m.GrowingMarkdown(one);
        for (let i = 1; i <= a.length; i++) { grows.cost = 0; grows.update(a.slice(0, i)); }
        grows.update(a, true);
        new m.GrowingMarkdown(two).update(a, true);
        return [one, two].map(b => b.innerHTML);""",
        text,
    )
    assert grown == whole and "<sup>[1]</sup>" in grown and 'href="https://example.org"' in grown


HALF = {
    "**bold te": "<p><strong>bold te</strong></p>",
    "- a\n- **b": "<ul>\n<li>a</li>\n<li><strong>b</strong></li>\n</ul>",
    "a `code": "<p>a <code>code</code></p>",
    "a **b** and **": "<p>a <strong>b</strong> and</p>",
    "5 ** 3": "<p>5 ** 3</p>",
    "`": "<p>`</p>",
    "f \\( \\frac{a}{b": "<p>f <span><math><mfrac><mi>a</mi><mi>b</mi></mfrac></math></span></p>",
    "<details><summary>Mo": "<details><summary>Mo</summary></details>",
}


def test_what_is_half_written_is_drawn_as_it_will_be(modules: Any) -> None:
    assert dict(zip(HALF, shown(modules, list(HALF), final=False), strict=True)) == HALF
    assert shown(modules, ["**bold te"]) == ["<p>**bold te</p>"]  # at the end it is what was written


def test_a_fold_stays_as_the_reader_left_it(modules: Any) -> None:
    assert using(
        modules,
        "markdown",
        """const box = document.createElement('div');
        const grows = new m.GrowingMarkdown(box);
        grows.update('<details><summary>A</summary>\\n\\nb');
        box.querySelector('details').open = true;
        grows.cost = 0;
        grows.update('<details><summary>A</summary>\\n\\nb c');
        return [box.querySelector('details').open, box.textContent.includes('b c')];""",
    ) == [True, True]


FORMULAS = {
    r"\mathrm{H_2O}": '<msub><mi mathvariant="normal">H</mi><mn>2</mn></msub>',
    r"\underset{n}{\min}": '<munder><mrow><mi>min</mi><mspace width="0.167em"></mspace></mrow><mi>n</mi></munder>',
    r"\operatorname{softmax}(z)": "<mi>softmax</mi><mo",
    r"\xrightarrow{\text{heat}}": "<mrow><mtext>heat</mtext></mrow></mover>",
    r"\begin{array}{c|c}\hline a&b\\\hline\end{array}": '<mtd class="c above below"><mi>a</mi></mtd>'
    '<mtd class="c before above below">',
    r"\overline{AB}": '<mrow class="overline"><mrow><mi>A</mi><mi>B</mi></mrow></mrow>',
    r"\cancel{x}": '<mrow class="cancel"><mi>x</mi></mrow>',
    r"\$5\%": '<mi mathvariant="normal">$</mi><mn>5</mn><mi mathvariant="normal">%</mi>',
    r"\not\Rightarrow": "<mo>⇏</mo>",
    r"\mathsf{A}": '<mi mathvariant="normal" class="sans">A</mi>',
    r"\boldsymbol{\alpha}": '<mi class="bold">α</mi>',
    r"\hspace{1cm}": 'width="2.80em"',
    r"\begin{aligned}[t]a&=b\end{aligned}": '<mtd class="r"><mi>a</mi></mtd>',
}
CHEMISTRY = {
    "2H2 + O2 -> 2H2O": r"2\,\mathrm{H}_{2} + \mathrm{O}_{2} \longrightarrow  2\,\mathrm{H}_{2}\mathrm{O}",
    "SO4^2- + Na+": r"\mathrm{SO}_{4}^{\mathrm{2−}} + \mathrm{Na}^{+}",
    "A <=>[heat] B": r"\mathrm{A} \xrightleftharpoons{\mathrm{heat}} \mathrm{B}",
    "^{14}_{6}C": r"{}^{\mathrm{14}}_{\mathrm{6}}\mathrm{C}",
    "CuSO4*5H2O": r"\mathrm{CuSO}_{4}\cdot 5\,\mathrm{H}_{2}\mathrm{O}",
    "CH3-CH2OH(aq)": r"\mathrm{CH}_{3}{-}\mathrm{CH}_{2}\mathrm{OH}(\mathrm{aq})",
    "[Cu(NH3)4]^2+": r"[\mathrm{Cu}(\mathrm{NH}_{3})_{4}]^{\mathrm{2+}}",
}


def test_formulas_say_what_was_written(modules: Any) -> None:
    made = using(modules, "tex", "return a.map(t => m.texToMathml(t, true));", list(FORMULAS))
    for (source, wanted), text in zip(FORMULAS.items(), made, strict=True):
        assert wanted in text, (source, text)
    assert using(modules, "chem", "return a.map(m.chemToTex);", list(CHEMISTRY)) == list(CHEMISTRY.values())


def test_a_command_takes_one_element(modules: Any) -> None:
    """What a command makes may be an argument of another: two elements in its place would shift those behind it."""
    names = ["min", "sin", "int", "bmod", "pmod", "tag", "ce", "text", "frac", "operatorname", "overline", "cancel"]
    code = """const made = n => m.texToMathml(`\\\\frac{\\\\${n}{a}{b}}{2}`);
        return a.map(n => DOMPurify.sanitize(made(n), { RETURN_DOM_FRAGMENT: true })
        .querySelector('math > mfrac').childElementCount);"""
    assert using(modules, "tex", code, names) == [2] * len(names)


CODE = {
    "sh": ("curl https://e.org/x#y # z", [["c", "# z"]]),
    "rust": ("fn f<'a>(x: &'a str) { 'x' }", [["k", "fn"], ["s", "'x'"]]),
    "sql": ("select A from b -- c", [["k", "select"], ["k", "from"], ["c", "-- c"]]),
    "diff": ("-a\n+b\n c", [["k", "-a"], ["f", "+b"]]),
    "json": ('{"a": "b"}', [["f", '"a"'], ["s", '"b"']]),
    "yaml": ("a: b # c", [["f", "a"], ["c", "# c"]]),
    "css": ("a { color: url(https://e.org); }", [["f", "color"], ["f", "url"]]),
    "html": ("<p>if</p>", [["f", "p"], ["k", "if"], ["f", "p"]]),
    "python": ("a = '''b'''  # c", [["s", "'''b'''"], ["c", "# c"]]),
}


@pytest.mark.parametrize("language", list(CODE))
def test_colours_of_code_are_right(modules: Any, language: str) -> None:
    text, wanted = CODE[language]
    found = using(
        modules,
        "highlight",
        """const code = document.createElement('code');
        code.dataset.language = a[0];
        code.textContent = a[1];
        m.highlight(code);
        return [code.textContent, [...code.children].map(e => [e.className, e.textContent])];""",
        [language, text],
    )
    assert found == [text, wanted]
