"""Which backend the configuration and the site lead to."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from hpk_kubelet.config import SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.commands import CommandBackend
from hpk_kubelet.slurm.rest import RestBackend
from hpk_kubelet.slurm.rest_service import OwnService, SiteService


def find_slurmrestd() -> str | None:
    """Its path; users rarely have sbin in theirs, and it may be beside sbatch."""
    sbatch = shutil.which("sbatch")
    beside = [str(Path(sbatch).resolve().parent.parent / "sbin")] if sbatch else []
    path = [os.environ.get("PATH", os.defpath), *beside, "/usr/sbin", "/usr/local/sbin"]
    return shutil.which("slurmrestd", path=os.pathsep.join(path))


def words(config: SlurmConfig) -> str:
    """What `make_backend` will use, for a person."""
    if config.backend != "commands" and config.rest_url:
        return f"jobs go through {config.rest_url}"
    program = find_slurmrestd()
    if config.backend == "commands" or program is None:
        why = "no slurmrestd here" if program is None else "slurm.backend says so"
        return f"jobs go through sbatch ({why})"
    return f"jobs go through {program}, which HPK runs for you"


def make_backend(config: SlurmConfig, directory: Path) -> CommandBackend | RestBackend:
    """`directory` becomes that of slurmrestd's socket. HPKError where the configuration asks for
    what is not there."""
    if config.backend == "commands":
        return CommandBackend()
    if config.rest_url:
        host = urlsplit(config.rest_url).hostname or ""
        if not config.rest_url.startswith("https://") and host not in ("localhost", "127.0.0.1"):
            raise HPKError(
                f"slurm.restUrl {config.rest_url} is not https: the token would be read on the way"
            )
        user = pwd.getpwuid(os.getuid()).pw_name
        token_file = Path(config.rest_token_file).expanduser()
        return RestBackend(SiteService(config.rest_url, token_file, user))
    program = find_slurmrestd()
    if program is not None:
        return RestBackend(OwnService(program, directory))
    if config.backend == "slurmrestd":
        raise HPKError(
            "slurm.backend is slurmrestd, which is not on PATH here: name the site's own by "
            "slurm.restUrl and slurm.restTokenFile, or choose auto"
        )
    return CommandBackend()
