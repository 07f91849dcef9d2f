"""The kubelet's HTTPS API, for the API server alone.

Paths and answers are those of Kubernetes' pkg/kubelet/server/server.go. Who calls is proved by a
client certificate of the cluster's authorities, and only the API server's own are let in: it has
authorized the user already. It has two: one as the kubelet's client, one as the aggregator of
metrics.k8s.io.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from hpk_kubelet.errors import HPKError
from hpk_kubelet.server.agents import Agent
from hpk_kubelet.server.attach import Attachment, Conversation, ReadLogs
from hpk_kubelet.server.log_options import LogOptions, log_state, parse_options
from hpk_kubelet.server.metrics import Metrics
from hpk_kubelet.server.pod_logs import LogFiles, pod_log
from hpk_kubelet.server.port_forward import PROTOCOL, TUNNEL, PortForward
from hpk_kubelet.server.proxy import proxy
from hpk_kubelet.server.spdy_exec import SPDY_PROTOCOLS, SpdyExec
from hpk_kubelet.server.upgrade import Pipe, raw_pipe, wants_spdy, websocket_pipe

log = logging.getLogger(__name__)

API_SERVER = ("kube-apiserver-kubelet-client", "hpk-ca")
AGGREGATOR = ("front-proxy-client", "hpk-front-proxy-ca")
"""Common names of the certificate and of its issuer."""
NO_AGENT = "the pod's agent is not connected to the kubelet at this moment"


class ServedPod(Protocol):
    """What the server needs of one pod."""

    @property
    def object(self) -> dict[str, Any]: ...  # as the API has it
    @property
    def status(self) -> dict[str, Any]: ...  # the newest known here, written or not
    @property
    def agent(self) -> Agent | None: ...
    @property
    def directory(self) -> Path: ...
    @property
    def running(self) -> bool: ...  # its job may still write


class Pods(Protocol):
    def find(self, namespace: str, name: str) -> ServedPod | None: ...

    def served(self) -> Iterable[ServedPod]: ...


def server_context(cert: Path, key: Path, *client_cas: Path) -> ssl.SSLContext:
    """TLS 1.2 and newer; with `client_cas`, who has no certificate of them gets no connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    for authority in client_cas:
        context.load_verify_locations(authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@web.middleware
async def only_the_api_server(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """403 for other certificates, however valid; HPKError becomes a plain sentence."""
    certificate = request.get_extra_info("peercert")
    name = common_name(certificate)
    wanted = AGGREGATOR if request.path.startswith("/apis/") else API_SERVER
    if (name, common_name(certificate, "issuer")) != wanted:
        raise web.HTTPForbidden(text=f"{name or 'nobody'} may not use the kubelet's API\n")
    try:
        return await handler(request)
    except HPKError as e:
        raise web.HTTPInternalServerError(text=f"{e}\n") from None


def common_name(certificate: Mapping[str, Any] | None, of: str = "subject") -> str:
    """The subject's (or issuer's) CN of what ssl's getpeercert() answers; "" without one."""
    for relative in (certificate or {}).get(of, ()):
        for key, value in relative:
            if key == "commonName":
                return str(value)
    return ""


class KubeletServer:
    """Serves until `close`."""

    def __init__(
        self,
        pods: Pods,
        context: ssl.SSLContext,
        log_files: LogFiles,
        metrics: Metrics,
        configuration: Mapping[str, Any],
    ) -> None:
        """`configuration`: what of KubeletConfiguration is true of this kubelet."""
        self._pods = pods
        self._metrics = metrics
        self._configuration = dict(configuration)
        self._context = context
        self._log_files = log_files
        self._read_logs = ReadLogs()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; answers the port (of the system's choice when `port` is 0)."""
        app = web.Application(middlewares=[only_the_api_server])
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        for kind in ("exec", "attach"):
            for uid in ("", "/{uid}"):
                path = f"/{kind}/{{namespace}}/{{pod}}{uid}/{{container}}"
                app.router.add_get(path, self._stream(kind))
                app.router.add_post(path, self._stream(kind))
        for path in ("/portForward/{namespace}/{pod}", "/portForward/{namespace}/{pod}/{uid}"):
            app.router.add_route("*", path, self._port_forward)
        app.router.add_get("/pods", self._list)
        app.router.add_get("/runningpods/", self._list_running)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/configz", self._configz)
        self._metrics.add_to(app)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, host, port, ssl_context=self._context, shutdown_timeout=1.0
        )
        await site.start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _pod(self, request: web.Request) -> ServedPod:
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        pod = self._pods.find(namespace, name)
        uid = request.match_info.get("uid")
        if pod is None or (uid and pod.object["metadata"]["uid"] != uid):
            raise web.HTTPNotFound(text=f'pod "{namespace}/{name}" does not exist')
        return pod

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod(request)
        container = request.match_info["container"]
        spec = pod.object["spec"]
        kinds = ("containers", "initContainers", "ephemeralContainers")
        known = [c["name"] for kind in kinds for c in spec.get(kind) or ()]
        name = pod.object["metadata"]["name"]
        if container not in known:
            raise web.HTTPNotFound(text=f'container "{container}" not found in pod "{name}"')
        try:
            options = parse_options(request.query, dt.datetime.now(dt.UTC))
            log_state(pod.status, name, container, options.previous)
        except HPKError as e:
            raise web.HTTPBadRequest(text=str(e)) from None
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            count = 0
            async for part in pod_log(pod, container, options, self._log_files):
                count += len(part)
                await response.write(part)
            if options == LogOptions():
                self._read_logs.note((pod.object["metadata"]["uid"], container), count)
        except ConnectionError:
            return response  # the reader has seen enough
        await response.write_eof()
        return response

    def _stream(self, kind: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            pod = self._pod(request)
            container, query = request.match_info["container"], request.query
            state = _container_state(pod.status, container)
            read = self._read_logs.take((pod.object["metadata"]["uid"], container))
            missed = kind == "attach" and read is not None
            ended = missed and "terminated" in state
            if "running" not in state and not ended:
                raise web.HTTPInternalServerError(text=f'container not found ("{container}")')
            if pod.agent is None and not ended:
                raise web.HTTPServiceUnavailable(text=NO_AGENT)
            wanted = _streams(query)
            arguments: dict[str, Any] = {
                "container": container,
                "tty": "resize" in wanted,
                "stdin": "stdin" in wanted,
            }
            if kind == "exec":
                arguments["command"] = query.getall("command", [])
            pipe = await raw_pipe(request, SPDY_PROTOCOLS) if wants_spdy(request) else None
            agent = None if ended else pod.agent
            stream: Conversation | None = agent.open(kind, **arguments) if agent else None
            if missed or stream is None:
                log = pod_log(pod, container, LogOptions(), self._log_files)
                stream = Attachment(stream, log, read or 0)
            if pipe is None:
                return await proxy(request, stream)
            await SpdyExec(pipe, stream, wanted).serve()
            return pipe.response

        return handle

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod(request)
        if pod.agent is None:
            raise web.HTTPServiceUnavailable(text=NO_AGENT)
        if wants_spdy(request):
            pipe: Pipe = await raw_pipe(request, [PROTOCOL])
        else:
            pipe = await websocket_pipe(request, TUNNEL)
        metadata = pod.object["metadata"]
        await PortForward(pipe, pod.agent, metadata["name"], metadata["uid"]).serve()
        return pipe.response

    async def _list(self, request: web.Request) -> web.Response:
        return _pod_list(self._pods.served())

    async def _list_running(self, request: web.Request) -> web.Response:
        return _pod_list(p for p in self._pods.served() if p.status.get("phase") == "Running")

    async def _healthz(self, request: web.Request) -> web.Response:
        await asyncio.sleep(0)  # answered by the event loop that does everything else
        return web.Response(text="ok")

    async def _configz(self, request: web.Request) -> web.Response:
        kind = {"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1"}
        return web.json_response({"kubeletconfig": {**kind, **self._configuration}})


def _pod_list(pods: Iterable[ServedPod]) -> web.Response:
    items = [{**pod.object, "status": pod.status} for pod in pods]
    return web.json_response(
        {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
    )


def _streams(query: Mapping[str, str]) -> set[str]:
    """The streams a client of exec or attach asks for, by their SPDY names."""
    names = {"stdin": "stdin", "stdout": "stdout", "stderr": "stderr", "tty": "resize"}
    names |= {"input": "stdin", "output": "stdout", "error": "stderr"}  # the kubelet's own
    wanted = {stream for name, stream in names.items() if query.get(name) in ("1", "true")}
    return wanted - {"stderr"} if "resize" in wanted else wanted


def _container_state(status: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    for key in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
        for entry in status.get(key) or ():
            if entry["name"] == container:
                state: Mapping[str, Any] = entry.get("state") or {}
                return state
    return {}
