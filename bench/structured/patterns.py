"""Patterns as people write them in schemas, invented from a seed: a family each for names, dates, addresses, files,
text between quotes, and so on. Look-around and the like are left to the tests: here every pattern is regular."""

from __future__ import annotations

import random
from collections.abc import Callable

Rng = random.Random
SPECIAL = list("<>:/|?*,;=&%#@!~`'(){}+.$- ") + [
    "\\\\",
    '"',
    "\\[",
    "\\]",
    "\\^",
    "\\s",
    "\\t",
    "\\n",
    "\\r",
    "\\x00-\\x1f",
]


def negated(rng: Rng, least: int = 1) -> str:
    """A class of all but some characters."""
    chars = rng.sample(SPECIAL, rng.randint(least, 7))
    chars.sort(key=lambda c: c == "-")  # at the end it is no range
    return "[^" + "".join(chars) + "]"


def _count(rng: Rng, most: int = 12) -> str:
    low = rng.randint(0, 3)
    return rng.choice(["+", "*", f"{{{low},{low + rng.randint(1, most)}}}", f"{{{low or 1}}}", f"{{{low},}}"])


def _identifier(rng: Rng) -> str:
    first = rng.choice(["[a-z]", "[A-Za-z_]", "[a-zA-Z]", "[_$a-zA-Z]", "\\w", "[a-zA-Z\\u00c0-\\u024f]"])
    rest = rng.choice(["[a-z0-9]", "[A-Za-z0-9_]", "\\w", "[\\w-]", "[-\\w.]", "[a-z0-9_\\-\\.]", "[\\w$]"])
    return f"^{first}{rest}{_count(rng)}$"


def _joined(rng: Rng) -> str:
    part = rng.choice(["[a-z]+", "[a-z0-9]+", "[A-Z][a-z]+", "\\w+", "[^\\s/]+", "[^.]+", negated(rng) + "+"])
    joint = rng.choice(["-", "_", "\\.", "/", ",", ", ", ":", "::", " ", "\\|"])
    return f"^{part}({joint}{part}){rng.choice(['*', '+', '?', '{1,3}', '{2}'])}$"


def _version(rng: Rng) -> str:
    return rng.choice(
        [
            "^v?\\d+\\.\\d+\\.\\d+$",
            "^(0|[1-9]\\d*)\\.(0|[1-9]\\d*)\\.(0|[1-9]\\d*)(-[0-9A-Za-z.-]+)?(\\+[0-9A-Za-z.-]+)?$",
            "^\\d+(\\.\\d+){0,3}$",
            "^[~^]?\\d+(\\.(\\d+|x|\\*)){0,2}$",
            "^(>=|<=|>|<|==|!=|~=)?\\s*\\d+(\\.\\d+)*$",
            f"^\\d{{1,{rng.randint(1, 4)}}}\\.\\d+(a|b|rc)?\\d*$",
        ]
    )


def _moment(rng: Rng) -> str:
    date = rng.choice(
        ["\\d{4}-\\d{2}-\\d{2}", "[0-9]{4}/(0[1-9]|1[0-2])/([0-2]\\d|3[01])", "\\d{1,2}\\.\\d{1,2}\\.\\d{2,4}"]
    )
    time = rng.choice(["([01]\\d|2[0-3]):[0-5]\\d", "\\d{2}:\\d{2}(:\\d{2})?", "\\d{1,2}(:\\d\\d)? ?(am|pm|AM|PM)"])
    zone = rng.choice(["Z", "(Z|[+-]\\d{2}:?\\d{2})", "( [A-Z]{3})?"])
    return rng.choice([f"^{date}$", f"^{time}$", f"^{date}[T ]{time}{zone}$", "^P(\\d+[YMWD])*(T(\\d+[HMS])+)?$", date])


def _mail(rng: Rng) -> str:
    local = rng.choice(["[^@\\s]+", "[\\w.+-]+", "[a-zA-Z0-9._%+-]+", "[^@]+", '[^<>()\\[\\]\\\\.,;:\\s@"]+', "\\S+"])
    host = rng.choice(["[^@\\s]+\\.[^@\\s]+", "[a-zA-Z0-9.-]+\\.[a-zA-Z]{2,}", "\\w+(\\.\\w+)+", "\\S+", "[^@]+"])
    return rng.choice([f"^{local}@{host}$", f"{local}@{host}", f"^({local}@{host})?$"])


def _file(rng: Rng) -> str:
    name = rng.choice(
        ['[^<>:"/\\\\|?*]+', "[^/\\\\]+", "[\\w. -]+", "[^/\\0]+", '[^\\x00-\\x1f<>:"/\\\\|?*]+', negated(rng) + "+"]
    )
    end = rng.choice(["\\.(jpg|jpeg|png|gif)", "\\.\\w+", "\\.[a-z0-9]{1,5}", "(\\.ya?ml|\\.json)", ""])
    lead = rng.choice(["", "/", "\\./", "(\\.{1,2}/)*", "([A-Za-z]:)?\\\\", "(?:[^/]+/)*"])
    return rng.choice([f"^{lead}{name}{end}$", f"{name}{end}$", f"^{lead}({name}/)*{name}{end}$"])


