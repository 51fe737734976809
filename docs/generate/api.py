"""Generates docs/api.md from docstrings: the names that `motet` exports, and the interfaces that `papers/` uses."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import motet

ROOT = Path(__file__).parents[2]

INTRODUCTION = """\
# Python interface

This page is generated from docstrings by `make docs`. `import motet` loads neither torch nor transformers; names are
loaded when they are first used, and type checkers see their types.

```python
import motet

prediction = motet.make_plan("examples/tiny.yaml", ["parallel.num_microbatches=2"])
print(prediction)  # as `motet plan` prints it
if prediction.fits and motet.verify("examples/tiny.yaml", plan=prediction.plan)["passed"]:
    result = motet.train("examples/tiny.yaml", plan=prediction.plan)
    print(result["losses"][-1], result["export"])
```

Worker processes are forked: call `profile`, `verify` and `train` before the process computes with torch. The function
that plans is called `make_plan` because `motet.plan` is the module of `Plan`.
"""

GROUPS = {
    "Run files": (
        "profile", "make_plan", "simulate", "verify", "train", "export_checkpoint", "Prediction",
        "Plan", "Timeline", "RunConfig", "load_run_config", "UserError",
    ),
    "Models in memory": (
        "ModalityModule", "EncoderModule", "register_encoder", "MultimodalModule", "ParallelSpec",
        "MultimodalParallelSpec",
        "MultimodalParallelModule", "ContrastiveModule", "CaptionDecoder", "TowerSpec", "ContrastiveParallelModule",
        "ParallelModule",
    ),
}  # fmt: skip

QUOTE = "'"
"""Quote around types that are written as strings."""

INTERFACES = """\
## Interfaces for your own systems

The comparisons with the papers' published numbers in `papers/` use only these names, so your own planner, schedule or
study can be built on them too. No name begins with an underscore (a test checks this).
"""


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def definition(name: str, module: str) -> ast.AST | None:
    """The statement of `module` that defines `name`; None where it is no function or class."""
    tree = parsed(inspect.getsourcefile(importlib.import_module(module)) or "")
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return next((node for node in tree.body if isinstance(node, kinds) and node.name == name), None)


def signature(function: ast.FunctionDef, name: str) -> str:
    arguments = ast.unparse(function.args).removeprefix("self, ").removeprefix("cls, ")
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    arguments = "" if arguments in ("self", "cls") else arguments
    return f"{name}({arguments}){returns}".replace(QUOTE, "")


def paragraphs(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The docstring, its arguments as a list."""
    text = re.sub(r"^Args:$", "Arguments:\n", ast.get_docstring(node) or "", flags=re.M)
    return re.sub(r"^    (\w+): ", r"* `\1`: ", text, flags=re.M)


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Public fields with the strings below them."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if statement.target.id.startswith("_"):
            continue
        is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        said = " ".join(str(after.value.value).split()) if is_string else ""  # type: ignore[union-attr]
        default = "" if statement.value is None else f" = {ast.unparse(statement.value)}"
        shown = f"{statement.target.id}: {ast.unparse(statement.annotation).replace(QUOTE, '')}{default}"
        yield f"* `{shown}`" + (f": {said}" if said else "")


def methods(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if not isinstance(statement, ast.FunctionDef) or statement.name.startswith("_"):
            continue
        is_property = any("property" in ast.unparse(decorator) for decorator in statement.decorator_list)
        returns = f": {ast.unparse(statement.returns)}" if statement.returns else ""
        shown = f"{statement.name}{returns}".replace(QUOTE, "") if is_property else signature(statement, statement.name)
        said = " ".join(paragraphs(statement).split())
        yield f"* `{shown}`" + (f": {said}" if said else "")


def section(name: str) -> str:
    """The section of one exported name."""
    target = getattr(motet, name)
    node = definition(target.__name__, target.__module__)
    if target.__name__ != name:
        return f"### `motet.{name}`\n\nAnother name of `{target.__name__}`.\n"
    if isinstance(node, ast.FunctionDef):
        return f"### `motet.{name}`\n\n```\n{signature(node, name)}\n```\n\n{paragraphs(node)}\n"
    assert isinstance(node, ast.ClassDef), name
    init = next((s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None)
    parts = [f"### `motet.{name}`\n"]
    if init is not None:
        parts.append(f"```\n{signature(init, name).removesuffix(' -> None')}\n```\n")
    docstring = paragraphs(node)
    initial = paragraphs(init) if init is not None else ""
    parts += [f"{text}\n" for text in (docstring, initial) if text]
    listed = [*fields(node), *methods(node)]
    if listed:
        parts.append("\n".join(listed) + "\n")
    return "\n".join(parts)


def interfaces() -> dict[str, set[str]]:
    """By module: the names that files of papers/ import from motet."""
    used: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "papers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "motet":
                used[node.module] |= {alias.name for alias in node.names}
    return used


def interface_rows() -> Iterator[str]:
    for module, names in sorted(interfaces().items()):
        for name in sorted(names):
            target = getattr(importlib.import_module(module), name)
            documented = inspect.isfunction(target) or inspect.isclass(target) or inspect.ismodule(target)
            text = inspect.cleandoc(target.__doc__ or "") if documented else ""
            is_own = not (inspect.isclass(target) and text.startswith(f"{name}("))  # Not a dataclass's signature.
            said = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].removesuffix(".") if is_own else ""
            said = said.replace("|", "\\|")
            yield f"| `{module}.{name}` | {said} |"


def describe(page: str = "") -> str:
    """The whole page, whatever is in it now."""
    names = [name for group in GROUPS.values() for name in group]
    missing = set(motet.__all__) - {"__version__"} ^ set(names)
    assert not missing, f"GROUPS and motet.__all__ differ: {missing}"
    parts = [INTRODUCTION]
    for title, group in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [section(name) for name in group]
    parts += [INTERFACES, "| name | what it is |\n|---|---|\n" + "\n".join(interface_rows()) + "\n"]
    return "\n".join(parts)
