"""`hpk serve`: the control job's one long-lived process."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import socket
import sys
import time
from pathlib import Path

from hpk_kubelet import homes
from hpk_kubelet.config import Config, Paths
from hpk_kubelet.controlplane import (
    backup,
    components,
    handover,
    inside,
    job,
    metrics,
    pod_network,
    stack,
)
from hpk_kubelet.controlplane.addresses import (
    choose_ports,
    kubelet_ports,
    node_address,
    port_range,
)
from hpk_kubelet.controlplane.api import ApiClient, apply_manifests, load_manifests
from hpk_kubelet.controlplane.files import make_private_dir, write_private
from hpk_kubelet.controlplane.kubeconfig import (
    USERS,
    Control,
    component_kubeconfig,
    read_control,
    write_component_kubeconfig,
)
from hpk_kubelet.controlplane.pki import Pki
from hpk_kubelet.controlplane.process import Component, Process, truncate_large
from hpk_kubelet.errors import HPKError

MANIFESTS = Path(__file__).parent / "manifests"
OWN = ("kubelet", "controllers")
_CHECK = 60.0  # seconds between two looks at the logs' sizes and the copies' age
_COPY_AGAIN = 3600.0  # seconds until a copy that could not be made is tried again
_STARTS = 5  # of etcd, after a copy, before the control plane gives up


def say(text: str) -> None:
    """One line of the control job's own output, with the time."""
    print(f"{dt.datetime.now():%H:%M:%S} {text}", flush=True)


async def serve(config: Config, paths: Paths, own: tuple[str, ...] = OWN) -> None:
    """Runs the control plane until SIGTERM or SIGINT; HPKError if it can't be."""
    began = time.monotonic()
    for directory in (paths.home, paths.log, paths.run, paths.etcd):
        make_private_dir(directory)
    slurm_job = job.current_job()
    address = node_address(config.address)
    stop, asked = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, asked.set)
    network = await asyncio.to_thread(pod_network.choose_mode, config)
    say(f"network: {network.mode} ({network.why})")
    rootless = pod_network.binaries(config) if network.mode == "rootless" else ()
    needed = (*stack.BINARIES, *rootless)
    binaries = {name: components.installed(name) for name in needed}
    await asyncio.to_thread(handover.take_over, paths, os.environ, say)
    await asyncio.to_thread(ensure_alone, paths, slurm_job)
    homes.remember(paths.home)
    ports = choose_ports(stack.PORTS, port_range(config.ports), paths.run / "ports.json")
    site = stack.Site(paths, address, ports, binaries)

    plane = Plane(config, paths, site, slurm_job, began)
    plane.mode = f"{network.mode} ({network.why})"
    if network.mode == "rootless":
        plane.network = pod_network.PodNetwork(config, site, say)
    else:
        pod_network.forget(paths)
    starting = asyncio.create_task(plane.start(own))
    stopping = asyncio.create_task(stop.wait())
    handing = (
        asyncio.create_task(handover.hand_over(paths, slurm_job, asked, stop, say))
        if slurm_job is not None
        else None
    )
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        while not stop.is_set():
            for process in plane.all_processes():
                truncate_large(process.log)
            await plane.back_up()
            await asyncio.wait({stopping}, timeout=_CHECK)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        stopping.cancel()
        await plane.stop()
        if handing is not None:
            handing.cancel()
            await asyncio.gather(handing, return_exceptions=True)


def ensure_alone(paths: Paths, slurm_job: int | None) -> None:
    """HPKError if another control plane runs on this state."""
    last = read_control(paths)
    if slurm_job is not None:
        # In a shell inside an allocation (salloc) too: that job is then the control job.
        job.mark(slurm_job, job.marker(paths.home))
        job.claim(slurm_job, paths.home, job.my_jobs)
    if last is None or (last.job is not None and last.job == slurm_job):
        return
    if last.job is not None:
        other = job.find_job(last.job)
        if other is not None and other.runs:
            raise job.already_runs(other, paths.home)
    elif runs_here(last):
        raise HPKError(
            f"the control plane in {paths.home} already runs: process {last.pid} on {last.host}; "
            "stop it with: hpk down"
        )


