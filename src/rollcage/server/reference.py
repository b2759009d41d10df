"""The page at /docs: every operation of the OpenAPI document as plain HTML, without any script or other site. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; }
:root { color-scheme: light dark; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8884; border-radius: 4px; }
details { border: 1px solid #8884; border-radius: 4px; margin: .4rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid #8884; padding: .25rem .5rem; text-align: left; vertical-align: top; }
h2 { margin: 1.6rem 0 .4rem; }
.method { display: inline-block; min-width: 4.5rem; font-weight: 600; }
.quiet { opacity: .75; }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
"""What goes with the page: it may load nothing at all."""

METHODS = ("get", "post", "put", "patch", "delete")

Node = dict[str, Any]


def page(document: Node) -> str:
    """The page for an OpenAPI document."""
    info = document.get("info", {})
    title = escape(f"{info.get('title', '')} {info.get('version', '')}".strip())
    return "".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>',
            f"<h1>{title}</h1>{_paragraphs(info.get('description', ''))}",
            '<p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>',
            *_groups(document),
            "</body></html>",
        )
    )


def _groups(document: Node) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for path, operations in document.get("paths", {}).items():
        for method in METHODS:
            if isinstance(operation := operations.get(method), dict):
                tag = next(iter(operation.get("tags") or ["more"]))
                groups.setdefault(tag, []).append(_operation(method, path, operation, document))
    for name, rows in groups.items():
        yield f"<h2>{escape(name)}</h2>{''.join(rows)}"


def _operation(method: str, path: str, operation: Node, document: Node) -> str:
    about = str(operation.get("description") or operation.get("summary") or "")
    first = about.partition("\n")[0]
    inner = [_paragraphs(about)]
    if parameters := operation.get("parameters"):
        rows = (_row(each["name"], each.get("schema", {}), each, where=each.get("in", "")) for each in parameters)
        inner.append(_table("Parameters", rows))
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        inner.append(_shape(f"Body ({kind})", content.get("schema", {}), document))
        if "example" in content:
            inner.append(f"<pre>{escape(_pretty(content['example']))}</pre>")
    inner += _answers(operation.get("responses", {}), document)
    head = f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code> <span class="quiet">'
    return f"<details><summary>{head}{escape(first)}</span></summary>{''.join(inner)}</details>"


def _answers(responses: Node, document: Node) -> Iterator[str]:
    rows = (f"<tr><td>{escape(code)}</td><td>{_text(each)}</td></tr>" for code, each in responses.items())
    yield _table("Answers", rows)
    for code, each in responses.items():
        if code.startswith("2"):
            for kind, content in each.get("content", {}).items():
                yield _shape(f"{code} ({kind})", content.get("schema", {}), document)
                if isinstance(example := content.get("example"), str):
                    yield f"<pre>{escape(example)}</pre>"


def _shape(title: str, schema: Node, document: Node) -> str:
    """The members of an object, one level deep; the document has the rest."""
    schema = _found(schema, document)
    required = set(schema.get("required", ()))
    rows = [_row(name, each, each, must=name in required) for name, each in schema.get("properties", {}).items()]
    return _table(title, rows) if rows else f"<p>{escape(title)}: <code>{escape(_kind(schema))}</code></p>"


def _found(schema: Node, document: Node) -> Node:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found = document.get("components", {}).get("schemas", {}).get(name) if name else schema
    return found if isinstance(found, dict) else {}


def _row(name: str, schema: Node, about: Node, *, where: str = "", must: bool = False) -> str:
    notes = [where, "required" if must or about.get("required") is True else ""]
    if schema.get("default") not in (None, "", [], {}):
        notes.append(f"default {_pretty(schema['default'])}")
    note = ", ".join(note for note in notes if note)
    kind = f"<code>{escape(_kind(schema))}</code>" + (f' <span class="quiet">{escape(note)}</span>' if note else "")
    return f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{_text(about)}</td></tr>"


def _kind(schema: Node) -> str:
    """A type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for join in ("anyOf", "oneOf"):
        if join in schema:
            return " or ".join(dict.fromkeys(_kind(each) for each in schema[join]))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return " or ".join(_pretty(value) for value in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


def _table(title: str, rows: Iterable[str]) -> str:
    return f"<h3>{escape(title)}</h3><table>{''.join(rows)}</table>"


def _text(about: Node) -> str:
    return escape(str(about.get("description", "")))


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{escape(part)}</p>" for part in text.split("\n\n") if part.strip())


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2 if isinstance(value, dict) else None, ensure_ascii=False)
