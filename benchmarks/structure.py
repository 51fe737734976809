"""How large is the code, how is it cut into files and functions, and how deep is a training's first matrix product?

The measured tree is data: `python -m benchmarks.structure CHECKOUT` also counts a checkout of another commit, whose
modules may have other paths. Only `motet.cli.main:main` and `examples/tiny.yaml` have to exist there.

Rules of the counts:

* Lines are those of `.py` files, blank ones and comments included. Statements are `ast.stmt` nodes, except expressions
  that are a string (docstrings). "Reproductions of papers" is the folder `papers/` of the checkout, or
  `src/motet/reproduce` where there is no such folder; src/motet always includes the latter.
* Functions are `def` and `async def`, methods and nested ones included. A one-statement function has one statement
  after its docstring; a body of `...` counts too.
* The depth is measured by running `motet train examples/tiny.yaml` in a process whose main thread is profiled
  (`sys.setprofile`) from the call of `main`. The processes of the ranks are forked from it, so rank 0 (the process with
  RANK=0 in its environment) inherits the profiler and the stack. Rank 0 stops at the first operator aten mm, addmm,
  bmm, baddbmm or convolution that it dispatches (the first layer of an encoder is a convolution, which is a matrix
  product of patches). A frame, file or function is ours if its file is below src/motet.
  - Frames: ours on the stack at that moment, from `main` on, comprehensions and module bodies left out.
  - Files, functions, calls: distinct ones of ours that the process of rank 0 has entered since it was forked, and how
    often; the second line also counts comprehensions and generator expressions as functions (each resumption of a
    generator is a call). The line "since main" adds what the launching process entered before the fork.
  - Other threads are not counted. Limit: ranks must be forked, not started anew.
* Functions that compute bytes have a name that is `bytes` or ends in `_bytes` (properties included); packages are the
  folders directly below src/motet.
* Lines that mention towers contain "tower" in any case, outside of folders `config` and `families` of src/motet.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import Report

ROOT = Path(__file__).parents[1]

TRACED_TRAINING = """
import json, os, sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

source, run_file, output, result = sys.argv[1:]
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.")
entered = {}


def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(source):
        key = os.environ.get("RANK") == "0", frame.f_code
        entered[key] = entered.get(key, 0) + 1