def runs_here(control: Control) -> bool:
    """Whether a control plane started outside Slurm still runs: its process where that is on
    this host, else whether its API answers."""
    if control.host != socket.gethostname():
        port = int(control.api.rsplit(":", 1)[1])
        try:
            with socket.create_connection((control.api.split("/")[2].split(":")[0], port), 3.0):
                return True
        except OSError:
            return False
    try:
        command = Path(f"/proc/{control.pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"serve" in command.split(b"\0") and control.pid != os.getpid()


class Plane:
    """The running processes, in the order they were started."""

    def __init__(
        self, config: Config, paths: Paths, site: stack.Site, slurm_job: int | None, began: float
    ) -> None:
        self._config = config
        self.processes: list[Process] = []
        self.network: pod_network.PodNetwork | None = None
        self.mode = ""  # of the pods' network, and why
        self.inside: inside.Inside | None = None
        self._etcd: Process | None = None
        self._next_copy = 0.0  # time.monotonic() before which no copy of etcd's data is tried
        self._paths = paths
        self._site = site
        self._job = slurm_job
        self._began = began

    def all_processes(self) -> list[Process]:
        return [*self.processes, *(self.inside.processes if self.inside is not None else ())]

    async def _start(self, component: Component) -> Process:
        process = Process(component, self._paths.log, say)
        self.processes.append(process)
        await process.start()
        return process

    async def start(self, own: tuple[str, ...]) -> None:
        """Starts everything in order; returns when all of it is up."""
        site, paths = self._site, self._paths
        pki = Pki(paths.pki)
        certs = stack.certificates(pki, site.address)
        for name in USERS:
            write_component_kubeconfig(paths, pki, name, site.api)
        await asyncio.to_thread(backup.back_up, paths.etcd, paths.backups, time.time(), say)
        self._etcd = await self._start(stack.etcd(site, pki, certs))
        if self.network is not None:
            await self.network.prepare(pki)
            egress = inside.Egress(site, self.network.facts["podCIDR"])
            self.inside = inside.Inside(site, self.network, say)
            self.network.follow(egress.moved)
            self.network.follow(self.inside.moved)
            self.network.start()
            await self._start(egress.component())
            await self._start(stack.apiserver(site, pki, certs, (egress.flag,)))
        else:
            await self._start(stack.apiserver(site, pki, certs))
        admin_config = component_kubeconfig(paths, "admin").read_bytes()
        write_private(paths.kubeconfig, admin_config)
        write_private(
            paths.control,
            Control(
                site.api,
                socket.gethostname(),
                self._job,
                os.getpid(),
                dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                self.mode,
            ).to_json(),
        )
        say(
            f"the Kubernetes API is ready after {time.monotonic() - self._began:.1f} s at "
            f"{site.api}; export KUBECONFIG={paths.kubeconfig}"
        )
        await self._start(stack.controller_manager(site, pki))
        client = ApiClient.from_kubeconfig(paths.kubeconfig)
        await apply_manifests(client, load_manifests(MANIFESTS))
        kubelet = kubelet_ports(self._config, paths)["kubelet"]
        await metrics.offer(client, site.address, kubelet, pki.ca.cert.read_bytes())
        for name in own:
            await self._start(stack.own(f"hpk-{name}", name))
        if self.inside is not None:
            await self.inside.serving(client)

    async def back_up(self) -> None:
        """Once a day, for some tenths of a second without etcd: its data is copied, and its file
        made smaller where that is worth it, which it does at its start."""
        paths = self._paths
        began = time.monotonic()
        if self._etcd is None or began < self._next_copy:
            return
        if not backup.is_due(paths.etcd, paths.backups, time.time()):
            return
        self._next_copy = began + _COPY_AGAIN
        await self._etcd.stop()
        copy = await asyncio.to_thread(backup.back_up, paths.etcd, paths.backups, time.time(), say)
        for left in reversed(range(_STARTS)):
            try:
                await self._etcd.start()
                break
            except HPKError as e:
                if not left:
                    raise
                say(f"after a copy of its data: {e}; starting it again")
        if copy is not None:
            say(f"etcd's data is copied to {copy}, {time.monotonic() - began:.1f} s without it")

    async def stop(self) -> None:
        """Stops everything, last started first; but before the API server and etcd, which wait
        for their clients' watches to end, CoreDNS and flanneld."""
        if self.inside is not None:
            await self.inside.stop()
        if self.network is not None:
            await self.network.stop()
        for process in reversed(self.processes):
            await process.stop()
        say("stopped")


def main(config: Config, paths: Paths, own: tuple[str, ...] = OWN) -> None:
    """Runs `serve` to its end."""
    os.umask(0o077)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(serve(config, paths, own))
