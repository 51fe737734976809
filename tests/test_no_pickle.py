"""Nothing that comes from another machine is unpickled, as that runs whatever its sender wants."""

import ast
from collections.abc import Iterator

from checkout import ROOT, text_of

SOURCE = ROOT / "src" / "motet"

ALLOWED = {
    "runtime/launch.py": "the result of this process's own child, in a folder of its own",
    "data/service/workers.py": "answers of this process's own children, in shared memory",
    "models/materialize.py": "a tensor of this process itself, so that torch makes its tables",
    "resilience/process_control.py": "the pipe between an agent and its own children",
}
"""What hands something to or from processes that this one has started."""

MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


LOADERS = {"torch", "joblib", "torch.serialization"}
QUEUES = {"Queue", "SimpleQueue", "JoinableQueue", "Manager"}
"""Of multiprocessing; their `get` unpickles."""


def _is_of_processes(of: ast.expr) -> bool:
    """Whether an attribute is taken of multiprocessing or one of its contexts, and not of the module `queue`."""
    text = ast.unparse(of)
    return (
        "multiprocessing" in text or "get_context" in text or text in ("mp", "context", "FORK", "torch.multiprocessing")
    )


def unpickling(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if MODULES & {alias.name for alias in names}:
                yield f"{node.lineno}: imports pickle or the like"
            case ast.ImportFrom(module=str(module)) if module in MODULES:
                yield f"{node.lineno}: imports from {module}"
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in COLLECTIVES:
                yield f"{node.lineno}: {name}"
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch"))):
                yield f"{node.lineno}: torch.load"
            case ast.ImportFrom(module=str(module), names=names) if module in LOADERS and any(
                alias.name in ("load", "*") for alias in names
            ):
                yield f"{node.lineno}: imports load from {module}"
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("multiprocessing") and any(
                alias.name in QUEUES for alias in names
            ):
                yield f"{node.lineno}: imports a queue between processes"
            case ast.Attribute(attr=name, value=of) if name in QUEUES and _is_of_processes(of):
                yield f"{node.lineno}: a queue between processes"
            case ast.Call(keywords=given) if any(
                each.arg == "allow_pickle" and not (isinstance(each.value, ast.Constant) and each.value.value is False)
                for each in given
            ):
                yield f"{node.lineno}: allow_pickle"
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                yield f"{node.lineno}: receives an object from a connection"


def trusting(tree: ast.AST) -> Iterator[str]:
    """Calls that would run code of a model's folder if stdin says yes."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="from_pretrained", value=of), keywords=given):
                by_name = isinstance(of, ast.Call) or (isinstance(of, ast.Name) and of.id.startswith("Auto"))
                keys = {each.arg: each.value for each in given}
                # Classes of diffusers run no code of a folder, but would unpickle its weights.
                is_diffusion = isinstance(of, ast.Call) and ast.unparse(of.func) == "diffusion_class"
                key, safe = ("use_safetensors", True) if is_diffusion else ("trust_remote_code", False)
                refuses = isinstance(value := keys.get(key), ast.Constant) and value.value is safe
                if by_name and not refuses:
                    yield f"{node.lineno}: from_pretrained without {key}={safe}"


def test_no_code_of_a_models_folder_is_run() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "from_pretrained" in text_of(path)]
    found = {path.name: [*trusting(ast.parse(text_of(path)))] for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert [*trusting(ast.parse("AutoTokenizer.from_pretrained(x)"))]
    assert [*trusting(ast.parse("AutoConfig.from_pretrained(x, trust_remote_code=y)"))]
    assert [*trusting(ast.parse("diffusion_class(x).from_pretrained(y, trust_remote_code=False)"))]
    assert not [*trusting(ast.parse("AutoConfig.from_pretrained(x, trust_remote_code=False)"))]


def test_nothing_from_another_machine_is_unpickled() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): lines
        for path in sorted(SOURCE.rglob("*.py"))
        if any(word in text_of(path) for word in (*MODULES, *COLLECTIVES, *QUEUES, "load", "recv", "allow_pickle"))
        if (lines := list(unpickling(ast.parse(text_of(path)))))
    }
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert found.keys() == ALLOWED.keys(), "the list is no longer than it has to be"


def test_each_form_is_found() -> None:
    forms = (
        "import pickle",
        "from pickle import loads",
        "dist.all_gather_object(a, b)",
        "broadcast_object_list(a)",
        "torch.load(path)",
        "pipe.recv()",
        "from torch import load",
        "from torch import nn, load as read",
        "from torch.serialization import load",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=unsafe)",
        "multiprocessing.Queue().get()",
        "multiprocessing.get_context('fork').SimpleQueue()",
        "context.Manager()",
        "from multiprocessing import Queue",
        "from multiprocessing.queues import SimpleQueue",
    )
    assert all(len(list(unpickling(ast.parse(form)))) == 1 for form in forms)
    for harmless in (
        "connection.recv(4096)",
        "queue.Queue().get()",
        "np.load(path, allow_pickle=False)",
        "json.load(f)",
    ):
        assert not list(unpickling(ast.parse(harmless)))