class FirstProduct(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if os.environ.get("RANK") == "0" and str(operator).startswith(PRODUCTS):
            sys.setprofile(None)
            stack, frame = [], sys._getframe()
            while frame is not None:
                if frame.f_code.co_filename.startswith(source):
                    stack.append(frame.f_code)
                frame = frame.f_back
            named = lambda code: not code.co_name.startswith("<") or code.co_name == "<lambda>"
            unnamed = lambda code: code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")

            def counts(since_main, with_unnamed):
                calls = {}
                for (in_rank_0, code), number in entered.items():
                    if (since_main or in_rank_0) and (named(code) or (with_unnamed and unnamed(code))):
                        calls[code] = calls.get(code, 0) + number
                return len({code.co_filename for code in calls}), len(calls), sum(calls.values())

            files = {code.co_filename for (in_rank_0, code) in entered if in_rank_0 and named(code)}
            found = {
                "operator": str(operator),
                "files": sorted(name.removeprefix(source) for name in files),
                "stack": [
                    f"{code.co_filename.removeprefix(source)}:{code.co_qualname}"
                    for code in reversed(stack)
                    if named(code)
                ],
                "rank 0": counts(False, False),
                "rank 0, comprehensions included": counts(False, True),
                "since main, comprehensions included": counts(True, True),
            }
            with open(result, "w") as file:
                json.dump(found, file)
            os._exit(0)
        return operator(*arguments, **(keywords or {}))


from motet.cli.main import main

with FirstProduct():
    sys.setprofile(profile)
    main(["train", run_file, "--set", f"train.output={output}"])
"""


@dataclass(frozen=True)
class Size:
    files: int
    lines: int
    statements: int


def size_of(folder: Path) -> Size:
    texts = [path.read_text() for path in python_files(folder)]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    statements = sum(isinstance(node, ast.stmt) and not is_string(node) for node in nodes)
    return Size(len(texts), sum(len(text.splitlines()) for text in texts), statements)


def python_files(folder: Path) -> list[Path]:
    """The files in a folder and those below it; of a file, the file itself."""
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def fullest_folder(folder: Path) -> tuple[str, int]:
    counts = Counter(path.parent.relative_to(folder.parent).as_posix() for path in python_files(folder))
    return counts.most_common(1)[0]


def functions(folder: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in python_files(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path.relative_to(folder), node


def has_one_statement(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return len(function.body) - is_string(function.body[0]) == 1


def computers_of_bytes(folder: Path) -> Counter[str]:
    """By package, how many functions compute bytes."""
    return Counter(
        path.parts[0] if len(path.parts) > 1 else "(top level)"
        for path, node in functions(folder)
        if node.name == "bytes" or node.name.endswith("_bytes")
    )


def tower_lines(folder: Path) -> int:
    return sum(
        "tower" in line.lower()
        for path in python_files(folder)
        if not {"config", "families"} & set(path.relative_to(folder).parts[:-1])
        for line in path.read_text().splitlines()
    )


def first_product(checkout: Path, timeout_s: float) -> dict[str, Any]:
    """Records the frames and files that rank 0 passes before its first matrix product."""
    source = checkout / "src"
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        names = [f"{source / 'motet'}{os.sep}", checkout / "examples" / "tiny.yaml", Path(name) / "run", result]
        environment = {
            **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": "1",
        }
        # The training fails when rank 0 stops; what it left behind is what counts.
        done = subprocess.run(
            [sys.executable, "-c", TRACED_TRAINING, *map(str, names)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if not result.exists():
            raise RuntimeError(f"rank 0 came to no matrix product:\n{done.stderr}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, help="root of a checkout; default: this one")
    parser.add_argument("--report", action="store_true", help="write a report instead of printing one")
    parser.add_argument("--no-training", action="store_true", help="count without running a training")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the training")
    options = parser.parse_args(argv)
    checkout = options.checkout.resolve()
    source = checkout / "src" / "motet"
    if not source.is_dir():
        parser.error(f"{options.checkout} has no folder src/motet; give the root of a checkout")
    papers = checkout / "papers" if (checkout / "papers").is_dir() else source / "reproduce"
    report = Report("structure", "How large the code is, and how it is cut")
    report.add(f"Counted: the checkout at commit {commit_of(checkout)}. The script's docstring has the rules.")
    report.table(
        ("Python below", "files", "lines", "statements"),
        [
            (folder.relative_to(checkout).as_posix(), f"{size.files:,}", f"{size.lines:,}", f"{size.statements:,}")
            for folder in (source, checkout / "tests", papers)
            for size in [size_of(folder)]
        ],
    )
    defined = [node for _, node in functions(source)]
    folder, side_by_side = fullest_folder(source)
    by_package = computers_of_bytes(source)
    shown = [("planner/", by_package["planner"]), ("costs/", by_package["costs"])]
    others = {name: count for name, count in by_package.items() if name not in ("planner", "costs")}
    listed = ", ".join(f"{name} {count}" for name, count in sorted(others.items()))
    rows: list[tuple[str, object]] = [
        ("most .py files in one folder of src/motet", f"{side_by_side} ({folder})"),
        ("functions of src/motet", f"{len(defined):,}"),
        ("one-statement functions", f"{sum(map(has_one_statement, defined)):,}"),
        *((f"functions that compute bytes, {name}", count) for name, count in shown),
        ("functions that compute bytes, others", f"{sum(others.values())} ({listed})"),
        ("lines that mention towers outside of config/ and families/", f"{tower_lines(source):,}"),
    ]
    found: dict[str, Any] = {}
    if not options.no_training:
        found = first_product(checkout, options.timeout)
        rows += [
            ("our frames from `main` to the first matrix product of rank 0", len(found["stack"])),
            *(
                (
                    f"files, functions, calls of ours until then ({name})",
                    ", ".join(f"{count:,}" for count in found[name]),
                )
                for name in found
                if name not in ("operator", "files", "stack")
            ),
        ]
    report.table(("what", "count"), rows)
    report.add("By package:")
    rooms = sorted({path.relative_to(source).parts[0] for path in python_files(source)})
    passed = Counter(Path(name).parts[0] for name in found["files"]) if found else Counter()
    report.table(
        ("package", "files", "lines", "statements", *(("files that rank 0 passes",) if found else ())),
        [
            (room, f"{size.files:,}", f"{size.lines:,}", f"{size.statements:,}", *((passed[room],) if found else ()))
            for room in rooms
            for size in [size_of(source / room)]
        ],
    )
    if found:
        report.add(f"The stack at {found['operator']}:\n\n" + "\n".join(f"    {name}" for name in found["stack"]))
        report.add("The files that rank 0 passes:\n\n" + "\n".join(f"    {name}" for name in found["files"]))
    if options.report:
        report.write()
    else:
        print(report.text())
    return report


if __name__ == "__main__":
    main()
