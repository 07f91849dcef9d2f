"""What the control job tells CoreDNS, kube-proxy and the pods of where things are."""

from pathlib import Path

import pytest

from hpk_kubelet.config import Config, Paths
from hpk_kubelet.controlplane import kube_proxy, pod_network
from hpk_kubelet.controlplane.inside import corefile, dns_manifests
from hpk_kubelet.controlplane.stack import Site
from hpk_kubelet.errors import HPKError
from hpk_kubelet.network.modes import Choice


def test_the_dns_service_leads_to_where_coredns_is() -> None:
    service, endpoints = dns_manifests("10.244.1.6")
    assert service["spec"]["clusterIP"] == "10.96.0.10"
    assert "selector" not in service["spec"]
    assert endpoints["endpoints"][0]["addresses"] == ["10.244.1.6"]
    assert endpoints["metadata"]["labels"]["kubernetes.io/service-name"] == "kube-dns"
    assert endpoints["ports"] == service["spec"]["ports"]


def test_coredns_answers_for_the_cluster_and_asks_the_node_for_the_rest() -> None:
    text = corefile(Path("/h/coredns.kubeconfig"))
    assert "kubernetes cluster.local in-addr.arpa ip6.arpa {" in text
    assert "kubeconfig /h/coredns.kubeconfig" in text
    assert "forward . 192.0.2.53" in text


@pytest.fixture
def site(tmp_path: Path) -> Site:
    ports = {"apiserver": 6443, "etcd": 1}
    return Site(Paths(tmp_path), "10.0.0.1", ports, {"kube-proxy": Path("/c/kube-proxy")})


def test_kube_proxy_is_started_anew_when_the_control_plane_moves(site: Site) -> None:
    moved = Site(site.paths, "10.0.0.2", site.ports, site.binaries)
    one, two = (kube_proxy.daemon(s, "main", "10.244.0.0/16") for s in (site, moved))
    assert one["argv"] == two["argv"] and one != two
    assert not any("key" in word or "token" in word for word in one["argv"])
    assert [word for word in one["argv"] if "address" in word] == [
        "--healthz-bind-address=127.0.0.1:10256",
        "--metrics-bind-address=127.0.0.1:10249",
        "--nodeport-addresses={hostIP}/32",
    ]


def test_the_node_of_kube_proxy_is_remembered(site: Site) -> None:
    spec = kube_proxy.daemon(site, "main", "10.244.0.0/16")
    assert kube_proxy.node_of({"daemons": {"kube-proxy": spec}}) == "main"  # type: ignore[typeddict-item]
    assert kube_proxy.node_of({"daemons": {}}) == ""  # type: ignore[typeddict-item]
    assert kube_proxy.node_of(None) == ""


class Api:
    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    async def get_json(self, path: str) -> object:
        assert path == "/api/v1/nodes"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"items": answer}


async def test_the_default_partitions_node_is_kube_proxys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_proxy, "_LOOK", 0.0)
    default = {"metadata": {"name": "main", "labels": {"hpk.io/default-partition": "true"}}}
    api = Api(HPKError("not yet"), [], [{"metadata": {"name": "debug"}}, default])
    assert await kube_proxy.choose_node(api) == "main"  # type: ignore[arg-type]
    assert await kube_proxy.choose_node(Api([{"metadata": {"name": "a"}}])) == "a"  # type: ignore[arg-type]


def test_cluster_ips_without_a_pod_network_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_network.modes, "missing", lambda: ["pasta is not installed"])
    assert pod_network.choose_mode(Config()) == Choice("host", _why())
    with pytest.raises(HPKError, match=r"serviceMode: clusterIP needs .*pasta is not installed"):
        pod_network.choose_mode(Config(service_mode="clusterIP"))
    assert "kube-proxy" in pod_network.binaries(Config(service_mode="clusterIP"))
    assert "kube-proxy" not in pod_network.binaries(Config())


def _why() -> str:
    return pod_network.modes.choose("auto", ["pasta is not installed"]).why
