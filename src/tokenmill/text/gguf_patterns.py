"""How byte-level tokenizers split words, by the names in `tokenizer.ggml.pre`. Owns: the patterns, and which of these
tokenizers normalise, keep a whole word that is a token, or (if a file does not say) put the first token before a text.

Patterns are data of the published tokenizers. Must not know: vocabularies, files.
"""

from __future__ import annotations

from tokenmill.text import build

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_START = r"[^\r\n\p{L}\p{N}]?"
_CASES = f"{_START}{_UPPER}*{_LOWER}+{{0}}|{_START}{_UPPER}+{_LOWER}*{{0}}"
_GPT4O = _CASES.replace("{0}", f"{_ENDING}?") + r"|\p{N}{1,3}|" + _REST
_TEKKEN = _CASES.replace("{0}", "") + r"|\p{N}|" + _REST
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)  # fmt: skip
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_QWEN35 = f"{_ENDING}|" + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = f"{_ENDING}|" + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_EXAONE_MOE = (
    f"{_ENDING}|" + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|"
    + r"\s+(?!\S)|\s+"
)  # fmt: skip
_JAIS2 = build.WORDS_DIGITS_3.removesuffix(r"|\s+(?!\S)|\s+") + "".join(
    rf"|\s{{{run}}}(?!\S)" for run in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
) + r"|\s{1}"  # fmt: skip
_NOT_HAN = "&&[^\\p{Han}]"
_KIMI_CASES = _CASES.replace(_UPPER, _UPPER[:-1] + _NOT_HAN + "]").replace(_LOWER, _LOWER[:-1] + _NOT_HAN + "]")
KIMI = (r"[\p{Han}]+|" + _KIMI_CASES.replace("{0}", f"{_ENDING}?")
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES)  # fmt: skip
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80"
    "-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
"""Letters that have a case."""
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

PATTERNS: dict[str, str | tuple[str, ...] | None] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "smaug-bpe", "dbrx", "falcon3", "falcon-h1", "pixtral",
                     "midm-2.0", "lfm2", "glm4", "chatglm-bpe"), build.WORDS_DIGITS_3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan", "solar-open", "grok-2"),
                    build.WORDS_DIGITS_1),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jina-v2-code", "gigachat", "a.x-4.0", "mellum", "jais",
                     "trillion", "granite-docling", "exaone4"), None),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
                    (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "deepseek-llm": (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _HAN, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "minicpm5": (r"\p{N}{1,3}", build.WORDS_DIGITS_1.replace(r"|\p{N}|", r"|\p{N}+|")),
    "laguna": (r"[^\n]+|[\n]+", build.WORDS_DIGITS_1),
    "viking": (_BLOOM, r"\p{N}"),
    "exaone-moe": _EXAONE_MOE,
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3[2]),
    "jais-2": _JAIS2,
    "kimi-k2": KIMI,
    "qwen35": _QWEN35,
    "seed-coder": _SEED,
    "tekken": _TEKKEN,
    "default": _DEFAULT,
}  # fmt: skip
"""Patterns by name. None: GPT-2's own pattern. Several patterns split one after the other."""
REFUSED = {
    **dict.fromkeys(("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v5-nano", "roberta-bpe",
                     "modern-bert", "f2llmv2", "granite-embed-multi-97m", "granite-embed-multi-311m", "whitespace"),
                    "models of embeddings have it, which are not run here"),
    **dict.fromkeys(("chameleon", "superbpe", "youtu", "spark2_5", "hy_v4", "sarvam-moe", "ufakzeka",
                     "talkie"), "no architecture whose GGUF files are read here has it"),
}  # fmt: skip
"""Further names that the format's usual reader knows, and why they are not read here."""
WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                         "tekken", "gpt-4o", "llama4", "minicpm5"})  # fmt: skip
COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35"})
"""Tokenizers that normalise to NFC before they split."""
FRAMED = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                    "tekken"})  # fmt: skip
"""Tokenizers that put the first token before a text when the file does not say."""
