"""PDF files in the page: their text as a file of the question; hostile ones end in a sentence."""

from __future__ import annotations

import base64
import random
import zlib
from typing import Any

import pytest

from tests.web.conftest import Servers, Tabs, using
from tests.web.page_chat_helpers import bodies, ended, say
from tests.web.pdf_files import (
    CATALOG,
    COMPOSED,
    FONT,
    PAGE,
    PAGES,
    file_of,
    objects_of,
    packed_file,
    stream,
    text_file,
)
from tokenmill.server.web.files import STATIC, read_file

READ = """const found = [];
    for (const text of a) {
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        try { found.push((await m.readPdf(bytes)).text); }
        catch (error) { found.push(error.constructor.name + ': ' + error.message); }
    }
    return found;"""


def texts(page: Any, *files: bytes) -> list[str]:
    found: list[str] = using(page, "pdf", READ, [base64.b64encode(file).decode() for file in files])
    return found


def shown(page: Any, operators: bytes, font: bytes = FONT, *others: bytes) -> str:
    """What one page says below its heading."""
    (found,) = texts(page, text_file(operators, font, *others))
    assert found.startswith("## Page 1\n\n"), found
    return found.removeprefix("## Page 1\n\n").removesuffix("\n")


LINES = {
    rb"BT /F 10 Tf (One) Tj 0 -12 Td (two \(three\) \101\n) Tj ET": "One\ntwo (three) A",
    b"BT /F 10 Tf 12 TL (One) Tj T* (two) Tj (three) ' 1 2 (four) \" ET": "One\ntwo\nthree\nfour",
    rb"BT /F 10 Tf (One) Tj 0 -12 TD (two) Tj T* (three) Tj ET": "One\ntwo\nthree",
    rb"BT /F 10 Tf [(W) 80 (ord) -300 (next) -20 (er)] TJ ET": "Word nexter",
    rb"BT /F 10 Tf 1 0 0 1 50 700 Tm (left) Tj 1 0 0 1 90 700 Tm (right) Tj ET": "left\tright",
    rb"BT /F 10 Tf 1 0 0 1 50 700 Tm (a) Tj 1 0 0 1 50 600 Tm (b) Tj ET": "a\n\nb",
    rb"BT /F 10 Tf (x) Tj 4 Ts /F 6 Tf (2) Tj ET": "x2",
    rb"q 0 10 -10 0 0 0 cm BT /F 1 Tf (up) Tj 0 -1.2 Td (next) Tj ET Q": "up\nnext",
    rb"BT /F 10 Tf <48 65 6C6C 6F2> Tj ET": "Hello ",
    b"BT /F 10 Tf (caf\xe9 \x93q\x94 \x80) Tj ET": "café “q” €",
    rb"BI /W 2 /H 2 ID (Tj EIx EI BT /F 10 Tf (after) Tj ET": "after",
    rb"BT % a comment (no) Tj" + b"\n" + rb"/F 10 Tf /Span <</A[1 2]/B(x)>> BDC (yes) Tj EMC ET": "yes",
}


def test_lines_and_spaces_come_from_places(modules: Any) -> None:
    assert {operators: shown(modules, operators) for operators in LINES} == {k: v.strip() for k, v in LINES.items()}


FONTS = {
    b"/Encoding/MacRomanEncoding": "éA“",
    b"/Encoding<</BaseEncoding/WinAnsiEncoding/Differences[65/eacute 142/ff 210/Omega]>>": "ffé\u03a9",
    b"/Encoding<</Differences[65/uni00410042 142/f_i.alt 210/u1F33E]>>": "fiAB\U0001f33e",
    b"/Encoding<</Differences[65/dotlessiacute 142/Scaron 210/quotedblleft]>>": "ŠÍ“".replace("Í", "í"),
}


def test_simple_fonts_say_their_letters(modules: Any) -> None:
    head = b"<</Type/Font/Subtype/Type1/BaseFont/X"
    for font, wanted in FONTS.items():
        assert shown(modules, b"BT /F 10 Tf (\x8eA\xd2) Tj ET", head + font + b">>") == wanted, font
    assert shown(modules, b"BT /F 10 Tf (it's \xae) Tj ET", head + b">>") == "it’s fi"  # the standard encoding


