"""Strict parsing of YAML and JSON files into dataclasses and pydantic models.

An error is one line: the path of the key, what is wrong, and what to give instead. The remedy is derived from the
type's JSON schema, so the schema and the message cannot differ.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from motet.errors import UserError, closest, one_line

T = TypeVar("T")
Key = str | int
Schema = Mapping[str, Any]

MAX_YAML_BYTES = 4 * 2**20
"""Largest YAML file that is read."""
MAX_YAML_NODES = 200_000
"""Most values of a YAML file, where aliases count as often as they stand."""
MAX_YAML_DEPTH = 50

UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's error types for a model and for a dataclass. Reported first, because a misspelt key is also missing."""


def read_yaml(path: str | Path, kind: type[BaseModel], name: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file. Raises `UserError`.

    `kind`, `name`: the schema of the file and what to call it, for messages."""
    try:
        with Path(path).open("rb") as file:  # Never more than the limit: it may be a device without an end.
            content = file.read(MAX_YAML_BYTES + 1)
        text = content[:MAX_YAML_BYTES].decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a {name}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not a text file; give the path of a {name}") from None
    if len(content) > MAX_YAML_BYTES:
        raise UserError(f"{path}: is larger than {MAX_YAML_BYTES // 2**20} MiB; give the path of a {name}")
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a mapping; a {name} has the keys {', '.join(kind.model_fields)}")
    return values


def parse_strictly(kind: type[T], json_text: str, what: str) -> T:
    """Parses `json_text` into a `kind` (a dataclass or a pydantic model) without conversions or unknown keys.

    Raises `UserError`, whose message begins with `what`.
    """
    try:
        values = json.loads(json_text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what}: is not JSON: {error}") from None
    adapter: TypeAdapter[T] = _adapter(cast(Any, kind))
    try:
        return adapter.validate_json(json_text, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        problem = min(problems, key=lambda p: p["type"] not in UNKNOWN_KEY)
        line = _explain(problem, values, _schema(cast(Any, kind))).removeprefix(f"{what}: ")
        raise UserError(f"{what}: {line}".replace("\n", " ")) from None


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, values that are not of their tags, and documents that grow without
    limit, and reads 1e-3 as a number, as YAML 1.2 does."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_YAML_DEPTH + 1:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call, unused-ignore]
            raise yaml.composer.ComposerError(None, None, f"values are nested more than {MAX_YAML_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _num_nodes(node, {}, 0)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)  # type: ignore[no-untyped-call, unused-ignore]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            tag = node.tag.rpartition(":")[2]
            told = f"{str(node.value)[:40]!r} is no {tag} ({type(error).__name__})"
            raise yaml.constructor.ConstructorError(None, None, told, node.start_mark) from None

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)  # type: ignore[no-untyped-call, unused-ignore]
        if isinstance(value, str) and (unfit := re.search(r"[\0\ud800-\udfff]", value)):
            told = f"a text holds U+{ord(unfit[0]):04X}, which no path and no file of text may hold"
            raise yaml.constructor.ConstructorError(None, None, told, node.start_mark)
        return value


def _num_nodes(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """Returns the number of values below a node. Raises `ConstructorError` beyond the limits, and for a value that
    contains itself."""

    def refuse(why: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)

    if depth > MAX_YAML_DEPTH:
        refuse(f"values are nested more than {MAX_YAML_DEPTH} deep")
    if id(node) not in counted:
        counted[id(node)] = 0  # Not known yet: a value that finds it is inside of it.
        below: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            below = node.value
        elif isinstance(node, yaml.MappingNode):
            below = [inner for pair in node.value for inner in pair]
        counted[id(node)] = 1 + sum(_num_nodes(inner, counted, depth + 1) for inner in below)
    if counted[id(node)] == 0:
        refuse("a value contains itself")
    if counted[id(node)] > MAX_YAML_NODES:
        refuse(f"more than {MAX_YAML_NODES} values")
    return counted[id(node)]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
        if key in mapping:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str, what: str) -> Any:
    """Parses YAML. Raises `UserError`, whose message begins with `what` and names line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{what}: {where}{error.problem or error.context}; correct the YAML") from None
    except yaml.YAMLError as error:
        raise UserError(f"{what}: is not YAML: {one_line(error)}") from None
    except RecursionError:
        raise UserError(f"{what}: values are nested more than {MAX_YAML_DEPTH} deep; correct the YAML") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    _forbid_unknown_keys(kind)
    return TypeAdapter(kind)


@cache
def _schema(kind: Any) -> Schema:
    return _adapter(kind).json_schema()


def _forbid_unknown_keys(kind: Any) -> None:
    """Configures a dataclass and those in its fields; by default pydantic ignores unknown keys of dataclasses."""
    if is_dataclass(kind) and isinstance(kind, type) and "__pydantic_config__" not in vars(kind):
        kind.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
        for hint in get_type_hints(kind).values():
            _forbid_unknown_keys(hint)
    for argument in get_args(kind):
        _forbid_unknown_keys(argument)


def _explain(problem: Mapping[str, Any], values: Any, schema: Schema) -> str:
    """Formats a pydantic error as `key.path: what is wrong; what to give instead`."""
    keys = _real_path(problem["loc"], values, problem["type"])
    where = _written(keys)
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        # The message of a validator of several keys begins with the key that is wrong.
        return f"{where}{'.' if _begins_with_key(message) else ': '}{message}" if where else message
    expected = _schemas_at(schema, values, keys)
    if problem["type"] in UNKNOWN_KEY:
        known = _properties(_schemas_at(schema, values, keys[:-1]))
        return f"{where}: is not a known key; {closest(str(keys[-1]), known, 'known are')}"
    if problem["type"] == "missing":
        return f"{where}: is missing; give {_describe(expected, schema)}"
    if problem["type"].startswith("union_tag"):
        key = problem["ctx"]["discriminator"].strip("'")
        tags = problem["ctx"].get("expected_tags")
        if tags is None:
            choices = [c["const"] for s in _schemas_at(schema, values, keys) for c in [s["properties"][key]]]
            return f"{where}.{key}: is missing; give one of {', '.join(choices)}"
        choices = [tag.strip("'") for tag in tags.split(", ")]
        return f"{where}.{key}: is {problem['ctx']['tag']!r}; {closest(problem['ctx']['tag'], choices, 'give one of')}"
    where = where or "the whole"
    given = json.dumps(problem["input"], default=str)
    given = given if len(given) <= 60 else given[:57] + "..."
    choices = [str(choice) for s in expected for choice in s.get("enum", ())]
    if choices and isinstance(problem["input"], str):
        choices += ["null" for s in expected if s.get("type") == "null"]
        if len(choices) == 2:  # Do not suggest the nearest: gpu is not a misspelling of cpu.
            return f"{where}: is {given}; give one of {', '.join(choices)}"
        return f"{where}: is {given}; {closest(problem['input'], choices, 'give one of')}"
    return f"{where}: is {given}; give {_describe(expected, schema)}"


def _begins_with_key(message: str) -> bool:
    return message.partition(": ")[0].replace(".", "").replace("_", "").isalnum() and ": " in message


def _real_path(loc: Iterable[Key], values: Any, kind: str) -> list[Key]:
    """Removes the names of union members, which pydantic adds to the path."""
    keys: list[Key] = []
    loc = list(loc)
    for i, key in enumerate(loc):
        is_last = i == len(loc) - 1
        if isinstance(values, dict) and (key in values or (is_last and kind == "missing")):
            keys.append(key)
            values = values.get(key)
        elif isinstance(values, list) and isinstance(key, int):
            keys.append(key)
            values = values[key] if key < len(values) else None
    return keys


def _written(keys: Iterable[Key]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _alternatives(schema: Schema, root: Schema) -> list[Schema]:
    """The schemas that are allowed, with references and unions resolved."""
    if "$ref" in schema:
        return _alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return [found for member in schema[union] for found in _alternatives(member, root)]
    return [schema]


def _schemas_at(root: Schema, values: Any, keys: Iterable[Key]) -> list[Schema]:
    """The schemas allowed at a path. Of a union of mappings, those whose constants equal the given values."""
    found = _matching(_alternatives(root, root), values)
    for key in keys:
        inner = [_schema_of(schema, key) for schema in found]
        found = [alternative for schema in inner if schema for alternative in _alternatives(schema, root)]
        values = _inner(values, key)
        found = _matching(found, values)
    return found


def _schema_of(schema: Schema, key: Key) -> Schema | None:
    if isinstance(key, int):
        positions = schema.get("prefixItems", [])
        inner = positions[key] if key < len(positions) else schema.get("items")
    else:
        inner = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
    return inner if isinstance(inner, dict) else None


def _inner(values: Any, key: Key) -> Any:
    if isinstance(values, dict):
        return values.get(key)
    return values[key] if isinstance(values, list) and isinstance(key, int) and key < len(values) else None


def _matching(schemas: list[Schema], values: Any) -> list[Schema]:
    if not isinstance(values, dict):
        return schemas
    matching = [
        schema
        for schema in schemas
        if all(
            "const" not in inner or values.get(key) == inner["const"]
            for key, inner in schema.get("properties", {}).items()
        )
    ]
    return matching or schemas


def _properties(schemas: Iterable[Schema]) -> list[str]:
    return list(dict.fromkeys(key for schema in schemas for key in schema.get("properties", {})))


def _describe(schemas: Iterable[Schema], root: Schema) -> str:
    return " or ".join(dict.fromkeys(_describe_one(schema, root) for schema in schemas)) or "something else"


def _describe_one(schema: Schema, root: Schema) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(str(choice) for choice in schema['enum'])}"
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items")
        if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])}"
        size = f" of at least {schema['minItems']}" if "minItems" in schema else ""
        return f"a list{size}" + (f", each entry {_describe(_alternatives(items, root), root)}" if items else "")
    if kind == "object":
        keys = _properties([schema])
        return f"a mapping with the keys {', '.join(keys)}" if keys else "a mapping"
    words = {"integer": "a whole number", "number": "a number", "string": "a text", "boolean": "true or false"}
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {schema[bound]:.12g}" for bound, word in bounds.items() if bound in schema]
    return " ".join([words.get(str(kind), str(kind)), " and ".join(limits)]).strip()
