"""What the pod's volumes are on this node, and what a container's mounts point at."""

import errno
import os
import stat
from typing import Any, Dict, List, Optional

from . import syscalls
from .container import Mount, StartError, complete


class VolumeError(Exception):
    """A volume can't be had (yet); the text is the kubelet's FailedMount message."""


# hostPath types: what must be there, in the kubelet's words (pkg/volume/hostpath/host_path.go)
_HOST_CHECKS = {
    "Directory": (stat.S_ISDIR, "is not a directory"),
    "DirectoryOrCreate": (stat.S_ISDIR, "is not a directory"),
    "File": (stat.S_ISREG, "is not a file"),
    "FileOrCreate": (stat.S_ISREG, "is not a file"),
    "Socket": (stat.S_ISSOCK, "is not a socket"),
    "CharDevice": (stat.S_ISCHR, "is not a character device"),
    "BlockDevice": (stat.S_ISBLK, "is not a block device"),
}


def inside(path: str, folder: str) -> bool:
    """Whether a resolved path is the folder or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def prepare_volume(
    name: str,
    volume: Dict[str, Any],
    folder: str,
    home: str,
    fs_group: Optional[int],
    masked: str,
) -> str:
    """Makes the volume and answers its path on this node. `folder`: where emptyDirs live;
    `home`: $HPK_HOME, which no hostPath shows; `masked`: where what may not be shown as it is (a
    hostPath that has that in it, an image) is mounted instead.
    VolumeError with the kubelet's words."""
    try:
        if volume["kind"] == "emptyDir":
            return _empty_dir(os.path.join(folder, name), volume, fs_group)
        path: str = volume["path"]
        if volume["kind"] == "directory":
            os.stat(path)
            return path
        if volume["kind"] == "image":
            return _read_only(path, masked)
        if volume["kind"] == "claim":
            return _claim(path, home, fs_group)
        return _without(_host_path(path, volume.get("type", ""), home), home, masked)
    except OSError as e:
        raise VolumeError(
            'MountVolume.SetUp failed for volume "%s" : %s: %s'
            % (name, e.filename or "", (e.strerror or str(e)).lower())
        ) from None
    except ValueError as e:
        raise VolumeError('MountVolume.SetUp failed for volume "%s" : %s' % (name, e)) from None


def _empty_dir(path: str, volume: Dict[str, Any], fs_group: Optional[int]) -> str:
    os.makedirs(path, exist_ok=True)
    if volume.get("medium") == "Memory":
        size = volume.get("sizeLimit")
        syscalls.mount(
            "tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV,
            "size=%d" % size if size else "",
        )  # fmt: skip
    if fs_group is not None:
        try:
            os.chown(path, -1, fs_group)
        except OSError as e:
            # only an id outside what the user's range has; then everybody may write as it is
            if e.errno != errno.EINVAL:
                raise
    os.chmod(path, 0o777 if fs_group is None else 0o2777)
    return path


def _host_path(path: str, kind: str, home: str) -> str:
    if inside(os.path.realpath(path), os.path.realpath(home)):
        raise ValueError("hostPath %s is inside HPK's own state, which no pod may see" % path)
    if kind == "DirectoryOrCreate":
        os.makedirs(path, mode=0o755, exist_ok=True)
    elif kind == "FileOrCreate" and not is_there(path):
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o644))
    if not kind:
        # Docker's behaviour, which Kubernetes keeps for the empty type: a missing path is made
        if not is_there(path):
            os.makedirs(path, mode=0o755)
        return path
    check, words = _HOST_CHECKS[kind]
    if not is_there(path):
        raise ValueError("hostPath type check failed: %s %s" % (path, words))
    if not check(os.stat(path).st_mode):
        raise ValueError("hostPath type check failed: %s %s" % (path, words))
    return path