def test_old_fonts_say_their_letters_in_their_program(modules: Any) -> None:
    font = b"<</Type/Font/Subtype/Type1/BaseFont/X/FontDescriptor<</FontFile 6 0 R>>>>"
    program = b"%!PS /Encoding 256 array dup 1 /ffi put dup 2 /dieresis put dup 3 /summationdisplay put"
    made = shown(modules, rb"BT /F 10 Tf (e\001cient M\002oller \003) Tj ET", font, stream(program, pack=True))
    assert made == "efficient Möller ∑"


def test_every_way_of_writing_a_file_is_read(modules: Any) -> None:
    operators = b"BT /F 10 Tf (A mill) Tj ET"
    usual = objects_of(stream(operators, pack=True))
    inner = {1: CATALOG, 2: PAGES, 3: PAGE, 5: FONT}
    eighty = base64.a85encode(zlib.compress(operators)) + b"~>"
    new = packed_file(inner, {4: stream(operators, pack=True)})
    cut = zlib.compress(operators + b" " * 50 + random.Random(1).randbytes(3000))[:-40]
    broken = b"<</Filter/FlateDecode/Length 9>>stream\n" + cut + b"\nendstream"
    late = file_of(objects_of(stream(b"BT /F 10 Tf (Old) Tj ET")))
    second = b"4 0 obj\n" + stream(operators) + b"\nendobj\n"
    late += second + b"xref\n4 1\n%010d 00000 n \ntrailer\n<</Root 1 0 R/Prev %d>>\nstartxref\n%d\n%%%%EOF" % (
        len(late),
        late.rindex(b"xref\n0"),
        len(late) + len(second),
    )
    files = [
        file_of(usual),
        b"junk before\n" + file_of(usual),
        new,
        file_of(objects_of(stream(eighty, b"/Filter[/ASCII85Decode/FlateDecode]"))),
        file_of(
            objects_of(b"<</Length 6 0 R>>stream\r\n" + operators + b"\r\nendstream", FONT, b"%d" % len(operators))
        ),
        file_of(objects_of(b"<</Length 7>>stream\n" + operators + b"\nendstream")),
        file_of(objects_of(broken)),
        late,
        file_of(usual, table=False),
        file_of(usual)[:-60],
        new[: new.rindex(b"startxref")],
        new.replace(b"startxref\n", b"startxref\n1"),
    ]
    found = texts(modules, *files)
    assert [i for i, text in enumerate(found) if not text.startswith("## Page 1\n\nA mill")] == [], found


def test_composed_fonts_say_their_letters_by_a_map(modules: Any) -> None:
    codes = b"BT /F 10 Tf <0001 0002 0010 0011 0012 0020 0021> Tj ET"
    assert shown(modules, codes, *COMPOSED) == "М\U0001f33eabcfffi"
    plain = [COMPOSED[0].replace(b"Identity-H", b"UniGB-UCS2-H").replace(b"/ToUnicode 7 0 R", b""), COMPOSED[1]]
    assert shown(modules, b"BT /F 10 Tf <78E8574A> Tj ET", *plain) == "磨坊"
    plain[0] = plain[0].replace(b"UniGB-UCS2-H", b"GBK-EUC-H")
    assert shown(modules, b"BT /F 10 Tf (A) Tj <C4A5B7BB> Tj ET", *plain) == "A磨坊"


def test_letters_from_right_to_left_are_read_in_order(modules: Any) -> None:
    """Files place them as they look, from left to right; some place whole words from right to left."""
    table = b"1 beginbfrange <05D0> <05EA> <05D0> <0020> <007E> <0020> endbfrange 1 beginbfchar <0001> <FEFB> endbfchar"
    fonts = [COMPOSED[0], b"<</DW 500>>", stream(table)]

    def seen(text: str) -> bytes:
        return b"<" + text.encode("utf-16be").hex().encode() + b"> Tj "

    shalom = "\u05e9\u05dc\u05d5\u05dd"
    left = shalom[::-1]
    cases = {
        seen(left): shalom,
        seen(f"12.5 {left} ({left})"): f"({shalom}) {shalom} 12.5",
        seen(f"They say {left} {left} now"): f"They say {shalom} {shalom} now",
        seen(f"Tel {left} {left} {left}"): f"{shalom} {shalom} {shalom} Tel",
        seen(left) + b"-50 0 Td " + seen(left): f"{shalom} {shalom}",
        seen("\x01" + left): f"{shalom}\u0644\u0627",
    }
    for operators, wanted in cases.items():
        assert shown(modules, b"BT /F 10 Tf " + operators + b"ET", *fonts) == wanted


