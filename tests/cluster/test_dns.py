"""The cluster's DNS, asked from a pod."""

from collections.abc import Iterator
from functools import partial

import pytest
from conftest import Namespace, User, eventually, namespace_of, pod

DOMAIN = "svc.cluster.local"


@pytest.fixture(scope="module")
def space(alice: User, registry: str) -> Iterator[Namespace]:
    """A StatefulSet behind a headless Service, a Service with a named port, and one that is a
    name for something outside."""
    for ns in namespace_of(alice, "dns"):
        busybox = f"{registry}/busybox:1"
        template = {
            "metadata": {"labels": {"app": "db"}},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "c",
                        "image": busybox,
                        "command": ["httpd", "-f", "-p", "8080"],
                        "ports": [{"name": "web", "containerPort": 8080}],
                    }
                ],
            },
        }
        ns.create(
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": "db"},
                "spec": {
                    "serviceName": "db",
                    "replicas": 2,
                    "podManagementPolicy": "Parallel",
                    "selector": {"matchLabels": {"app": "db"}},
                    "template": template,
                },
            },
            service("db", clusterIP="None", selector={"app": "db"},
                    ports=[{"name": "http", "port": 8080}]),
            service("web", selector={"app": "db"},
                    ports=[{"name": "http", "port": 80, "targetPort": "web"}]),
            service("outside", type="ExternalName", externalName="registry.hpk.test"),
            pod("client", "sleep", "100000", image=busybox, terminationGracePeriodSeconds=0),
        )  # fmt: skip
        for name in ("db-0", "db-1", "client"):
            eventually(f"{name} exists", partial(exists, ns, name))
            ns.wait_ready(name)
        yield ns


def exists(ns: Namespace, name: str) -> bool:
    return not ns.gone("pod", name)


def service(name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def ask(ns: Namespace, name: str, kind: str = "a") -> str:
    """nslookup's answer, what comes after the server's own address."""
    done = ns.kubectl("exec", "client", "--", "nslookup", f"-type={kind}", name, check=False)
    return done.out.partition("\n\n")[2]


def address(ns: Namespace, name: str) -> str:
    return str(ns.pod(name)["status"]["podIP"])


def test_a_service_is_the_addresses_of_its_pods(space: Namespace) -> None:
    both = {address(space, "db-0"), address(space, "db-1")}
    for name in ("db", "web"):
        full = f"{name}.{space.name}.{DOMAIN}"
        eventually(full, lambda full=full: all(ip in ask(space, full) for ip in both), 15)


def test_the_pods_of_a_stateful_set_have_names_and_addresses_lead_back(space: Namespace) -> None:
    for name in ("db-0", "db-1"):
        full, ip = f"{name}.db.{space.name}.{DOMAIN}", address(space, name)
        eventually(full, lambda full=full, ip=ip: ip in ask(space, full), 15)
        assert full in ask(space, ".".join(reversed(ip.split("."))) + ".in-addr.arpa", "ptr")
    found = space.kubectl("exec", "db-0", "--", "hostname", "-f").out.strip()
    assert found == f"db-0.db.{space.name}.{DOMAIN}"


def test_named_ports_are_found_by_srv(space: Namespace) -> None:
    """A headless Service's port is the pods' own."""
    answer = ask(space, f"_http._tcp.web.{space.name}.{DOMAIN}", "srv")
    assert " 8080 " in answer and f"web.{space.name}.{DOMAIN}" in answer


def test_names_outside_and_names_for_the_outside(space: Namespace) -> None:
    outside = space.user.sh("getent hosts registry.hpk.test").out.split()[0]
    assert outside in ask(space, "registry.hpk.test")
    answer = ask(space, f"outside.{space.name}.{DOMAIN}")
    assert "canonical name = registry.hpk.test" in answer and outside in answer
    assert "NXDOMAIN" in ask(space, f"nobody.{space.name}.{DOMAIN}")


def test_short_names_and_the_dns_policies(space: Namespace, busybox: str) -> None:
    got = space.kubectl("exec", "client", "--", "wget", "-S", "-O-", f"http://web.{space.name}:8080/",
                        check=False)  # fmt: skip
    assert "404 Not Found" in got.err, "httpd with nothing to serve answered"
    own = pod("own", "cat", "/etc/resolv.conf", image=busybox, dnsPolicy="None",
              dnsConfig={"nameservers": ["192.0.2.99"], "searches": ["a.b"],
                         "options": [{"name": "timeout", "value": "1"}]})  # fmt: skip
    default = pod("default", "cat", "/etc/resolv.conf", image=busybox, dnsPolicy="Default")
    space.create(own, default)
    for name in ("own", "default"):
        space.wait_phase(name, "Succeeded")
    assert space.logs("own").split("\n")[:3] == [
        "search a.b", "nameserver 192.0.2.99", "options timeout:1",
    ]  # fmt: skip
    assert "cluster.local" not in space.logs("default")


def test_the_api_server_is_reached_by_its_name(space: Namespace) -> None:
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    answer = space.kubectl(
        "exec", "client", "--", "sh", "-c",
        f'wget -q -O- --no-check-certificate --header "Authorization: Bearer $(cat {token})" '
        "https://kubernetes.default.svc/version",
    ).out  # fmt: skip
    assert '"major": "1"' in answer
