"""Packages that are installed with an extra of motet alone, and that transformers imports where it finds them.

torchvision's wheels on the package index are built for CUDA. Beside a torch for CPUs their operators cannot be loaded,
and then neither torchvision nor transformers can be imported, though processors need none of those operators. So their
names are declared before torchvision is imported by whom it may be (`declare_operators_for_cpu`).

torchao warns of each of its libraries that cannot be loaded, as those for GPUs beside a torch for CPUs, and of names of
torch that have become old. Neither is a user's to mend, and every process would say it (`silence_torchao`).
"""

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from motet.errors import UserError

EXTRA = "multimodal"
PACKAGES = {
    "torchvision": "torchvision",
    "av": "av",
    "num2words": "num2words",
    "mistral_common": "mistral-common",
    "timm": "timm",
}
"""Packages that processors of some models need: names on the package index, by the name under which each is
imported."""

OPERATORS = ("nms", "qnms")
"""Operators that torchvision describes when it is imported, even if it could not load them."""


def missing_package(error: Exception) -> UserError | None:
    """Returns the message for a processor that needs one of `PACKAGES`; None if the error has another cause."""
    text = str(error)
    for module, package in PACKAGES.items():
        if (module in text or package in text) and find_spec(module) is None:
            return UserError(f"needs the package {package}; install it with: pip install 'motet[{EXTRA}]'")
    return None


class _Declaring(MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            found = PathFinder.find_spec(fullname)
            if found is not None and found.origin is not None:
                _declare(Path(found.origin).with_name("version.py"))
        return None


def declare_operators_for_cpu() -> None:
    """From now on torchvision can be imported beside a torch for CPUs. Imports nothing itself."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _Declaring())


def silence_torchao() -> None:
    """From now on torchao can be imported without warnings. Imports nothing itself."""
    logging.getLogger("torchao").addHandler(logging.NullHandler())
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant" not in str(record.msg))


def _declare(version: Path) -> None:
    import torch

    if torch.version.cuda is None and version.is_file() and "+cu" in version.read_text(encoding="utf-8"):
        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


_DECLARED: list[object] = []
"""Operators exist as long as the library that declared them."""
