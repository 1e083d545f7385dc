"""Writes docs/api.md: the REST API from its OpenAPI description, the Python API from its docstrings.

python docs/generate_api.py            # writes
python docs/generate_api.py --check    # exit code 1 if the file is not current
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, cast

from weightwire import transfer
from weightwire.service import client
from weightwire.service.app import create_app
from weightwire.service.settings import Settings

PAGE = Path(__file__).with_name("api.md")
HEAD = f"""# API reference

Written by docs/{Path(__file__).name}; a test keeps it current. [library.md](library.md) shows the Python API at work,
[protocol.md](protocol.md) explains the REST calls in the order in which a source and a target need them.

- [REST](#rest): [routes](#routes), [types](#types)
- Python: [`weightwire.transfer`](#weightwiretransfer), [`weightwire.service.client`](#weightwireserviceclient)

## REST

The service describes itself at `/openapi.json`. Every error is a problem document, see
[protocol.md](protocol.md#errors). *Required* fields have no default; unknown fields are refused.
"""
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
METHODS = ("get", "put", "post", "delete")

Json: TypeAlias = Mapping[str, "Json | list[Json] | str | int | float | bool | None"]


def main(arguments: list[str]) -> int:
    current = "\n".join([HEAD, *_rest(), *_python()]).rstrip() + "\n"
    if "--check" not in arguments:
        PAGE.write_text(current, "utf-8")
    elif not PAGE.exists() or current != PAGE.read_text("utf-8"):
        sys.stderr.write(f"{PAGE.name} is not current: run python docs/{Path(__file__).name}\n")
        return 1
    return 0


# -- REST --


def _rest() -> Iterator[str]:
    document = cast(Json, create_app(Settings()).openapi())
    yield "### Routes\n"
    for path, routes in _members(document, "paths").items():
        for method in METHODS:
            if method in _object(routes):
                yield from _route(method, path, _members(_object(routes), method))
    yield "### Types\n"
    for name, schema in sorted({**_members(_members(document, "components"), "schemas"), **_inlined(document)}.items()):
        # What only describes FastAPI's own errors is never answered here: all errors are problem documents.
        if name not in ("HTTPValidationError", "ValidationError"):
            yield from _type(name, _object(schema))


def _inlined(document: Json) -> dict[str, Json]:
    """The types of bodies that FastAPI does not read itself, and so does not list."""
    routes = [_object(route) for path in _members(document, "paths").values() for route in _object(path).values()]
    bodies = [_media(_members(route, "requestBody")) for route in routes]
    return {str(body["title"]): body for body in bodies if body is not None and "title" in body}


def _route(method: str, path: str, route: Json) -> Iterator[str]:
    yield f"#### {method.upper()} {path}\n"
    yield f"{route['summary']}.\n"
    parameters = [_object(item) for item in cast("list[Json]", route.get("parameters", []))]
    for parameter in parameters:
        if parameter["in"] != "path":
            kind = _kind(_members(parameter, "schema"))
            need = "required" if parameter.get("required") else "optional"
            yield f"- {parameter['in']} `{parameter['name']}`: {kind}, {need}"
    body = _media(_members(route, "requestBody"))
    if body is not None:
        yield f"- body: {_kind(body)}"
    for status, answer in _members(route, "responses").items():
        if status not in ("422", "default"):
            found = _media(_object(answer))
            what = _kind(found) if found else _object(answer)["description"]
            yield f"- answers {status}: {what}"
    yield ""


def _type(name: str, schema: Json) -> Iterator[str]:
    yield f"#### {name}\n"
    if text := schema.get("description"):
        yield " ".join(str(text).split()) + "\n"
    if "enum" in schema:
        yield "One of " + ", ".join(f"`{value}`" for value in cast("list[str]", schema["enum"])) + ".\n"
        return
    required = cast("list[str]", schema.get("required", []))
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    for field, value in _members(schema, "properties").items():
        item = _object(value)
        default = "required" if field in required else f"`{_plain(item.get('default'))}`"
        yield f"| `{field}` | {_kind(item)} | {default} | {item.get('description', '')} |"
    yield ""


def _plain(value: object) -> str:
    """A default as JSON has it."""
    return json.dumps(value)


def _media(holder: Json) -> Json | None:
    """The schema of a body, if it is JSON."""
    content = _members(holder, "content")
    return _members(_object(content["application/json"]), "schema") if "application/json" in content else None


def _kind(schema: Json) -> str:
    """A type in words; types of ours are links."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(_object(item)) for item in cast("list[Json]", schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(_members(schema, 'items'))}"
    if "title" in schema and schema.get("type") == "object" and "properties" in schema:
        return f"[{schema['title']}](#{str(schema['title']).lower()})"
    names = {"string": "text", "object": "object", "null": "null", None: "any"}
    kind = names.get(cast("str | None", schema.get("type")), str(schema.get("type")))
    kind = "timestamp" if schema.get("format") == "date-time" else kind
    return kind + _bounds(schema)


def _bounds(schema: Json) -> str:
    low, high = (cast("float | None", schema.get(key)) for key in ("minimum", "maximum"))
    above = cast("float | None", schema.get("exclusiveMinimum"))
    words = [f"above {above:g}"] if above is not None else [f"from {low:g}"] if low is not None else []
    # The largest integer that anything here takes says nothing.
    words += [f"to {high:g}"] if high is not None and high < 2**62 else []
    return f" ({' '.join(words)})" if words else ""


def _members(value: Json, key: str) -> Json:
    return _object(value.get(key, {}))


def _object(value: object) -> Json:
    assert isinstance(value, Mapping)
    return cast(Json, value)


# -- Python --


def _python() -> Iterator[str]:
    for package in (transfer, client):
        yield f"## `{package.__name__}`\n"
        yield f"{inspect.getdoc(package)}\n" if package is client else f"{_summary(package)}\n"
        for name in package.__all__:
            yield from _exported(name, getattr(package, name))


def _exported(name: str, value: object) -> Iterator[str]:
    yield f"### `{name}`\n"
    if not isinstance(value, type):
        assert isinstance(value, types.FunctionType)
        yield f"```python\n{_signature(value, name)}\n```\n\n{_prose(value)}\n"
        return
    if issubclass(value, enum.Enum):
        members = ", ".join(f"`{member.name}`" for member in value)
        yield f"{_prose(value)}\n\nMembers: {members}.\n"
    elif dataclasses.is_dataclass(value):
        yield f"```python\n{_fields(value)}\n```\n\n{_prose(value)}\n"
    elif issubclass(value, Exception) or value.__init__ is object.__init__:
        yield f"{_prose(value)}\n"
    else:
        yield f"```python\n{_signature(value.__init__, name)}\n```\n\n{_prose(value)}\n"
        if "__init__" in vars(value) and value.__init__.__doc__:
            yield f"{_prose(value.__init__)}\n"
    yield from _methods(value)


def _methods(kind: type) -> Iterator[str]:
    """Public methods and properties, in the order in which they are written."""
    for name, value in vars(kind).items():
        if name.startswith("_") or name in getattr(kind, "__dataclass_fields__", {}):
            continue
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"- `.{name}`: {_summary(value)}".rstrip(": ") + "\n"
        elif isinstance(value, classmethod | staticmethod):
            yield from _method(cast(types.FunctionType, value.__func__), f"{kind.__name__}.{name}")
        elif isinstance(value, types.FunctionType):
            yield from _method(value, f".{name}")


def _method(function: types.FunctionType, name: str) -> Iterator[str]:
    yield f"#### `{name}`\n\n```python\n{_signature(function, name)}\n```\n"
    if function.__doc__:
        yield f"{_prose(function)}\n"


def _signature(function: object, name: str) -> str:
    assert callable(function)
    signature = inspect.signature(function)
    parameters = [item for item in signature.parameters.values() if item.name not in ("self", "cls")]
    parts: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        parts.append(f"{parameter.name}: {_annotation(parameter.annotation)}{default}")
    result = "" if name[0].isupper() and "." not in name else f" -> {_annotation(signature.return_annotation)}"
    if hasattr(function, "__wrapped__"):
        # Made by contextlib.contextmanager from a generator.
        result = result.replace("Iterator[", "AbstractContextManager[")
    return _wrapped(name, parts, result)


def _fields(kind: type) -> str:
    assert dataclasses.is_dataclass(kind)
    parts = ["*"]
    for field in dataclasses.fields(kind):
        default = ""
        if field.default is not dataclasses.MISSING:
            default = f" = {_default(field.default)}"
        elif field.default_factory is not dataclasses.MISSING:
            made = getattr(field.default_factory, "__name__", "<lambda>")
            default = " = …" if made == "<lambda>" else f" = {made}()"
        if field.init:
            parts.append(f"{field.name}: {_annotation(field.type)}{default}")
    return _wrapped(kind.__name__, parts, "")


def _wrapped(name: str, parts: Iterable[str], result: str) -> str:
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 110:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _annotation(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def _default(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return "…" if callable(value) else repr(value)


def _prose(value: object) -> str:
    """A docstring in Markdown: the items of its sections become lists."""
    text: list[str] = []
    section: int | None = None
    for line in (inspect.getdoc(value) or "").splitlines():
        words, indent = line.strip(), len(line) - len(line.lstrip())
        if words in SECTIONS:
            text += ["", f"*{words.removesuffix(':')}*", ""]
            section = -1
            continue
        # The first line of a section says how far its items are indented.
        section = indent if section == -1 else section
        name, colon, rest = words.partition(": ")
        is_item = indent == section and colon and name.replace("_", "a").isalnum()
        text.append(f"- `{name}`: {rest}" if is_item else f"  {words}" if indent and words else words)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(text)).strip()


def _summary(value: object) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
