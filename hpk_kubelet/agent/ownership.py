"""What takes the ids of the containers' users, done on any node: removing what they wrote, and
giving files to a group of theirs. Only the user's own namespace, with the subordinate ids, may."""

import os
from typing import List

from . import namespaces
from .journal import note
from .setup import remove_tree


def run_as_root(argv: List[str]) -> int:
    """`--remove DIRECTORY` or `--give DIRECTORY GROUP`: 0 once that is done; else why not is on
    stderr."""
    try:
        namespaces.enter("")
        if argv[0] == "--give":
            give_to_read(argv[1], int(argv[2]))
        elif os.path.lexists(argv[1]):
            remove_tree(argv[1])
    except (OSError, namespaces.NamespaceError) as e:
        note(str(e))
        return 1
    return 0


def give_to_read(path: str, group: int) -> None:
    """All of a directory belongs to the group, which may read it; files are as they were made."""
    for folder, _, files in os.walk(path):
        os.chown(folder, -1, group)
        os.chmod(folder, 0o2755)
        for name in files:
            os.chown(os.path.join(folder, name), -1, group, follow_symlinks=False)
