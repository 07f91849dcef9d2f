"""Kubelet's side: puts the agent where the jobs find it. Not part of what is installed."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

PACKAGE = "hpk_agent"
_MAIN = f"from {PACKAGE}.main import run\n\nrun()\n"


def install(agent_root: Path) -> Path:
    """Copies the agent to `agent_root/HASH` (once) and answers that directory.

    `python3 -I -S HASH POD_DIR` runs it. A directory rather than a zip file, so that the byte
    code is cached beside it by whichever Python runs it first. The hash is of the content: jobs
    that wait in the queue keep the version they were made for. OSError if it can't be written.
    """
    source = Path(__file__).parent
    files = sorted(path for path in source.glob("*.py") if path.name != Path(__file__).name)
    contents = {path.name: path.read_bytes() for path in files}
    digest = hashlib.sha256(_MAIN.encode())
    for name, content in contents.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    target = agent_root / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    agent_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=agent_root))
    try:
        (staging / PACKAGE).mkdir(mode=0o700)
        for name, content in contents.items():
            (staging / PACKAGE / name).write_bytes(content)
        (staging / "__main__.py").write_text(_MAIN)
        try:
            os.rename(staging, target)
        except OSError:
            if not target.is_dir():  # else somebody was faster
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target
