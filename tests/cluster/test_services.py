"""Services with addresses (`serviceMode: clusterIP`, bob's cluster), and the API server's way to
pods (alice's, where Services are headless)."""

import base64
import datetime as dt
import ipaddress
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from conftest import Namespace, User, eventually, namespace_of, pod
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def service(name: str, app: str, *ports: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": app}, "ports": list(ports), **spec},
    }


def server(name: str, registry: str, app: str, *arguments: str, **spec: Any) -> dict[str, Any]:
    """agnhost, with its arguments; else an HTTP server on 8080 and a UDP one on 8081."""
    whole = pod(name, image=f"{registry}/agnhost:2.63.0", terminationGracePeriodSeconds=0, **spec)
    del whole["spec"]["containers"][0]["command"]
    whole["spec"]["containers"][0] |= {
        "args": list(arguments) or ["netexec", "--http-port=8080", "--udp-port=8081"],
        "ports": [{"name": "web", "containerPort": 8080}],
    }
    whole["metadata"]["labels"] = {"app": app}
    return whole


@pytest.fixture(scope="module")
def space(bob: User, registry: str) -> Iterator[Namespace]:
    """Two servers, on two nodes, and a client."""
    for ns in namespace_of(bob, "services"):
        ns.create(
            server("one", registry, "web",
                   annotations={"slurm-job.hpk.io/flags": "--nodelist=node1"}),
            server("two", registry, "web",
                   annotations={"slurm-job.hpk.io/flags": "--nodelist=node2"}),
            pod("client", "sleep", "100000", image=f"{registry}/busybox:1",
                terminationGracePeriodSeconds=0),
            service("web", "web", {"name": "http", "port": 80, "targetPort": "web"},
                    {"name": "udp", "port": 90, "targetPort": 8081, "protocol": "UDP"}),
            service("sticky", "web", {"port": 80, "targetPort": 8080},
                    sessionAffinity="ClientIP"),
        )  # fmt: skip
        for name in ("one", "two", "client"):
            ns.wait_ready(name)
        yield ns


def get(ns: Namespace, url: str, client: str = "client") -> str:
    """The answer's body; "" if there is none."""
    return ns.kubectl(
        "exec", client, "--", "wget", "-q", "-T", "3", "-O-", url, check=False
    ).out.strip()


def test_a_cluster_address_leads_to_pods_on_every_node(space: Namespace) -> None:
    address = space.get("service", "web")["spec"]["clusterIP"]
    assert ipaddress.ip_address(address) in ipaddress.ip_network("10.96.0.0/16")
    seen: set[str] = set()

    def look() -> bool:
        seen.add(get(space, f"http://{address}/hostname"))
        return {"one", "two"} <= seen

    eventually("both pods answered", look, 30)
    assert get(space, "http://web/echo?msg=named") == "named"
    assert space.pod("one")["status"]["podIP"] != space.pod("two")["status"]["podIP"]


def test_a_pod_reaches_itself_through_its_service(space: Namespace) -> None:
    """Until the answer came from the pod that asked; its own name is in its /etc/hosts."""
    url = f"http://web.{space.name}/hostname"
    eventually("one answered one", lambda: get(space, url, "one") == "one", 30)


def test_pods_of_one_node_whose_iptables_see_no_bridges(space: Namespace, registry: str) -> None:
    """As on sites with bridge-nf-call-iptables=0, which no user can change."""
    off = "sysctl -qw net.bridge.bridge-nf-call-iptables=0"
    network = "nsenter --net=/proc/$(pgrep -u bob -x flanneld)/ns/net"
    User("root").run("bash", "-c", f"{off}; {network} {off}", node="node1")
    flags = {"slurm-job.hpk.io/flags": "--nodelist=node1"}
    space.create(
        pod("near", "sleep", "100000", image=f"{registry}/busybox:1", annotations=flags,
            terminationGracePeriodSeconds=0),
        service("one", "web", {"port": 80, "targetPort": 8080}),
    )  # fmt: skip
    space.wait_ready("near")
    eventually("its neighbour", lambda: get(space, "http://one/hostname", "near") == "one", 30)


def test_udp_is_served(space: Namespace) -> None:
    """A server asks in the client's name, and tells what came back."""
    one = space.pod("one")["status"]["podIP"]
    target = f"host=web.{space.name}&port=90&protocol=udp&request=hostname&tries=1"
    answers = ('{"responses":["one"]}', '{"responses":["two"]}')
    eventually(
        "a datagram came back",
        lambda: get(space, f"http://{one}:8080/dial?{target}") in answers,
        30,
    )


def test_session_affinity_stays_with_one_pod(space: Namespace) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9 10; do wget -q -T 3 -O- http://sticky/hostname; echo; done"
    eventually("it answers", lambda: get(space, "http://sticky/hostname"), 30)
    answers = space.kubectl("exec", "client", "--", "sh", "-c", script).out.split()
    assert len(answers) == 10 and len(set(answers)) == 1


