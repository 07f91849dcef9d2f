"""What is said of Services; the policies themselves are tried on a real API server."""

from __future__ import annotations

from typing import Any

import pytest

from hpk_kubelet.controllers.services import (
    REQUESTED_TYPE,
    ServiceController,
    event_name,
    manifests,
    warnings,
)
from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube import apply as apply_module
from hpk_kubelet.kube.apply import apply_all, load_manifests
from hpk_kubelet.kube.client import ApiError

Object = dict[str, Any]
MADE = {REQUESTED_TYPE: "ClusterIP"}


def service(name: str = "s", annotations: Object = MADE, **spec: Any) -> Object:
    meta = {"namespace": "default", "name": name, "uid": "u", "annotations": annotations}
    return {"metadata": meta, "spec": {"type": "ClusterIP", "clusterIP": "None", **spec}}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (service(ports=[{"port": 80, "targetPort": 80}]), None),
        (service(ports=[{"port": 80, "targetPort": "web"}]), None),
        (service(ports=[{"port": 80, "targetPort": 8080}]), "port 8080 instead of 80"),
        (service(annotations={}, ports=[{"port": 80, "targetPort": 8080}]), None),
        (service(clusterIP="10.96.1.1"), "cluster address 10.96.1.1"),
        (service("kubernetes", clusterIP="10.96.0.1"), None),
        (service(type="ExternalName", clusterIP=""), None),
    ],
)
def test_warnings(made: Object, expected: str | None) -> None:
    assert [expected in message for _, message in warnings(made)] == ([True] if expected else [])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (service(), "create it again"),
        (service(annotations={}), None),
        (service(clusterIP="10.96.1.1", ports=[{"port": 80, "targetPort": 8080}]), None),
        (service(clusterIP="10.96.1.1", type="NodePort"), "port-forward service/s"),
        (service(type="ExternalName", clusterIP=""), None),
    ],
)
def test_warnings_where_kube_proxy_serves(made: Object, expected: str | None) -> None:
    said = [message for _, message in warnings(made, "clusterIP")]
    assert [expected in message for message in said] == ([True] if expected else [])


def test_an_event_is_named_after_what_it_says() -> None:
    assert event_name(service(), "a") == event_name(service(), "a") != event_name(service(), "b")


def test_each_policy_has_its_binding() -> None:
    found = manifests()
    policies = {m["metadata"]["name"] for m in found if m["kind"].endswith("Policy")}
    bound = {m["spec"]["policyName"] for m in found if m["kind"].endswith("PolicyBinding")}
    assert policies == bound and len(found) == 4
    [warns] = [m for m in found if m["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert warns["spec"]["validationActions"] == ["Warn"]


class Api:
    """Discovery for two groups; a custom kind is served from the third look on."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.looks = 0
        self.dry_runs = ["10.96.0.9", "None"]
        self.refuse: list[ApiError] = []

    async def get(self, path: str) -> Object:
        kinds = [("services", "Service", True), ("services/status", "Service", True)]
        if path == "/apis/x.y/v1":
            self.looks += 1
            if self.looks < 2:
                raise ApiError(404, "NotFound", "no such group")
            kinds = [("things", "Thing", False)] if self.looks > 2 else []
        elif path != "/api/v1":
            kinds = [
                (kind.lower() + "s", kind, False)
                for kind in ("CustomResourceDefinition", *(m["kind"] for m in manifests()))
            ]
        resources = [{"name": n, "kind": k, "namespaced": s} for n, k, s in kinds]
        return {"resources": resources}

    async def patch(self, path: str, body: Object, kind: str, params: Any) -> Object:
        assert kind == "application/apply-patch+yaml" and params["force"] == "true"
        if self.refuse:
            raise self.refuse.pop(0)
        self.applied.append(path)
        return body

    async def create(self, path: str, body: Object, params: Any) -> Object:
        assert params == {"dryRun": "All"}
        return {"spec": {"clusterIP": self.dry_runs.pop(0)}}


CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "things.x.y"},
    "spec": {"group": "x.y", "names": {"kind": "Thing"}, "versions": [{"name": "v1"}]},
}
THING = {"apiVersion": "x.y/v1", "kind": "Thing", "metadata": {"name": "t"}}


async def test_apply_waits_for_its_custom_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(apply_module.asyncio, "sleep", sleep)
    api = Api()
    plain = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n"}}
    await apply_all(api, [CRD, THING, plain])  # type: ignore[arg-type]
    assert api.applied[1:] == ["/apis/x.y/v1/things/t", "/api/v1/namespaces/n/services/s"]
    assert slept
    with pytest.raises(HPKError):
        await apply_all(Api(), [THING])  # type: ignore[arg-type]


def test_manifests_that_are_none() -> None:
    assert load_manifests("---\n---\nkind: List\nitems: [{kind: A}]\n") == [{"kind": "A"}]
    for text in ("a: [", "just text", "a: b"):
        with pytest.raises(HPKError, match="manifest"):
            load_manifests(text)


async def test_installed_means_that_the_api_server_acts_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpk_kubelet.controllers.services.RETRY_PAUSE", 0.0)
    monkeypatch.setattr("hpk_kubelet.controllers.services.POLL", 0.0)
    api = Api()
    api.refuse = [ApiError(403, "Forbidden", "roles are not there yet")]
    await ServiceController(api).install()  # type: ignore[arg-type]
    assert len(api.applied) == 4 and not api.dry_runs
