"""What happens between "the container is made" and "the container's program runs".

`start_program` describes it for `launcher.Launcher`; `Outcome` reads what the launcher reported.
The same steps begin a container, an MPI rank and an exec into a running container.
"""

import errno
import os
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from . import syscalls
from .launcher import FATAL, HELLO, IGNORE, PROGRAM_FD, RECORD, REPORT, REPORT_FD, Launcher
from .namespaces import PATH, Mapping

STDIN_FD, STDOUT_FD, STDERR_FD, USERS_FD = 240, 241, 242, 243

_CAPABILITY_NAMES = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG
WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
"""  # in the order of <linux/capability.h>
_DEFAULT_NAMES = """
CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP
NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE
"""  # containerd's
_CAPABILITIES = _CAPABILITY_NAMES.split()
_DEFAULT_CAPABILITIES = _DEFAULT_NAMES.split()

# containerd's pkg/oci/spec.go
_MASKED_FILES = (
    "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
    "/proc/timer_list", "/proc/timer_stats",
)  # fmt: skip
_MASKED_DIRECTORIES = (
    "/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/devices/virtual/powercap", "/sys/firmware",
)  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_KEYCTL_JOIN_SESSION_KEYRING = 1

_TIOCSCTTY, _AT_FDCWD, _O_WRONLY, _SAME = 0x540E, -100, 1, -1
_CAPABILITY_VERSION_3 = 0x20080522

_CHDIR, _USER, _EXEC = 1, 2, 3  # tags of what can fail by the pod's own fault
_NONE = 4  # no candidate could be executed: said last


def allowed_capabilities(security: Dict[str, Any]) -> List[str]:
    """Names without CAP_; drop ALL is applied before the additions, as containerd does."""
    if security["privileged"]:
        return list(_CAPABILITIES)
    add = security.get("capabilities", [])
    drop = security.get("dropCapabilities", [])
    kept = list(_CAPABILITIES) if "ALL" in add else list(_DEFAULT_CAPABILITIES)
    if "ALL" in drop:
        kept = []
    kept += [name for name in add if name != "ALL"]
    dropped = [name for name in drop if name != "ALL"]
    return [name for name in _CAPABILITIES if name in kept and name not in dropped]


def candidates(program: str, path: str) -> List[str]:
    """Where Go's exec.LookPath would look, in order."""
    if "/" in program:
        return [program]
    return [os.path.join(folder or ".", program) for folder in path.split(":")]