def test_pages_have_headings_and_forms_are_read(modules: Any) -> None:
    form = stream(b"BT /F 10 Tf (Inner) Tj ET", b"/Subtype/Form/Matrix[1 0 0 1 0 -40]")
    objects = objects_of(stream(b"BT /F 10 Tf (Outer) Tj ET /X Do /X Do"), FONT, form, b"<</Type/Page/Parent 2 0 R>>")
    objects[1] = b"<</Type/Pages/Kids[3 0 R 7 0 R]/Count 2>>"
    assert texts(modules, file_of(objects)) == [
        "## Page 1\n\nOuter\n\nInner\nInner\n\n## Page 2\n\n(no text)\n",
    ]


def test_a_damaged_page_takes_nothing_else_with_it(modules: Any) -> None:
    deep = stream(b"BT /F 10 Tf (Begun) Tj " + b"[" * 80)
    objects = [
        *objects_of(deep),
        b"<<>>",
        PAGE.replace(b"4 0 R", b"8 0 R"),
        stream(b"BT /F 10 Tf (Whole) Tj /None 9 Tf (!) Tj ET"),
    ]
    objects[1] = b"<</Kids[3 0 R 7 0 R]>>"
    first = "## Page 1\n\nBegun\n\n(the rest of this page is damaged)\n"
    assert texts(modules, file_of(objects)) == [f"{first}\n## Page 2\n\nWhole!\n"]


def test_fields_that_were_filled_in_are_read(modules: Any) -> None:
    look = stream(b"/Tx BMC BT /F 9 Tf (Ann Miller) Tj ET EMC", b"/Subtype/Form/Resources<</Font<</F 5 0 R>>>>")
    note = b"<</Subtype/Widget/Rect[90 700 200 712]/AP<</N 7 0 R>>>>"
    objects = objects_of(stream(b"BT /F 10 Tf 1 0 0 1 50 700 Tm (Name:) Tj ET"), FONT, note, look)
    objects[2] = PAGE.replace(b">>/Contents", b">>/Annots[6 0 R]/Contents")
    assert texts(modules, file_of(objects)) == ["## Page 1\n\nName: Ann Miller\n"]


