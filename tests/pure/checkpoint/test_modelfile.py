"""Modelfiles: what is written is read again, and a bad line is told with its number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.checkpoint.modelfile import Modelfile, ModelfileError, read_modelfile, write_modelfile

TEXT = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=40)
LINES = st.one_of(TEXT, st.text(st.sampled_from(['"', "\n", " ", "a", "#", "\t", "{"]), max_size=12))
WORD = st.text(st.sampled_from("abcXYZ019_-./:"), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    st.builds(
        Modelfile,
        base=WORD | LINES.filter(str.strip),
        parameters=st.lists(st.tuples(st.sampled_from(["stop", "temperature"]), LINES.filter(bool)), max_size=3),
        system=st.none() | LINES,
        template=st.none() | LINES,
        adapters=st.lists(WORD, max_size=1),
        license=st.lists(LINES, max_size=2),
        messages=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), LINES.filter(bool)), max_size=3),
    )
)
def test_what_is_written_is_read_again(said: Modelfile) -> None:
    try:
        text = write_modelfile(said)
    except ModelfileError as error:
        assert '"""' in str(error) and any('"""' in each for each in texts(said))
        return
    assert read_modelfile(text) == said
    assert read_modelfile(text.replace("\n", "\r\n")) == said


def texts(said: Modelfile) -> list[str]:
    pairs = [text for _, text in (*said.parameters, *said.messages)]
    return [*pairs, said.base, said.system or "", said.template or "", *said.license, *said.adapters]


def test_the_forms_of_values() -> None:
    said = read_modelfile(
        "# a comment\n\nfrom  ./model.gguf  \nParameter TEMPERATURE 0.5\n"
        'PARAMETER stop "<|end|>"\nPARAMETER stop " x"\n'
        'SYSTEM "one line"\nTEMPLATE """{{ if .System }}\n# no comment\n{{ .System }}{{ end }}\n"""\n'
        'MESSAGE user say "hi"\nMESSAGE assistant """a\n\nb"""\nLICENSE """\nfree\n"""\nLICENSE "more\nof it"\n'
    )
    assert said.base == "./model.gguf"
    assert said.parameters == [("temperature", "0.5"), ("stop", "<|end|>"), ("stop", " x")]
    assert said.system == "one line" and said.template == "{{ if .System }}\n# no comment\n{{ .System }}{{ end }}\n"
    assert said.messages == [("user", 'say "hi"'), ("assistant", "a\n\nb")]
    assert said.license == ["\nfree\n", "more\nof it"]


BAD = [
    ("", "no FROM line"),
    ("# FROM a\n", "no FROM line"),
    ("SYSTEM a", "no FROM line"),
    ("FROM", "line 1: FROM needs a value"),
    ("FROM \t ", "line 1: FROM needs a value"),
    ('FROM ""', "line 1: FROM names nothing"),
    ('FROM """  """', "line 1: FROM names nothing"),
    ("FROM a\nFROM b", "line 2: FROM stands twice"),
    ("FROM a\nSYSTEM a\nSYSTEM b", "line 3: SYSTEM stands twice"),
    ("FROM a\nTEMPLATE a\n\nTEMPLATE b", "line 4: TEMPLATE stands twice"),
    ("FRM a", "line 1: 'FRM' is not an instruction; there are FROM, PARAMETER"),
    ("FROM a\nRUN make", "line 2: 'RUN' is not an instruction"),
    ("FROM a\nhello", "line 2: 'hello' is not an instruction"),
    ("FROM a\n" + "x" * 99, "line 2: '" + "x" * 37),
    ("FROM a\n\u0405YSTEM a", "line 2: '\\u0405YSTEM' is not an instruction"),
    ("FROM a\n\u00a0", "line 2: '\\xa0' is not an instruction"),
    ("FROM a\n\x1c\n", "line 2: '\\x1c' is not an instruction"),
    ("FROM\u2003a", "line 1: 'FROM\\u2003a' is not an instruction"),
    ("FROM a\nPARAMETER", "line 2: PARAMETER needs a value"),
    ("FROM a\nPARAMETER stop", "line 2: PARAMETER needs a name and a value"),
    ('FROM a\nPARAMETER stop ""', "line 2: PARAMETER needs a name and a value"),
    ('FROM a\nPARAMETER stop "x', 'line 2: the text of PARAMETER begins with " and has no " at its end'),
    ("FROM a\nMESSAGE", "line 2: MESSAGE needs a value"),
    ("FROM a\nMESSAGE user", "line 2: MESSAGE needs a role and a text"),
    ("FROM a\nMESSAGE tool x", "line 2: MESSAGE is of system, user, assistant, not of 'tool'"),
    ("FROM a\nMESSAGE User x", "not of 'User'"),
    ('FROM a\nSYSTEM """a\nb\n', 'line 2: the text of SYSTEM begins with """ and has no """ at its end'),
    ('FROM a\n\nSYSTEM """a""" b', 'line 3: the text of SYSTEM begins with """'),
    ('FROM a\nSYSTEM "', 'line 2: the text of SYSTEM begins with "'),
    ("FROM a\nADAPTER", "line 2: ADAPTER needs a value"),
    ('FROM a\nADAPTER " "', "line 2: ADAPTER names nothing"),
    ("FROM a\nLICENSE", "line 2: LICENSE needs a value"),
    ("FROM a\nRENDERER qwen3", "line 2: RENDERER cannot be used: prompts are made by templates"),
    ("FROM a\nPARSER qwen3", "line 2: PARSER cannot be used"),
    ("REQUIRES 0.14\nFROM a", "line 1: REQUIRES cannot be used"),
    ("FROM a\nDRAFT b", "line 2: DRAFT cannot be used: `serve --speculative-config`"),
    ("FROM a\nSYSTEM a\0b", "a NUL character"),
    ("FROM a\nSYSTEM " + "x" * (4 << 20), "more than 4194304 characters"),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_a_bad_file_is_told_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ModelfileError) as told:
        read_modelfile(text)
    sentence = str(told.value)
    assert said in sentence and sentence.endswith(".") and "\n" not in sentence and len(sentence) < 250


def test_what_no_modelfile_can_hold_is_told() -> None:
    for text in ('a"""\nb', "a\rb"):
        with pytest.raises(ModelfileError, match="no Modelfile can hold"):
            write_modelfile(Modelfile("a", system=text))