def start_program(
    argv: Sequence[str],
    env: Dict[str, str],
    cwd: str,
    security: Dict[str, Any],
    mapping: Mapping,
    *,
    tty: bool,
    fresh: bool,
    mounted: Sequence[str] = (),
    keep_groups: bool = False,
    users_given: bool = False,
) -> bytes:
    """The launcher's executable. The program's standard streams are on STDIN_FD and its two
    followers. `fresh`: the container was just made, with mounts of the pod's at `mounted`; its
    working directory is made as well. `keep_groups`: the user's own supplementary groups stay,
    which files of the node (hostPath) may need. `users_given`: on USERS_FD there is the user
    namespace to become the user in."""
    env = dict(env)
    env.setdefault("PATH", PATH)
    todo = Launcher()
    for fd, wanted in ((STDIN_FD, 0), (STDOUT_FD, 1), (STDERR_FD, 2)):
        todo.call("dup3", fd, wanted, 0)
        todo.call("close", fd)
    todo.call("close", PROGRAM_FD, on_error=IGNORE)
    for fd in range(3, 64):  # what apptainer left open; close_range is younger than some kernels
        todo.call("close", fd, on_error=IGNORE)
    todo.hello()
    todo.call("setsid", on_error=IGNORE)
    if tty:
        todo.call("ioctl", 0, _TIOCSCTTY, 0, on_error=IGNORE)
    for fd in (0, 1, 2):
        # so that /dev/stdout can be opened again; not a node's file, for which it is refused
        todo.call("fchown", fd, security["uid"], _SAME, on_error=IGNORE)
    todo.call("umask", 0o022)
    if fresh:
        # a read-only root has apptainer's passwd and group over the image's
        for path in ("/etc/passwd", "/etc/group"):
            if path not in mounted:
                todo.call("umount2", path, syscalls.MNT_DETACH, on_error=IGNORE)
        steps = [part for part in cwd.split("/") if part]
        for i in range(len(steps)):
            todo.call("mkdirat", _AT_FDCWD, "/" + "/".join(steps[: i + 1]), 0o755, on_error=IGNORE)
        if not security.get("unmasked"):
            _mask(todo)
    todo.call("chdir", cwd or "/", tag=_CHDIR)
    # the keys of the job's session (Kerberos, AFS) are the user's, not the container's
    todo.call("keyctl", _KEYCTL_JOIN_SESSION_KEYRING, 0, on_error=IGNORE)
    _become(todo, security, mapping, keep_groups, users_given)
    todo.call("prctl", syscalls.PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if security.get("noNewPrivileges"):
        todo.call("prctl", syscalls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, tag=_USER)
        if security.get("seccomp"):
            _confine(todo, security, allowed_capabilities(security))
    pairs = [os.fsencode(name) + b"=" + os.fsencode(value) for name, value in env.items()]
    words = [os.fsencode(word) for word in argv]
    for path in candidates(argv[0], env["PATH"]):
        todo.call("execve", path, words, pairs, on_error=REPORT, tag=_EXEC)
    todo.call("write", REPORT_FD, RECORD.pack(_NONE, 0), RECORD.size)
    return todo.program(os.uname().machine)


def _mask(todo: Launcher) -> None:
    """What containerd hides of /proc and /sys from a container that is not privileged, and what it
    lets it only read; what this node has not is passed over."""
    for path in _MASKED_FILES:
        todo.call("mount", "/dev/null", path, 0, syscalls.MS_BIND, 0, on_error=IGNORE)
    for path in _MASKED_DIRECTORIES:
        todo.call(
            "mount", "tmpfs", path, "tmpfs", syscalls.MS_RDONLY, "size=4k,mode=0555",
            on_error=IGNORE,
        )  # fmt: skip
    again = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY
    again |= syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    for path in _READ_ONLY:
        todo.call("mount", path, path, 0, syscalls.MS_BIND | syscalls.MS_REC, 0, on_error=IGNORE)
        todo.call("mount", 0, path, 0, again, 0, on_error=IGNORE)
    todo.call("mount", 0, "/sys", 0, again, 0, on_error=IGNORE)


def _become(
    todo: Launcher,
    security: Dict[str, Any],
    mapping: Mapping,
    keep_groups: bool,
    users_given: bool,
) -> None:
    uid, gid, groups = security["uid"], security["gid"], security["groups"]
    nested = uid >= mapping.uids or gid >= mapping.gids
    if users_given:
        nested = True
        todo.call("setns", USERS_FD, syscalls.CLONE_NEWUSER, tag=_USER)
        todo.call("close", USERS_FD)
    elif nested:
        # the one id there is (or root, for an id outside the range) gets the wanted number
        todo.call("unshare", syscalls.CLONE_NEWUSER, tag=_USER)
        for path, text in (
            ("setgroups", b"deny"),
            ("uid_map", b"%d 0 1" % uid),
            ("gid_map", b"%d 0 1" % gid),
        ):
            # the lowest free descriptor is 3: all others were closed
            todo.call("openat", _AT_FDCWD, "/proc/self/" + path, _O_WRONLY, 0, tag=_USER)
            todo.call("write", 3, text, len(text), tag=_USER)
            todo.call("close", 3)
    kept = allowed_capabilities(security)
    if security.get("seccomp") and not security.get("noNewPrivileges"):
        _confine(todo, security, kept)  # while CAP_SYS_ADMIN is there
    todo.call(
        "prctl", syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0,
        on_error=IGNORE,
    )  # fmt: skip
    for number, name in enumerate(_CAPABILITIES):
        if name not in kept:
            todo.call("prctl", syscalls.PR_CAPBSET_DROP, number, 0, 0, 0, on_error=IGNORE)
    if not nested and not (keep_groups and not groups):
        # the primary group is one of them, as containerd has it since CVE-2022-36109
        wanted = [g for g in [gid, *groups] if g < mapping.gids]
        packed = struct.pack("<%dI" % len(wanted), *wanted)
        # without a range of ids the kernel forbids setgroups, and there is nothing to set
        todo.call(
            "setgroups", len(wanted), packed, on_error=FATAL if mapping.gids > 1 else IGNORE,
            tag=_USER,
        )  # fmt: skip
    todo.call("setresgid", gid, gid, gid, tag=_USER)
    todo.call("setresuid", uid, uid, uid, tag=_USER)
    mask = sum(1 << _CAPABILITIES.index(name) for name in kept) if uid == 0 else 0
    low, high = mask & 0xFFFFFFFF, mask >> 32
    todo.call(
        "capset",
        struct.pack("<Ii", _CAPABILITY_VERSION_3, 0),
        struct.pack("<6I", low, low, 0, high, high, 0),  # effective, permitted, inheritable
        on_error=IGNORE,
    )


def _confine(todo: Launcher, security: Dict[str, Any], capabilities: Sequence[str]) -> None:
    """The seccomp filter, as runc does it: with no_new_privs as the last step, else while there is
    the right to; a profile then must allow what follows (capset, setresuid, prctl, …)."""
    from . import seccomp

    if security["seccomp"] == "RuntimeDefault":
        filter_ = seccomp.program(os.uname().machine, capabilities)
    else:
        from . import seccomp_profile

        filter_ = seccomp_profile.program(security["seccomp"], os.uname().machine)
    profile = seccomp.argument(filter_)
    todo.call("prctl", seccomp.PR_SET_SECCOMP, seccomp.MODE_FILTER, profile, 0, 0, tag=_USER)


class Outcome(NamedTuple):
    """What the launcher reported before its end of file."""

    pid: int  # 0: it never ran
    failed: str  # "": the program was executed; else runc's words


def read_outcome(records: Sequence[bytes], pid: int, program: str, cwd: str) -> Outcome:
    """`records`: the messages on the report socket; `pid`: the credentials of the first one."""
    hello, executed = False, True
    worst: Optional[int] = None
    for raw in records:
        tag, result = RECORD.unpack(raw)
        if tag == HELLO:
            hello = True
            continue
        if tag == _NONE:
            executed = False  # records of _EXEC alone are candidates of $PATH before the right one
            continue
        code = -result
        if tag == _CHDIR:
            return Outcome(pid, 'chdir to cwd ("%s") failed: %s' % (cwd, os.strerror(code).lower()))
        if tag != _EXEC:
            return Outcome(pid, "unable to become the container's user: %s" % os.strerror(code))
        if worst is None or code not in (errno.ENOENT, errno.ENOTDIR):
            worst = code
    if not hello:
        return Outcome(0, "")
    if executed:
        return Outcome(pid, "")
    return Outcome(pid, exec_failure(program, worst or errno.ENOENT))


def exec_failure(program: str, code: int) -> str:
    """runc's words for an execve that failed."""
    if "/" in program and code == errno.ENOENT:
        return 'exec: "%s": stat %s: no such file or directory' % (program, program)
    if code in (errno.ENOENT, errno.ENOTDIR):
        return 'exec: "%s": executable file not found in $PATH' % program
    return 'exec: "%s": %s' % (program, os.strerror(code).lower())