OPERATORS = stream(b"BT /F 10 Tf (A) Tj ET")
KEYS = [f"/K{i}" for i in range(400)]
HOSTILE = {
    "encrypted": file_of(objects_of(OPERATORS), b"/Encrypt 5 0 R"),
    "pictures": text_file(b"q 100 0 0 100 0 0 cm /X Do Q"),
    "no file": b"Hello",
    "empty": b"%PDF-1.4\n",
    "no pages": file_of([CATALOG, b"<</Type/Pages/Kids[]>>"]),
    "its own kid": file_of([CATALOG, b"<</Type/Pages/Kids[2 0 R 2 0 R]>>"]),
    "refers to itself": file_of([CATALOG, b"2 0 R"]),
    "refers in a circle": file_of([CATALOG, b"3 0 R", b"2 0 R"]),
    "bomb": file_of(
        [
            *objects_of(b"<</Length 0>>stream\n\nendstream"),
            stream(zlib.compress(bytes(16 << 20)), b"/Filter/FlateDecode"),
        ]
    ).replace(b"/Contents 4 0 R", b"/Contents[" + b"6 0 R " * 9 + b"]", 1),
    "forms within forms": text_file(b"/X Do " * 9, FONT, stream(b"/X Do " * 3000, b"/Subtype/Form", pack=True)),
    "other filter": text_file(b"").replace(b"/Length 0", b"/Filter/LZWDecode/Length 0"),
    "too many pages": file_of([CATALOG, b"<</Kids[" + b"<<>>" * 2100 + b"]>>"]),
    "too much text": text_file(b"BT /F 10 Tf " + (b"(" + b"word " * 1000 + b") Tj ") * 500 + b"ET", pack=True),
    "a string without end": text_file(b"BT /F 10 Tf (" + bytes(3 << 20)),
    "a list without end": text_file(b"BT /F 10 Tf [" + b"1 " * (1 << 19)),
    "objects without end": b"%PDF-1.4\n" + b"".join(b"%d 0 obj[(\n" % i for i in range(1 << 17)),
    "no letters": text_file(
        b"BT /F 10 Tf <00010002> Tj ET", COMPOSED[0].replace(b"/ToUnicode 7 0 R", b""), COMPOSED[1]
    ),
}
SENTENCES = {
    "encrypted": "is encrypted: save a copy of it without protection, and add that.",
    "pictures": "holds no text, only pictures: run it through text recognition (OCR) first.",
    "no file": "is no PDF file, whatever its name says.",
    "bomb": "takes more than 128 MiB of work to read.",
    "forms within forms": "takes more than 128 MiB of work to read.",
    "objects without end": "takes more than 128 MiB of work to read.",
    "other filter": "is packed in a way that is not read here (LZWDecode).",
    "too many pages": "has more than 2,000 pages.",
    "too much text": "holds more than 2 MiB of text.",
    "no letters": "does not say which letters its signs are, so that only a picture of it could be read.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_said_in_a_sentence(modules: Any, name: str) -> None:
    (found,) = texts(modules, HOSTILE[name])
    assert found == f"Refusal: {SENTENCES.get(name, 'is damaged: it cannot be read.')}"


# A page is read although something in it goes in circles or never ends.
ODD = [
    file_of(objects_of(OPERATORS), b"/Prev 20"),
    file_of(objects_of(OPERATORS.replace(b"/Length 21", b"/Length 4 0 R"))),
    file_of(objects_of(OPERATORS, FONT, b"[" * 5000)),
    file_of(
        objects_of(
            OPERATORS, FONT.replace(b"/Encoding/WinAnsiEncoding", b"/FirstChar -9e9/Widths 5 0 R/Encoding 5 0 R")
        )
    ),
    file_of(
        objects_of(
            OPERATORS,
            FONT.replace(b">>", b"/ToUnicode 6 0 R>>"),
            stream(b"1 beginbfrange <00> <FFFFFFFF> <0000> endbfrange"),
        )
    ),
    file_of(
        objects_of(stream(b"Q Q ET ] >> ) T* Td Tm Tf cm TJ Do /Nothing Do " + b"q " * 5000 + b"BT /F 10 Tf (A) Tj ET"))
    ),
    file_of(objects_of(OPERATORS)).replace(b"0 6\n", b"0 99999999999\n"),
    file_of(objects_of(OPERATORS)).replace(b"0000000", b"9999999"),
    file_of([CATALOG, b"<</Kids[2 0 R 3 0 R 3 0 R 1 0 R]>>", *objects_of(OPERATORS)[2:]]),
]


def test_circles_and_nonsense_have_an_end(modules: Any) -> None:
    found = texts(modules, *ODD)
    assert [i for i, text in enumerate(found) if not text.startswith("## Page 1\n\nA\n")] == [], found


def test_noise_is_read_or_refused(modules: Any) -> None:
    draw = random.Random(11)
    usual = text_file(rb"BT /F 10 Tf [(Some) -300 (words)] TJ T* <41> ' ET", *COMPOSED, pack=True)
    new = packed_file({1: CATALOG, 2: PAGES, 3: PAGE, 5: FONT}, {4: OPERATORS})
    plain = text_file(rb"q BT /F 10 Tf [(Some) -300 (words)] TJ 1 0 0 1 4 5 Tm /X Do ET Q", *COMPOSED)
    files = []
    for _ in range(250):
        file = bytearray(draw.choice([usual, new, plain]))
        for _ in range(draw.randint(1, 12)):
            at = draw.randrange(9, len(file))
            bits = [b"<<", b"[", b"(", b" 0 R", b"9999999999", b"-1", b"/", b"stream", draw.randbytes(2), b"endobj"]
            file[at : at + draw.randint(0, 6)] = draw.choice(bits)
        files.append(bytes(file[: draw.choice([len(file), draw.randrange(len(file))])]))
    for text in texts(modules, *files):
        assert text.startswith(("## Page 1\n", "Refusal: ")), text


def choose(page: Any, *files: tuple[str, bytes]) -> None:
    page.locator("input[type=file]").set_input_files(
        [{"name": name, "mimeType": "application/pdf", "buffer": data} for name, data in files]
    )


def test_a_pdf_is_sent_as_its_text(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url.rsplit("/", 1)[-1]))
    sent = bodies(page)
    page.get_by_role("button", name="Add text or PDF files").wait_for()
    assert "pdf.js" not in fetched
    choose(page, ("mill.pdf", text_file(b"BT /F 10 Tf (Grain and flour) Tj ET", pack=True)))
    page.get_by_role("button", name="Show mill.pdf").click()
    page.get_by_role("dialog").get_by_text("Grain and flour").wait_for()
    page.keyboard.press("Escape")
    modules = {"pdf.js", "pdffile.js", "pdffont.js", "pdfsyntax.js"}
    assert modules <= set(fetched) and sum(len(read_file(STATIC / name).packed) for name in modules) < 14_000
    say(page, "What is in it?")
    ended(page)
    assert (
        sent[0]["messages"][-1]["content"] == "What is in it?\n\nFile mill.pdf:\n```\n## Page 1\n\nGrain and flour\n```"
    )


