"""Import the command-line tools, which lie outside the package, as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    """The module tools/NAME.py, which finds its neighbours as it does when it is run as a script."""
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS))


def load_bench(name: str) -> ModuleType:
    """The module tools/bench/NAME.py under its own name, which the ranks that it starts find as well."""
    if (folder := str(TOOLS / "bench")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
