"""Modules that others import and this program hardly ever needs."""

import sys
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            __import__(self.__name__)
        return getattr(sys.modules[self.__name__], name)


def postpone(name: str) -> None:
    """`import name` costs nothing from now on; the module's first use does."""
    if name not in sys.modules:
        sys.modules[name] = _Later(name)
