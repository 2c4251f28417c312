"""Dates of certificates. Owns: reading from a PEM file from when and until when its certificates hold.

The standard library tells the dates of a peer's certificate, not of one's own. Whether a certificate is well-formed and
whether a key belongs to it was decided before, by OpenSSL. Must not know: options, logs.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

_BLOCK = re.compile(r"-----BEGIN (?:X509 )?CERTIFICATE-----.+?-----END (?:X509 )?CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _VERSION = 0x17, 0xA0


def validity(path: str) -> list[tuple[datetime, datetime]]:
    """From when and until when each certificate of a file holds; what cannot be read is left out."""
    found = []
    for block in _BLOCK.findall(Path(path).read_text("latin-1")):
        try:
            found.append(_of_certificate(ssl.PEM_cert_to_DER_cert(block.replace("X509 ", ""))))
        except (ValueError, IndexError):
            continue
    return found


def out_of_date(path: str, now: datetime | None = None) -> list[str]:
    """For each certificate that does not hold now, why."""
    now = now or datetime.now(UTC)
    said = []
    for begin, end in validity(path):
        if now < begin:
            said.append(f"not valid before {begin:%Y-%m-%d %H:%M} UTC")
        elif now > end:
            said.append(f"expired at {end:%Y-%m-%d %H:%M} UTC")
    return said


def _of_certificate(der: bytes) -> tuple[datetime, datetime]:
    """Certificate -> what is signed -> version (may be absent), number, algorithm, issuer, validity -> two times."""
    _, at, _ = _value(der, 0)
    _, at, _ = _value(der, at)
    if der[at] == _VERSION:
        at = _value(der, at)[2]
    for _ in range(3):
        at = _value(der, at)[2]
    _, at, _ = _value(der, at)
    begin, at = _time(der, at)
    return begin, _time(der, at)[0]


def _value(der: bytes, at: int) -> tuple[int, int, int]:
    """(tag, where the value begins, where it ends)."""
    size, begin = der[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        size = int.from_bytes(der[at + 2 : begin])
    return der[at], begin, begin + size


def _time(der: bytes, at: int) -> tuple[datetime, int]:
    tag, begin, end = _value(der, at)
    text = der[begin:end].decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year, from 1950 to 2049
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC), end
