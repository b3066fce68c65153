"""Parts of the checkout that the wheel does not ship, for the commands that need them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from modeling_domino.provenance import CHECKOUT


def from_checkout(name: str, command: str) -> ModuleType:
    """The module `name` ("hub_cards.cards") of the checkout; only its package becomes importable, not the whole folder.

    Raises:
        ValueError: if this is an installed package, with `command` as what needs a checkout.
    """
    package = name.split(".")[0]
    folder = CHECKOUT / package
    if not (folder / "__init__.py").is_file():
        raise ValueError(
            f"`domino {command}` needs a checkout with {package}/, and this package is installed without one."
        )
    if package not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
    return importlib.import_module(name)
