"""Gives back the memory that the agent needed only for its start.

Most of what a fresh agent has resident is the code of Python and OpenSSL that was read once: to
import modules, to shake hands. Those pages are clean copies of files, which the kernel maps again
when they are used: what an idle agent does needs few of them.
"""

import asyncio
import contextlib
from typing import Iterable, Iterator, Tuple

from .syscalls import MADV_DONTNEED, madvise

FIRST, AGAIN = 5.0, 60.0  # seconds after the start, and between two times


async def keep_small() -> None:
    """Until cancelled."""
    pause = FIRST
    while True:
        await asyncio.sleep(pause)
        pause = AGAIN
        with contextlib.suppress(OSError):  # no smaps here: then it stays larger
            drop_clean_pages()


def drop_clean_pages() -> None:
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as f:
        for start, end in clean_mappings(f):
            madvise(start, end - start, MADV_DONTNEED)


def clean_mappings(smaps: Iterable[str]) -> Iterator[Tuple[int, int]]:
    """(start, end) of each mapping of a file that can't be written and never was: one with
    relocated pages has anonymous ones."""
    found = None
    for line in smaps:
        words = line.split()
        if not words[0].endswith(":"):
            addresses, permissions = words[:2]
            found = None
            if permissions[1] + permissions[3] == "-p" and "".join(words[5:6]).startswith("/"):
                start, _, end = addresses.partition("-")
                found = int(start, 16), int(end, 16)
        elif words[0] == "Anonymous:" and found and words[1] == "0":
            yield found
