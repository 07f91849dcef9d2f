"""Removes a directory that containers wrote to, on any node.

Its files may belong to the user's subordinate ids, which only the user's own namespace may remove.
"""

from . import namespaces
from .journal import note
from .setup import remove_tree


def remove(path: str) -> int:
    """0 once the directory is gone; else why not is on stderr."""
    try:
        namespaces.enter("")
        remove_tree(path)
    except FileNotFoundError:
        return 0
    except (OSError, namespaces.NamespaceError) as e:
        note(str(e))
        return 1
    return 0