def test_files_that_are_not_taken_are_all_named(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    choose(page, ("a.pdf", HOSTILE["encrypted"]), ("b.pdf", HOSTILE["pictures"]), ("c.txt", b"\0"))
    said = page.locator(".toast")
    said.get_by_text("a.pdf is encrypted").wait_for()
    assert "b.pdf holds no text" in said.inner_text() and "c.txt is not a text file" in said.inner_text()
    assert page.locator(".files").count() == 0


HOLD = """() => {
    const Real = DecompressionStream;
    const held = new Promise((go) => { window.release = go; });
    const slow = { transform: async (part, to) => { await held; to.enqueue(part); } };
    window.DecompressionStream = class {
        constructor(form) {
            const { writable, readable } = new Real(form);
            Object.assign(this, { writable, readable: readable.pipeThrough(new TransformStream(slow)) });
        }
    };
}"""


def test_reading_may_be_stopped_and_stays_with_its_conversation(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    file = text_file(b"BT /F 10 Tf (Grain) Tj ET", pack=True)
    say(page, "First talk")
    ended(page)
    page.evaluate(HOLD)
    choose(page, ("a.pdf", file))
    page.get_by_text("page 1 of 1").wait_for()
    page.get_by_label("Message", exact=True).fill("Not yet")
    page.keyboard.press("Enter")
    page.get_by_text("a.pdf is still being read.").wait_for()
    assert page.get_by_role("button", name="Send").is_disabled()
    page.get_by_role("button", name="Stop reading a.pdf").click()
    page.evaluate("release()")
    page.get_by_role("button", name="Stop reading a.pdf").wait_for(state="detached")
    assert page.locator(".composer .files").count() == 0
    page.set_viewport_size({"width": 360, "height": 740})
    page.evaluate(HOLD)
    choose(page, (f"{'a long name ' * 9}.pdf", file))
    stop = page.get_by_role("button", name="Stop reading a long")
    box = stop.bounding_box()
    assert box is not None and box["x"] + box["width"] < 350
    stop.click()
    page.evaluate("release()")
    stop.wait_for(state="detached")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.evaluate(HOLD)
    choose(page, ("b.pdf", file))
    page.get_by_text("page 1 of 1").wait_for()
    page.get_by_role("button", name="New chat").first.click()
    page.get_by_text("What shall we talk about?").wait_for()
    page.evaluate("release()")
    page.wait_for_function("() => sessionStorage['tokenmill.drafts'].includes('b.pdf')")
    assert page.locator(".composer .files").count() == 0
    page.get_by_role("button", name="First talk").first.click()
    page.get_by_role("button", name="Show b.pdf").wait_for()
