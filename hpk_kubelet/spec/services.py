"""Variables that tell a container where services are (kubelet's pkg/kubelet/envvars)."""

from __future__ import annotations

from collections.abc import Iterable

from hpk_kubelet.spec.inputs import Object


def service_variables(
    services: Iterable[Object], api_host: str, api_port: int, links: bool
) -> dict[str, str]:
    """The API server's variables, and with `links` those of the namespace's services.

    Headless services and ExternalNames have no address and so no variables.
    """
    variables: dict[str, str] = {}
    if links:
        for service in services:
            spec = service.get("spec", {})
            ip = spec.get("clusterIP", "")
            if ip not in ("", "None") and spec.get("ports"):
                variables |= _of_service(service["metadata"]["name"], ip, spec["ports"])
    api = [{"name": "https", "port": api_port, "protocol": "TCP"}]
    return variables | _of_service("kubernetes", api_host, api)


def _of_service(name: str, ip: str, ports: list[Object]) -> dict[str, str]:
    prefix = _variable(name)
    variables = {
        f"{prefix}_SERVICE_HOST": ip,
        f"{prefix}_SERVICE_PORT": str(ports[0]["port"]),
    }
    address = f"[{ip}]" if ":" in ip else ip
    for index, port in enumerate(ports):
        if port.get("name"):
            variables[f"{prefix}_SERVICE_PORT_{_variable(port['name'])}"] = str(port["port"])
        protocol = port.get("protocol") or "TCP"
        url = f"{protocol.lower()}://{address}:{port['port']}"
        if index == 0:
            variables[f"{prefix}_PORT"] = url
        link = f"{prefix}_PORT_{port['port']}_{protocol.upper()}"
        variables[link] = url
        variables[f"{link}_PROTO"] = protocol.lower()
        variables[f"{link}_PORT"] = str(port["port"])
        variables[f"{link}_ADDR"] = ip
    return variables


def _variable(name: str) -> str:
    return name.replace("-", "_").upper()
