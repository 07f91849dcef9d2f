"""slurmrestd: this user's own on a Unix socket, or the site's with a token; and what it answers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from hpk_kubelet.agent.syscalls import die_with_parent
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.backend import Limits, UnreachableError
from hpk_kubelet.slurm.commands import environment
from hpk_kubelet.slurm.rest_job import VERSIONS

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=60.0)
_STARTING = 10.0  # seconds slurmrestd has to listen
_PAUSES = (1.0, 60.0)  # seconds between two tries, doubled from the first to the last
_CHECK = 60.0  # seconds between two looks at a service of the site's
_SOCKET_PATH = 107  # bytes, unix(7)


class NotDoneError(HPKError):
    """Refused, or never asked: nothing was changed, and the commands may be asked instead."""


class Service:
    """Kept up by `run`. `version` is its data parser while it can be used, else ""; `trouble` then
    says why it can't."""

    version = ""
    trouble = "slurmrestd is being started"
    _base = "http://localhost"

    def __init__(self) -> None:
        self.settled = asyncio.Event()  # it was up, or trouble is known
        self._session: aiohttp.ClientSession | None = None

    async def run(self, limits: Callable[[], Awaitable[Limits]]) -> None:
        """Until cancelled, or until it turns out that the site wants sbatch to be used."""
        pause = _PAUSES[0]
        while True:
            try:
                if (filters := (await limits()).client_filters) != "":
                    self._say(f"the site's {filters} checks what sbatch submits")
                    return
                await self._serve()
                pause = _PAUSES[0]
            except (HPKError, OSError) as e:
                self._say(str(e))
            except Exception:
                log.exception("keeping slurmrestd up failed")
            finally:
                self.version = ""
                await self._close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    async def _serve(self) -> None:
        """Makes it usable, and returns when it has ended."""
        raise NotImplementedError

    def _say(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("jobs go through Slurm's commands: %s", trouble)
        self.trouble = trouble
        self.settled.set()

    async def _open(self, connector: aiohttp.BaseConnector, headers: dict[str, str]) -> None:
        """HPKError where it offers nothing that is known here."""
        # Each connection is used once, so that one which slurmrestd had closed meanwhile leaves
        # nothing in doubt. It must not know: asked to close, it adds a stray header to the body.
        headers = {**headers, "Connection": "keep-alive"}
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=_TIMEOUT
        )
        for version in VERSIONS:
            async with self._session.get(f"{self._base}/slurm/{version}/ping/") as response:
                if response.status == 200:
                    self.version = version
                    self.settled.set()
                    log.info("jobs go through slurmrestd, %s", version)
                    return
        raise HPKError(f"slurmrestd offers none of {', '.join(VERSIONS)}")

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        """The answer, which is a yes. NotDoneError, or UnreachableError where nobody knows."""
        if self._session is None:
            raise NotDoneError(self.trouble)
        try:
            async with self._session.request(
                method,
                f"{self._base}/slurm/{self.version}/{path}",
                data=body,
                headers={"Content-Type": "application/json"},
            ) as response:
                status, text = response.status, await response.read()
        except aiohttp.ClientConnectorError as e:
            raise NotDoneError(f"slurmrestd: {_words(e)}") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise UnreachableError(f"slurmrestd: {_words(e)}") from None
        return answer_of(status, text)


def answer_of(status: int, text: bytes) -> dict[str, Any]:
    """As `Service.call`. Pure."""
    if status in (401, 403, 404):  # without a word of slurmctld's
        raise NotDoneError(f"slurmrestd answered {status}: {text[:200].decode(errors='replace')}")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise UnreachableError(f"slurmrestd answered {status}: {text[:200]!r}")
    if errors := answer.get("errors"):
        _fail(errors)
    return answer


def _fail(errors: Sequence[dict[str, Any]]) -> NoReturn:
    """By slurm/slurm_errno.h: 2000 to 2999 are slurmctld's refusals, 9000 and more what slurmrestd
    could not read; 1000 to 1999 and 5000 to 5999 mean that slurmctld gave no answer."""
    words = "; ".join(str(e.get("error") or e.get("description")) for e in errors)
    numbers = [int(e.get("error_number") or 0) for e in errors]
    if all(2000 <= n < 3000 or n >= 9000 for n in numbers):
        raise NotDoneError(words)
    raise UnreachableError(words)


def _words(error: Exception) -> str:
    """A line of it: aiohttp quotes whole answers."""
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


class OwnService(Service):
    """Runs slurmrestd as this user; `directory` is private, so nobody else gets at its socket."""

    def __init__(self, program: str, directory: Path) -> None:
        super().__init__()
        self._program = program
        self._directory = directory
        self._socket = directory / "socket"

    async def _serve(self) -> None:
        if len(os.fsencode(self._socket)) > _SOCKET_PATH:
            raise HPKError(f"{self._socket} is too long for a socket's path")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        self._socket.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            self._program, "-a", "rest_auth/local", "-s", "slurmctld", f"unix:{self._socket}",
            stdin=asyncio.subprocess.DEVNULL,
            env=environment(dict(os.environ)) | {"SLURMRESTD_DEBUG": "error"},
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )  # fmt: skip
        try:
            await self._listening(process)
            self._socket.chmod(0o600)  # slurmrestd lets everybody in, as far as they get there
            await self._open(aiohttp.UnixConnector(str(self._socket), force_close=True), {})
            code = await process.wait()
            raise HPKError(f"slurmrestd ended with code {code}")
        except aiohttp.ClientError as e:
            raise HPKError(f"slurmrestd: {_words(e)}") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._socket.unlink(missing_ok=True)

    async def _listening(self, process: asyncio.subprocess.Process) -> None:
        """Looks for the socket, which nothing else announces."""
        try:
            async with asyncio.timeout(_STARTING):
                while not self._socket.exists():
                    if process.returncode is not None:
                        raise HPKError(f"slurmrestd ended at once, with code {process.returncode}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise HPKError(f"slurmrestd made no socket within {_STARTING:g} s") from None


class SiteService(Service):
    """The site's, at `url`; the token (a JWT of auth/jwt) is read from its file, and again when
    it is not taken any more."""

    def __init__(self, url: str, token_file: Path, user: str) -> None:
        super().__init__()
        self._base = url.rstrip("/")
        self._token_file = token_file
        self._user = user

    async def _serve(self) -> None:
        try:
            token = (await asyncio.to_thread(self._token_file.read_text)).strip()
        except OSError as e:
            raise HPKError(f"slurm.restTokenFile {self._token_file}: {e.strerror}") from None
        headers = {"X-SLURM-USER-NAME": self._user, "X-SLURM-USER-TOKEN": token}
        try:
            await self._open(aiohttp.TCPConnector(force_close=True), headers)
            while True:
                await asyncio.sleep(_CHECK)
                assert self._session is not None
                ping = f"{self._base}/slurm/{self.version}/ping/"
                async with self._session.get(ping) as response:
                    if response.status != 200:
                        raise HPKError(f"{self._base} answered {response.status}")
        except (aiohttp.ClientError, TimeoutError) as e:
            raise HPKError(f"{self._base}: {_words(e)}") from None
