"""Makes text of unknown origin safe to show: no control codes, no tricks with direction, no markup, bounded length."""

from __future__ import annotations

import unicodedata

SHOWN = 4000
"""Characters of one piece of text that are looked at before it is cut."""

_JOINERS = "\u200c\u200d"


def clean(text: str) -> str:
    """The same text with control codes made visible instead; newlines stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text.replace("\r\n", "\n"))


def one_line(text: str, limit: int = SHOWN) -> str:
    """Cleaned, all on one line, at most `limit` characters."""
    return clip(" ".join(clean(text[: 4 * SHOWN]).split()), limit)


def clip(text: str, limit: int) -> str:
    """At most `limit` characters, the last of them an ellipsis where something was left out."""
    return text if len(text) <= limit else text[: max(0, limit - 1)] + "…"


def some_lines(text: str, head: int, tail: int = 0) -> list[str]:
    """The first and the last lines that are not empty, cleaned, and how many were left out between them."""
    rows = [row.rstrip() for row in text.split("\n")]
    rows = [row for row in rows if row]
    left_out = len(rows) - head - tail
    if left_out > 1:
        rows[head : head + left_out] = [f"… {left_out:,} more lines"]
    return [clip(clean(row[:SHOWN]), SHOWN) for row in rows]


def seconds_of(value: float) -> str:
    """A duration as people write it."""
    if value < 0.995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def reward_text(total: float) -> str:
    """A reward without needless digits."""
    if abs(total) >= 1e6 or 0 < abs(total) < 1e-4:
        return f"{total:.3g}"
    whole, _, digits = f"{total:.4f}".partition(".")
    return f"{whole}.{digits.rstrip('0') or '0'}"


def _visible(character: str) -> str:
    if character == "\n":
        return character
    if character == "\t":
        return "    "
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    category = unicodedata.category(character)
    # Controls of the upper half, formats (direction, tags), lone surrogates, line separators.
    if category in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS:
        return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
    return character
