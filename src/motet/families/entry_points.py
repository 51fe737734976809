"""Entry points by which installed packages extend motet: encoders (group motet.encoders) and exceptional language
models (group motet.language_models, see docs/adding-a-model-family.md)."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from motet.errors import UserError, one_line


@cache
def loaded(group: str) -> Mapping[str, Any]:
    """The objects of a group's entry points by name. Imports all of them. Raises `UserError` for one that cannot be."""
    found = {}
    for entry in entry_points(group=group):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            raise UserError(
                f"entry point {group} {entry.name}: cannot be imported ({reason}); repair the package"
            ) from None
    return found
