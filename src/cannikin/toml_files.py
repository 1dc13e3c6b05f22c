"""Reads a TOML file that a person wrote, and says in one line what is wrong with it.

The form of a file is a `msgspec.Struct`: its fields are the keys, those without a default are required, and `limit`
says which values a key may have. The document is compared with the form here rather than by msgspec, because a person
needs the key by its full name, the value as written, the limit, and the nearest known key. Nothing is guessed, and a
key that the form does not have is an error.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from cannikin.errors import ClusterFileError, InvalidInputError
from cannikin.words import escaped

MAX_BYTES = 2**20  # the largest file
_MAX_SHOWN = 64  # characters of a value or a name
_Form = TypeVar("_Form", bound=msgspec.Struct)
_Path = tuple[str | int, ...]  # keys, and positions in arrays
_Misfits = Iterator[tuple[_Path, str]]  # where a document does not have its form, and what is wrong there
# By the type that a form asks for: the types that the document may have there, and the words for them.
_TYPES: dict[type[inspect.Type], tuple[tuple[type, ...], str]] = {
    inspect.FloatType: ((float, int), "a number"),
    inspect.IntType: ((int,), "a whole number"),
    inspect.StrType: ((str,), 'text in quotes, like "a100"'),
    inspect.ListType: ((list,), "an array"),
    inspect.DictType: ((dict,), "a table"),
    inspect.StructType: ((dict,), "a table"),
}


def limit(words: str, allows: Callable[[Any], bool]) -> msgspec.Meta:
    """Return the limit of a key, for the `Annotated` type of a form's field; `words` follow "it must be"."""
    return msgspec.Meta(extra={"words": words, "allows": allows})


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what is refused inside into a `ClusterFileError` of one printable line that begins with the file's name."""
    try:
        yield
    except InvalidInputError as error:
        raise ClusterFileError(escaped(f"{os.fspath(path)}: {error}")) from error


def read_toml(path: str | os.PathLike[str], form: type[_Form], advice: Mapping[str, str]) -> _Form:
    """Read a file of the given form.

    Args:
        path: a TOML file in UTF-8; a byte order mark and CRLF are fine.
        advice: by key, what to write where it is missing or is no table.

    Raises:
        ClusterFileError: the file cannot be read or does not have the form. The message lacks the file's name, which
            `naming` adds.
    """
    document = _parse(_read(path))
    found = _misfits(document, inspect.type_info(form), advice)
    misfits = (f"{key_at(*where, name=_name_at(where, document))} {words}" for where, words in found)
    if not document:
        raise ClusterFileError("is empty: " + "; ".join(misfits))
    for misfit in misfits:
        raise ClusterFileError(misfit)
    try:
        return msgspec.convert(document, form)
    except msgspec.ValidationError as error:  # of a type that `_TYPES` lacks, or a form's own check
        raise ClusterFileError(str(error.__cause__ or error)) from error


def key_at(*path: str | int, name: str | None = None) -> str:
    """Return a key as messages write it, with the name of the table in an array that it belongs to.

    >>> key_at("node", 0, "forward_ms", "fixed", name="a100")
    'node[0].forward_ms.fixed (node "a100")'
    """
    parts = (f"[{part}]" if isinstance(part, int) else "." + (_short(part) or '""') for part in path)
    return "".join(parts).removeprefix(".") + (f' ({path[0]} "{_short(name)}")' if name else "")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "did you mean X? " for the known word most like this one, or nothing where none is.

    >>> nearest("cuont", ("name", "count"))
    'did you mean count? '
    """
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _shown(value: Any) -> str:
    """Return a value as the file has it, cut short."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    return repr(value) if isinstance(value, float) else _short(json.dumps(value, default=str, ensure_ascii=False))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _read(path: str | os.PathLike[str]) -> str:
    """Return the file's text."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise ClusterFileError(f"cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(data) > MAX_BYTES:
        raise ClusterFileError(f"is larger than {MAX_BYTES} bytes, the most that such a file may have")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ClusterFileError(f"is not UTF-8 text: line {line} has byte 0x{data[error.start]:02x}") from error


def _parse(text: str) -> dict[str, Any]:
    """Return the TOML document."""
    try:
        document: dict[str, Any] = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ClusterFileError(f"is not TOML: {error}") from error
    except ValueError as error:  # Python refuses to read an integer of thousands of digits
        line = next((i for i, line in enumerate(text.splitlines(), 1) if re.search(r"[\d_]{4000}", line)), "?")
        raise ClusterFileError(f"line {line} has a number of thousands of digits: no key needs more than 20") from error
    except RecursionError as error:
        raise ClusterFileError("is not TOML that can be read: brackets are nested too deeply") from error
    return document


def _misfits(value: Any, kind: inspect.Type, advice: Mapping[str, str], path: _Path = ()) -> _Misfits:
    """Yield what is wrong with a value and, where it is a table or an array, with everything in it."""
    if isinstance(kind, inspect.UnionType):  # with None, which TOML does not have
        kind = next(option for option in kind.types if not isinstance(option, inspect.NoneType))
    limited: dict[str, Any] = {}
    if isinstance(kind, inspect.Metadata):
        limited, kind = kind.extra or {}, kind.type
    if isinstance(kind, inspect.FloatType) and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    types, words = _TYPES.get(type(kind), ((type(value),), ""))
    if type(value) not in types:
        yield path, f"is {_shown(value)}: {_wanted(kind, words, path, advice)}"
    elif limited and not limited["allows"](value):
        yield path, f"is {_shown(value)}: it must be {limited['words']}"
    elif isinstance(kind, inspect.ListType):
        for position, item in enumerate(value):
            yield from _misfits(item, kind.item_type, advice, (*path, position))
    elif isinstance(kind, inspect.DictType):
        for key, item in value.items():
            yield from _misfits(item, kind.value_type, advice, (*path, key))
    elif isinstance(kind, inspect.StructType):
        yield from _misfits_of_table(value, kind, advice, path)


def _misfits_of_table(
    table: dict[str, Any], kind: inspect.StructType, advice: Mapping[str, str], path: _Path
) -> _Misfits:
    known = [field.name for field in kind.fields]
    for key in table:
        if key not in known:
            yield (*path, key), f"is not a known key: {nearest(key, known)}known here are {', '.join(known)}"
    for field in kind.fields:
        if field.name in table:
            yield from _misfits(table[field.name], field.type, advice, (*path, field.name))
        elif field.required:
            yield (*path, field.name), f"is missing: {advice.get(field.name, 'it is needed')}"


def _wanted(kind: inspect.Type, words: str, path: _Path, advice: Mapping[str, str]) -> str:
    """Return what to write where a value has the wrong type."""
    key = str(path[-1])
    if isinstance(kind, inspect.ListType) and isinstance(kind.item_type, inspect.StructType):
        return f"write [[{key}]], in double brackets, once for each kind of {key}"
    return advice[key] if isinstance(kind, inspect.StructType) and key in advice else f"it must be {words}"


def _name_at(path: _Path, document: dict[str, Any]) -> str | None:
    """Return the name of the array's table that a path leads into, if it has one that can be shown."""
    match path:
        case (str(array), int(position), key, *_) if key != "name":
            name = document[array][position].get("name")
            return name if isinstance(name, str) else None
    return None
