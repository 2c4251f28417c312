"""The fonts of the page's formulas, out of STIXMath-Regular.otf (STIX Fonts 1.1.1). Wants fonttools and brotli.

python tools/mathfont.py STIXMath-Regular.otf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fontTools import subset

STATIC = Path(__file__).parents[1] / "src/tokenmill/server/web/static"
ITALIC = {*range(0x1D434, 0x1D468), 0x210E, *range(0x1D6FC, 0x1D71C)}
UPRIGHT_GREEK = set(map(ord, "ΓΔΘΛΞΠΣΥΦΨΩ"))
DENIED = set(map(ord, "≠∉∌≢⊄⊅⊈⊉∄≮≯≰≱≁≇≉∤∦⇏⇎⇍↛↚⊬⊭"))
RARE = set(map(ord, "♠♣♥♦♭♮♯★✓◯◊▲▽◁▷□■△ℵℶ℘∁ðϝϰ§¶†‡£©≀⨿∔⋉⋊⋈⊎⊓⊔⊏⊐⊑⊒⊢⊣⊨⊩⊴⊵≍≐≎≜≔≶≷≲≳⪯⪰⊊⊋⇝⇄⇆⇉↠⇏⇎⇍↛↚⊬⊭≰≱≮≯≁≇≉∤∦⊄⊅⊈⊉∌∄≢"))
LETTERS = {
    *range(0x1D400, 0x1D434),  # bold
    *range(0x1D7CE, 0x1D7D8),
    *range(0x1D49C, 0x1D4B6),  # script
    *range(0x1D538, 0x1D552),  # double-struck
    *RARE,
    *map(ord, "𝕜𝟙ℂℍℕℙℚℝℤℬℰℱℋℐℒℳℛℑℜ"),
}


def words() -> set[int]:
    """Every sign that the renderer knows a word for."""
    found = {ord(sign) for sign in (STATIC / "texwords.js").read_text() if ord(sign) > 0x7E}
    return found - LETTERS - set(range(0x391, 0x3CA)) - set(map(ord, "ℯℊℴ"))


def make(source: str, name: str, signs: set[int]) -> None:
    """A part of the font, as woff2."""
    options = subset.Options()
    options.layout_features, options.name_IDs = [], [0]
    options.drop_tables += ["GPOS", "GSUB", "GDEF", "FFTM"]
    options.flavor, options.hinting, options.desubroutinize = "woff2", False, True
    font = subset.load_font(source, options)
    part = subset.Subsetter(options)
    part.populate(unicodes=signs)
    part.subset(font)
    if "MATH" in font:
        mend_bars(font["MATH"].table.MathVariants)
    subset.save_font(font, str(STATIC / "vendor" / name), options)
    print(name, (STATIC / "vendor" / name).stat().st_size)


def mend_bars(variants: Any) -> None:
    """A bar is made longer by itself. The font says so in a way that browsers refuse: with a part that repeats and has
    a connector on one side alone."""
    for construction in variants.VertGlyphConstruction:
        parts = construction.GlyphAssembly.PartRecords if construction.GlyphAssembly else []
        if len(parts) == 2 and parts[0].glyph == parts[1].glyph:
            for part in parts:
                part.StartConnectorLength = part.EndConnectorLength = part.FullAdvance // 3


def ranges(signs: list[int]) -> str:
    """Of style sheets, for views.css."""
    runs: list[list[int]] = []
    for sign in signs:
        if runs and sign <= runs[-1][1] + 1:
            runs[-1][1] = sign
        else:
            runs.append([sign, sign])
    return ", ".join(f"U+{first:X}" + (f"-{last:X}" if last > first else "") for first, last in runs)


if __name__ == "__main__":
    extra = {0x2C6, 0x2DC, 0x3D1, 0x3D5, 0x3D6, 0x3DD, 0x3F0, 0x3F1, 0x3F5}
    make(
        sys.argv[1], "math.woff2", {*range(0x20, 0x7F)} | ITALIC | (UPRIGHT_GREEK | DENIED | extra | words()) - LETTERS
    )
    make(sys.argv[1], "letters.woff2", LETTERS)
    print("unicode-range of the second:", ranges(sorted(LETTERS)))