def is_there(path: str) -> bool:
    """OSError where the user may not know."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _without(path: str, home: str, place: str) -> str:
    """The path, or a view of it in which $HPK_HOME is an empty directory, if that is in it."""
    real, hidden = os.path.realpath(path), os.path.realpath(home)
    if not inside(hidden, real):
        return path
    os.makedirs(place)
    syscalls.mount(real, place, flags=syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.mount(
        "tmpfs", os.path.join(place, os.path.relpath(hidden, real)), "tmpfs",
        syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4k,mode=0555",
    )  # fmt: skip
    return place


def _read_only(path: str, place: str) -> str:
    """The image's directory is every pod's: nothing, not even a subPath, may be made in it."""
    os.makedirs(place)
    syscalls.mount(path, place, flags=syscalls.MS_BIND)
    flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOEXEC
    syscalls.mount("none", place, flags=flags | syscalls.MS_NOSUID | syscalls.MS_NODEV)
    return place


def _claim(path: str, home: str, fs_group: Optional[int]) -> str:
    real, home = os.path.realpath(path), os.path.realpath(home)
    volumes = os.path.join(home, "volumes")
    if inside(real, home) and (real == volumes or not inside(real, volumes)):
        raise ValueError("%s is inside HPK's own state, which no pod may see" % path)
    if not os.path.isdir(real):
        raise ValueError("path %s does not exist" % path)
    if fs_group is not None:
        give_to_group(real, fs_group)
    return real


def give_to_group(path: str, group: int) -> None:
    """kubelet's SetVolumeOwnership with policy OnRootMismatch (pkg/volume/volume_linux.go): all
    of it belongs to the group and is its to write, once."""
    found = os.lstat(path)
    if found.st_gid == group and found.st_mode & 0o2770 == 0o2770:
        return
    try:
        os.chown(path, -1, group)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return  # an id outside what the user's range has: the directory is open to all as it is
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            entry = os.path.join(folder, name)
            mode = os.lstat(entry).st_mode
            os.chown(entry, -1, group, follow_symlinks=False)
            if not stat.S_ISLNK(mode):
                more = 0o2770 if stat.S_ISDIR(mode) else 0o660
                os.chmod(entry, stat.S_IMODE(mode) | more)
    # last, because it says that the rest is done
    os.chmod(path, stat.S_IMODE(found.st_mode) | 0o2770)


def resolve_sub_path(volume: str, sub_path: str) -> str:
    """The real path of a subPath, made if missing; links are followed but never out of the
    volume. ValueError if one leads outside."""
    root = os.path.realpath(volume)
    path = os.path.realpath(os.path.join(root, sub_path))
    if os.path.isabs(sub_path) or ".." in sub_path.split("/") or not inside(path, root):
        raise ValueError("subPath %r leads out of the volume" % sub_path)
    if not os.path.exists(path):
        mode = stat.S_IMODE(os.stat(root).st_mode)
        missing: List[str] = []
        while not os.path.exists(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            os.mkdir(path)
            os.chmod(path, mode)
    return path


def container_mounts(
    container: Dict[str, Any],
    paths: Dict[str, str],
    fields: Dict[str, str],
    staging: str,
) -> List[Mount]:
    """The container's volume mounts. A subPath is bound to a place in `staging` first, by a
    descriptor that was checked: what a container swaps for a link later can't lead outside."""
    mounts = []
    for number, mount in enumerate(container["mounts"]):
        source = paths[mount["volume"]]
        late = mount.get("lateSubPath")
        sub_path = complete(late, fields) if late else mount["subPath"]
        if sub_path:
            try:
                source = _stage(source, sub_path, os.path.join(staging, str(number)))
            except (OSError, ValueError) as e:
                raise StartError(
                    "CreateContainerConfigError",
                    'failed to prepare subPath for volumeMount "%s" of container "%s": %s'
                    % (mount["volume"], container["name"], e),
                ) from None
        mounts.append(Mount(source, mount["target"], mount["readOnly"]))
    return mounts


def _stage(volume: str, sub_path: str, place: str) -> str:
    fd = os.open(resolve_sub_path(volume, sub_path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        link = "/proc/self/fd/%d" % fd
        if not inside(os.readlink(link), os.path.realpath(volume)):
            raise ValueError("subPath %r leads out of the volume" % sub_path)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(place)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_CLOEXEC, 0o600))
        syscalls.mount(link, place, flags=syscalls.MS_BIND | syscalls.MS_REC)
    finally:
        os.close(fd)
    return place