def test_a_pod_is_served_while_it_is_ready(space: Namespace, registry: str) -> None:
    late = server("late", registry, "late")
    late["spec"]["containers"][0]["readinessProbe"] = {
        "exec": {"command": ["test", "-f", "/tmp/ready"]},
        "periodSeconds": 1, "failureThreshold": 1,
    }  # fmt: skip
    space.create(late, service("late", "late", {"port": 80, "targetPort": 8080}))
    space.wait_phase("late", "Running")
    assert get(space, "http://late/hostname") == ""
    space.kubectl("exec", "late", "--", "touch", "/tmp/ready")
    eventually("it answers once it is ready", lambda: get(space, "http://late/hostname"), 30)
    space.kubectl("exec", "late", "--", "rm", "/tmp/ready")
    eventually("it no longer does", lambda: not get(space, "http://late/hostname"), 30)


def test_the_api_server_has_its_address_on_every_node(space: Namespace) -> None:
    """Also on the control job's own, whose address pods can't dial as it is."""
    for client in ("one", "two"):
        answer = space.kubectl(
            "exec", client, "--", "wget", "-T", "3", "-O-", "--no-check-certificate",
            "https://10.96.0.1/version", check=False,
        )  # fmt: skip
        assert "401 Unauthorized" in answer.err, client


def test_node_ports_are_said_to_be_missing(space: Namespace) -> None:
    space.create(service("np", "web", {"port": 80}, type="NodePort"))
    eventually("an Event", lambda: "NodePortNotServed" in space.reasons("np"), 15)


# --- from the control plane to pods


def test_the_api_server_proxies_to_pods_and_services(ns: Namespace, registry: str) -> None:
    ns.create(
        server("web", registry, "web"),
        service("web", "web", {"name": "http", "port": 80, "targetPort": "web"}),
    )
    ns.wait_ready("web")
    base = f"/api/v1/namespaces/{ns.name}"
    for path in ("pods/web:8080", "services/web:http"):
        answer = eventually(
            path,
            lambda path=path: (
                ns.kubectl("get", "--raw", f"{base}/{path}/proxy/echo?msg=through", check=False).out
            ),
            15,
        )
        assert answer == "through"
    refused = ns.kubectl("get", "--raw", f"{base}/pods/web:17/proxy/", check=False)
    assert refused.code != 0 and "refused" in refused.err


def certificate(name: str) -> tuple[str, str]:
    """A key and a certificate of its own making for that DNS name, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem.decode(), made.public_bytes(serialization.Encoding.PEM).decode()


def tls_server(name: str, ns: Namespace, registry: str, *arguments: str) -> str:
    """Creates a pod of agnhost that serves TLS, and its Service; its certificate."""
    key, cert = certificate(f"{name}.{ns.name}.svc")
    whole = server(name, registry, name, *arguments, "--tls-cert-file=/tls/c",
                   "--tls-private-key-file=/tls/k")  # fmt: skip
    whole["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": "tls"}}]
    whole["spec"]["containers"][0]["volumeMounts"] = [{"name": "tls", "mountPath": "/tls"}]
    ns.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"},
         "stringData": {"c": cert, "k": key}},
        whole,
        service(name, name, {"port": 443, "targetPort": 8443}),
    )  # fmt: skip
    ns.wait_ready(name)
    return base64.b64encode(cert.encode()).decode()


def test_an_api_served_by_a_pod_is_aggregated(ns: Namespace, registry: str) -> None:
    bundle = tls_server("api", ns, registry, "netexec", "--http-port=8443", "--udp-port=-1")
    group = f"{ns.name}.example.com"
    ns.create(
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1.{group}"},
            "spec": {
                "group": group,
                "version": "v1",
                "groupPriorityMinimum": 1000,
                "versionPriority": 10,
                "caBundle": bundle,
                "service": {"namespace": ns.name, "name": "api", "port": 443},
            },
        }
    )
    try:
        ns.kubectl("wait", f"apiservice/v1.{group}", "--for=condition=Available", "--timeout=30s")
        assert ns.kubectl("get", "--raw", f"/apis/{group}/v1").out.startswith("NOW: ")
    finally:
        ns.kubectl("delete", "apiservice", f"v1.{group}")


def test_a_webhook_in_a_pod_denies(ns: Namespace, registry: str) -> None:
    bundle = tls_server("hook", ns, registry, "webhook", "--port=8443")
    config = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": ns.name},
        "webhooks": [
            {
                "name": "deny.example.com",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 5,
                "namespaceSelector": {
                    "matchLabels": {"kubernetes.io/metadata.name": ns.name}
                },
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["configmaps"],
                    }
                ],
                "clientConfig": {
                    "caBundle": bundle,
                    "service": {"namespace": ns.name, "name": "hook", "path": "/always-deny"},
                },
            }
        ],
    }  # fmt: skip
    ns.create(config)
    try:

        def denied(number: list[int]) -> bool:
            number[0] += 1
            made = ns.kubectl("create", "configmap", f"c{number[0]}", check=False)
            return "this webhook denies all requests" in made.err

        eventually("the webhook's own words", partial(denied, [0]), 20)
    finally:
        ns.kubectl("delete", "validatingwebhookconfiguration", ns.name)


def test_a_network_policy_is_said_to_restrict_nothing(ns: Namespace) -> None:
    ns.create(
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
         "metadata": {"name": "deny"}, "spec": {"podSelector": {}}}
    )  # fmt: skip
    eventually("an Event", lambda: "NotEnforced" in ns.reasons("deny"), 15)
