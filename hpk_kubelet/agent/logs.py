"""Container logs in CRI's format: `2026-01-02T03:04:05.000000006Z stdout F text`.

The writer is the agent's; `select` and `LogFile` also serve the kubelet, for pods that ended.
"""

import errno
import os
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional

MAX_LINE = 16 * 1024  # containerd's max_container_log_line_size
MAX_SIZE = 10 * 1024 * 1024  # kubelet's containerLogMaxSize
MAX_FILES = 5  # kubelet's containerLogMaxFiles
INTERVAL = 10.0  # seconds: kubelet's containerLogMonitorInterval. A burst stays in one file …
MAX_BURST = 10 * MAX_SIZE  # … up to this size, as homes are smaller than a node's disk


def timestamp(nanoseconds: int) -> str:
    """RFC3339 with nine digits, UTC."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return "%04d-%02d-%02dT%02d:%02d:%02d" % time.gmtime(seconds)[:6] + ".%09dZ" % rest


def parse_time(text: str) -> int:
    """Nanoseconds since 1970 of an RFC3339 time; ValueError when it is none."""
    import calendar

    head, digits, zone = text[:19], "", text[19:]
    if zone.startswith("."):
        digits = zone[1:].rstrip("Zz")
        for i, c in enumerate(digits):
            if c in "+-":
                digits = digits[:i]
                break
        zone = zone[1 + len(digits) :]
    seconds = calendar.timegm(time.strptime(head, "%Y-%m-%dT%H:%M:%S"))
    if zone not in ("Z", "z"):
        sign = {"+": 1, "-": -1}[zone[0]] if zone[:1] in ("+", "-") else None
        if sign is None:
            raise ValueError("%r is not a time" % text)
        seconds -= sign * (int(zone[1:3]) * 3600 + int(zone[4:6]) * 60)
    return seconds * 1_000_000_000 + int(digits.ljust(9, "0")[:9] or 0)


class LineCutter:
    """Makes CRI lines of one stream's chunks."""

    def __init__(self, stream: str) -> None:
        self._stream = stream.encode()
        self._rest = b""

    def feed(self, data: bytes, nanoseconds: int) -> List[bytes]:
        head = timestamp(nanoseconds).encode() + b" " + self._stream
        full, partial = head + b" F ", head + b" P "
        *lines, self._rest = (self._rest + data).split(b"\n")
        result = []
        for line in lines:
            while len(line) > MAX_LINE:
                result.append(partial + line[:MAX_LINE] + b"\n")
                line = line[MAX_LINE:]
            result.append(full + line + b"\n")
        while len(self._rest) > MAX_LINE:
            result.append(partial + self._rest[:MAX_LINE] + b"\n")
            self._rest = self._rest[MAX_LINE:]
        return result

    def end(self, nanoseconds: int) -> List[bytes]:
        """The line that has no newline: a partial one, as containerd has it."""
        rest, self._rest = self._rest, b""
        if not rest:
            return []
        return [timestamp(nanoseconds).encode() + b" " + self._stream + b" P " + rest + b"\n"]


class LogWriter:
    """Writes one run's log file, and rotates it."""

    def __init__(self, path: str, complain: Callable[[str], None]) -> None:
        self.path = path
        self._complain = complain
        self._open()
        self._dropped = 0
        self._cutters: Dict[str, LineCutter] = {}

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._opened = time.monotonic()

    def _cutter(self, stream: str) -> LineCutter:
        if stream not in self._cutters:
            self._cutters[stream] = LineCutter(stream)
        return self._cutters[stream]

    def write(self, stream: str, data: bytes) -> None:
        self._append(self._cutter(stream).feed(data, time.time_ns()))

    def end(self, stream: str) -> None:
        self._append(self._cutter(stream).end(time.time_ns()))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _append(self, lines: List[bytes]) -> None:
        if not lines:
            return
        data = b"".join(lines)
        limit = MAX_SIZE if time.monotonic() - self._opened >= INTERVAL else MAX_BURST
        if self._size and self._size + len(data) > limit:
            self._rotate()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE):
                raise
            if not self._dropped:
                self._complain("the log %s can't be written: %s" % (self.path, e.strerror))
            self._dropped += len(lines)
        else:
            if self._dropped:
                self._complain("%d lines of the log %s are lost" % (self._dropped, self.path))
                self._dropped = 0
        self._size += len(data)

    def _rotate(self) -> None:
        os.close(self._fd)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-%09d" % (
            time.time_ns() % 1_000_000_000
        )
        os.rename(self.path, "%s.%s" % (self.path, stamp))
        old = rotated(self.path)
        for path in old[: max(0, len(old) - (MAX_FILES - 1))]:
            os.unlink(path)
        self._open()