def _address(rng: Rng) -> str:
    scheme = rng.choice(["https?://", "(https?|ftp)://", "^wss?://", "git@", "(?:http|https)://", "[a-z][a-z0-9+.-]*:"])
    rest = rng.choice(
        ["[^\\s/$.?#].[^\\s]*", "[^\\s]+", "[\\w.-]+(:\\d+)?(/[^?#]*)?(\\?[^#]*)?(#.*)?", '[^"\\s]+', "\\S+"]
    )
    return rng.choice(
        [f"^{scheme.lstrip('^')}{rest}$", f"^{scheme.lstrip('^')}", f"^({scheme.lstrip('^')}{rest}|/.*)$"]
    )


def _quoted(rng: Rng) -> str:
    return rng.choice(
        [
            '^"[^"]*"$',
            "^'[^']*'$",
            '^"([^"\\\\]|\\\\.)*"$',
            "^\\$\\{[^}]+\\}$",
            "^\\{\\{\\s*[^{}]+\\s*\\}\\}$",
            "^<[^<>]+>$",
            "^\\[[^\\]]*\\]\\([^)]*\\)$",
            "^/[^/\\\\]*(\\\\.[^/\\\\]*)*/[gimsuy]*$",
            "^[^\\\\]*$",
            '^[^"]*$',
            '^[^"\\\\]+$',
            "^\\\\\\\\[^\\\\]+\\\\[^\\\\]+$",
            '^([^,"]*|"[^"]*")(,([^,"]*|"[^"]*"))*$',
        ]
    )


def _free(rng: Rng) -> str:
    thing = rng.choice(["\\S", ".", "\\w", "\\W", "\\D", "[^\\n]", "[\\s\\S]", "[^]", negated(rng)])
    return rng.choice(
        [
            f"{thing}",
            f"^{thing}{_count(rng, 40)}$",
            f"^\\s*{thing}+\\s*$",
            f"^{thing}.*{thing}$",
            f"{thing}$",
            f"^{thing}",
            f"^({thing}|\\n)*$",
            f"^[^\\s]{thing}*[^\\s]$",
            f"^{thing}{{0,{rng.randint(5, 80)}}}$",
        ]
    )


def _several(rng: Rng) -> str:
    words = rng.sample(
        ["on", "off", "always", "never", "auto", "a|b", "x\\.y", "\\*", "\\$ref", "c\\+\\+", '"', "\\\\n"], 4
    )
    return rng.choice(
        ["^(" + "|".join(words) + ")$", "^(?:" + "|".join(words) + ")(,\\s*)?$", "|".join(f"^{w}$" for w in words)]
    )


def _unicode(rng: Rng) -> str:
    return rng.choice(
        [
            "^[\\u0020-\\u007e]+$",
            "^[\\u4e00-\\u9fff]{1,8}$",
            "^[^\\u0000-\\u001f\\u007f]*$",
            "^[\\u00a0-\\uffff]+$",
            "^[\\u0000-\\u007f]*$",
            "^[^\\x00-\\x7f]+$",
            "^[\\x20-\\x7e]*$",
            "^[^\\u2028\\u2029]*$",
            "^[\\x09\\x0a\\x0d\\x20-\\x7e]*$",
            "^[^\\cA-\\cZ]*$",
            "^[éèàç\\w ]+$",
            "^[\\b\\f\\v]?[^\\b]$",
            "^[\\x00-\\x1f]?x$",
        ]
    )


def _code(rng: Rng) -> str:
    return rng.choice(
        [
            "^[A-Z]{2,3}$",
            "^#([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$",
            "^[0-9a-f]{7,40}$",
            "^[A-Fa-f0-9]{8}(-[A-Fa-f0-9]{4}){3}-[A-Fa-f0-9]{12}$",
            "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
            "^\\+?[0-9 ()-]{7,20}$",
            "^\\$?\\d{1,3}(,\\d{3})*(\\.\\d{2})?$",
            "^[a-z]{2}(-[A-Z]{2})?$",
            "^[a-z]+/[-+.\\w]+(;\\s*\\w+=[^;]+)*$",
            "^((25[0-5]|2[0-4]\\d|1?\\d?\\d)\\.){3}(25[0-5]|2[0-4]\\d|1?\\d?\\d)(/\\d{1,2})?$",
            "^(@[a-z0-9-~][a-z0-9-._~]*/)?[a-z0-9-~][a-z0-9-._~]*$",
            "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            "^-?(0|[1-9]\\d*)(\\.\\d+)?([eE][+-]?\\d+)?$",
            "^([0-9]{1,2}|\\*)( ([0-9]{1,2}|\\*|\\*/[0-9]+)){4}$",
            "^[^:/ ]+(:[0-9]+)?/[^:@]+(:[^@/]+)?(@sha256:[0-9a-f]{64})?$",
            "^refs/(heads|tags)/[^~^: ?*\\[\\\\]+$",
            "^[A-Z_][A-Z0-9_]*=[^\\r\\n]*$",
        ]
    )


FAMILIES: dict[str, Callable[[Rng], str]] = {
    "identifier": _identifier,
    "joined": _joined,
    "version": _version,
    "moment": _moment,
    "mail": _mail,
    "file": _file,
    "address": _address,
    "quoted": _quoted,
    "free": _free,
    "several": _several,
    "unicode": _unicode,
    "code": _code,
    "negated": lambda rng: f"^{negated(rng)}{_count(rng, 30)}$",
    "two negated": lambda rng: (
        f"^{negated(rng)}{_count(rng)}{rng.choice(['=', ':', '/', '->'])}{negated(rng)}{_count(rng)}$"
    ),
}


def pattern(rng: Rng) -> str:
    """Any of them."""
    return FAMILIES[rng.choice(list(FAMILIES))](rng)
