"""PDF files for tests, written object by object."""

from __future__ import annotations

import zlib

CATALOG, PAGES = b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>"
FONT = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"
PAGE = b"<</Type/Page/Parent 2 0 R/Resources<</Font<</F 5 0 R>>/XObject<</X 6 0 R>>>>/Contents 4 0 R>>"


def stream(data: bytes, more: bytes = b"", pack: bool = False) -> bytes:
    if pack:
        data, more = zlib.compress(data), more + b"/Filter/FlateDecode"
    return b"<<%s/Length %d>>stream\n%s\nendstream" % (more, len(data), data)


def objects_of(contents: bytes, font: bytes = FONT, *others: bytes) -> list[bytes]:
    """Numbers 1 to 5: catalog, pages, a page, its operators (a stream), its font F; then others."""
    return [CATALOG, PAGES, PAGE, contents, font, *others]


def file_of(objects: list[bytes], trailer: bytes = b"", table: bool = True) -> bytes:
    """With a cross-reference table, or (without) with one that leads nowhere."""
    out, places = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    if table:
        out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
        out += b"".join(b"%010d 00000 n \n" % at for at in places)
    out += b"trailer\n<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, trailer, start)
    return bytes(out)


def text_file(operators: bytes, font: bytes = FONT, *others: bytes, pack: bool = False) -> bytes:
    """One page that does so."""
    return file_of(objects_of(stream(operators, pack=pack), font, *others))


def packed_file(objects: dict[int, bytes], streams: dict[int, bytes]) -> bytes:
    """Object streams and a cross-reference stream whose rows are differences, as new writers do it."""
    bodies, heads = b"", []
    for number, body in objects.items():
        heads.append(b"%d %d" % (number, len(bodies)))
        bodies += body + b" "
    head = b" ".join(heads) + b" "
    streams = {
        **streams,
        20: stream(head + bodies, b"/Type/ObjStm/N %d/First %d" % (len(objects), len(head)), pack=True),
    }
    out, rows = bytearray(b"%PDF-1.5\n"), {0: (0, 0, 0)}
    for number, body in streams.items():
        rows[number] = (1, len(out), 0)
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    rows |= {number: (2, 20, i) for i, number in enumerate(objects)}
    rows[21] = (1, len(out), 0)
    table, before = b"", bytes(5)
    index = b" ".join(b"%d 1" % number for number in sorted(rows))
    for number in sorted(rows):
        kind, place, third = rows[number]
        row = bytes([kind]) + place.to_bytes(3, "big") + bytes([third])
        table += b"\x02" + bytes((a - b) % 256 for a, b in zip(row, before, strict=True))
        before = row
    more = b"/Type/XRef/W[1 3 1]/Root 1 0 R/Size 22/Index[%s]/DecodeParms<</Predictor 12/Columns 5>>" % index
    out += b"21 0 obj\n%s\nendobj\nstartxref\n%d\n%%%%EOF" % (stream(table, more, pack=True), rows[21][1])
    return bytes(out)


CMAP = b"""/CIDInit /ProcSet findresource begin begincmap
1 begincodespacerange <0000> <FFFF> endcodespacerange
2 beginbfchar <0001> <041C> <0002> <D83CDF3E> endbfchar
2 beginbfrange <0010> <0012> <0061> <0020> <0021> [<00660066> <FB01>] endbfrange
endcmap"""
COMPOSED = [
    b"<</Type/Font/Subtype/Type0/Encoding/Identity-H/DescendantFonts[6 0 R]/ToUnicode 7 0 R>>",
    b"<</Subtype/CIDFontType2/DW 500/W[16[600 600] 32 33 700]>>",
    stream(CMAP, pack=True),
]