def rotated(path: str) -> List[str]:
    """Older parts of a log, oldest first."""
    folder, name = os.path.split(path)
    return sorted(
        os.path.join(folder, entry) for entry in os.listdir(folder) if entry.startswith(name + ".")
    )


class LogOptions(NamedTuple):
    """What `kubectl logs` can ask for; sinceTime in nanoseconds since 1970."""

    tail_lines: Optional[int] = None
    since: Optional[int] = None
    limit_bytes: Optional[int] = None
    timestamps: bool = False


def path_of(logs: str, container: str, run: int) -> str:
    """`logs`: the pod's log directory; `run`: the restart count."""
    return os.path.join(logs, container, "%d.log" % run)


def runs(logs: str, container: str) -> List[int]:
    """The restart counts that have a log, ascending."""
    try:
        names = os.listdir(os.path.join(logs, container))
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".log") and name[:-4].isdigit())


class Selector:
    """Turns CRI lines into what `kubectl logs` prints, until `full`."""

    def __init__(self, options: LogOptions) -> None:
        self._since = None if options.since is None else timestamp(options.since).encode()
        self._left = options.limit_bytes
        self._timestamps = options.timestamps
        self.full = self._left == 0
        self._continued = False

    def line(self, line: bytes) -> bytes:
        """`line` ends in a newline."""
        if self.full:
            return b""
        parts = line.split(b" ", 3)
        if len(parts) < 4:
            return b""
        stamp, _, tag, text = parts
        # our own stamps all have one shape, so that they compare as text
        if self._since is not None and stamp < self._since:
            return b""
        if tag.startswith(b"P"):
            text = text[:-1]
        if self._timestamps and not self._continued:
            text = stamp + b" " + text
        self._continued = tag.startswith(b"P")
        if self._left is not None:
            text = text[: self._left]
            self._left -= len(text)
            self.full = self._left <= 0
        return text


def tail_offset(fd: int, lines: int) -> int:
    """Where the last `lines` lines of a file begin."""
    position = size = os.fstat(fd).st_size
    if lines <= 0:
        return size
    found = 0
    while position > 0:
        start = max(0, position - 65536)
        block = os.pread(fd, position - start, start)
        at = len(block)
        while True:
            at = block.rfind(b"\n", 0, at)
            if at < 0:
                break
            if start + at == size - 1:
                continue  # the end of the last line
            found += 1
            if found == lines:
                return start + at + 1
        position = start
    return 0


class LogFile:
    """Reads a log that may still grow and rotate."""

    def __init__(self, path: str, options: LogOptions, part: Optional[int] = None) -> None:
        """FileNotFoundError if this run wrote none. `part`: inode of the one to begin with, which
        may have been rotated away; the oldest if it is gone."""
        self._path = path
        parts = [path] if part is None else [*rotated(path), path]
        first = next((p for p in parts if os.stat(p).st_ino == part), parts[0])
        self._fd = os.open(first, os.O_RDONLY | os.O_CLOEXEC)
        self._selector = Selector(options)
        self._rest = b""
        if options.tail_lines is not None:
            os.lseek(self._fd, tail_offset(self._fd, options.tail_lines), os.SEEK_SET)

    @property
    def full(self) -> bool:
        return self._selector.full

    def read(self) -> bytes:
        """What is there now (at most some 64 KiB); b"" at the end so far."""
        while not self.full:
            data = os.read(self._fd, 65536)
            if not data:
                if self._moved_on():
                    continue
                return b""
            *lines, self._rest = (self._rest + data).split(b"\n")
            text = b"".join(self._selector.line(line + b"\n") for line in lines)
            if text:
                return text
        return b""

    def _moved_on(self) -> bool:
        """Goes to the next part if this one was rotated away."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        here = os.fstat(self._fd)
        if os.path.samestat(there, here):
            return False
        parts = [*rotated(self._path), self._path]
        following = parts[0]  # if this one is removed by now
        for i, part in enumerate(parts[:-1]):
            if os.path.samestat(os.stat(part), here):
                following = parts[i + 1]
        os.close(self._fd)
        self._fd = os.open(following, os.O_RDONLY | os.O_CLOEXEC)
        return True

    def close(self) -> None:
        os.close(self._fd)


def read_log(logs: str, container: str, run: int, options: LogOptions) -> Iterator[bytes]:
    """All of one run's log as `kubectl logs` prints it; FileNotFoundError if there is none."""
    log = LogFile(path_of(logs, container, run), options)
    try:
        while True:
            text = log.read()
            if not text:
                return
            yield text
    finally:
        log.close()
