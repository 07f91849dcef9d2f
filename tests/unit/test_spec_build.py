from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_samples import Config, Image, Object, container, inputs, pod

from hpk_kubelet.config import SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.admission import rejection
from hpk_kubelet.spec.build import build_plan
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.ranks import main_container
from hpk_kubelet.spec.references import Reference, image_pull_secrets, references
from hpk_kubelet.spec.resources import granted
from hpk_kubelet.spec.sysctls import check_allowed, forbidden_sysctl
from hpk_kubelet.spec.unsupported import unsupported

API = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "6443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "6443",
    "KUBERNETES_PORT": "tcp://10.0.0.1:6443",
    "KUBERNETES_PORT_6443_TCP": "tcp://10.0.0.1:6443",
    "KUBERNETES_PORT_6443_TCP_PROTO": "tcp",
    "KUBERNETES_PORT_6443_TCP_PORT": "6443",
    "KUBERNETES_PORT_6443_TCP_ADDR": "10.0.0.1",
}
BASE = {"PATH": "/bin", "LANG": "C", "HOSTNAME": "p", "HOME": "/root", **API}
OBJECTS: dict[tuple[str, str], Object | None] = {
    ("ConfigMap", "c"): {"data": {"k": "v", "a.b": "dots", "q": "it's \"\n"}},
    ("Secret", "s"): {"data": {"k": base64.b64encode(b"\xff\0"[:1]).decode(), "t": "dHdv"}},
    ("ConfigMap", "gone"): None,
    ("Secret", "gone"): None,
}


def main_plan(*, image: Image | None = None, pod_fields: Object | None = None, **more: Any) -> Any:
    changes = {key: more.pop(key) for key in ("objects", "services", "volumes") if key in more}
    whole = pod(container(**more), **(pod_fields or {}))
    return build_plan(whole, inputs(whole, image, **changes))["containers"][0]


def own_env(plan: Any) -> Object:
    return {k: v for k, v in plan["env"].items() if BASE.get(k) != v}


def refused(**more: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        main_plan(**more)
    return caught.value


NODE_RESOLVER = {
    "nameservers": [], "searches": [], "options": [], "node": "everything",
    "config": {"nameservers": [], "searches": [], "options": []},
}  # fmt: skip
ROOTLESS: Object = {
    "mode": "rootless",
    "cluster": "c",
    "facts": {"revision": 1, "dns": {"address": "10.96.0.10", "target": ""}},
}


def test_the_whole_plan_of_a_small_pod() -> None:
    whole = pod()
    assert build_plan(whole, inputs(whole)) == {
        "version": 2,
        "uid": "u-1",
        "namespace": "ns",
        "name": "p",
        "created": 1000.0,
        "hostname": "p",
        "network": {"mode": "host"},
        "hostPorts": [],
        "shareProcessNamespace": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "startTime": 990.0,
        "initContainers": [],
        "containers": [
            {
                "name": "main",
                "image": {
                    "reference": "app:1",
                    "id": "registry/app@sha256:1",
                    "digest": "sha256:1",
                    "rootfs": "/images/1/rootfs",
                },
                "argv": ["/entry", "default"],
                "env": BASE,
                "workingDir": "/srv",
                "mounts": [],
                "security": {
                    "uid": 0,
                    "gid": 0,
                    "groups": [],
                    "readOnlyRootFilesystem": False,
                    "privileged": False,
                },
                "restartPolicy": "Never",
                "sidecar": False,
                "tty": False,
                "stdin": False,
                "stdinOnce": False,
                "stopSignal": "SIGTERM",
                "terminationMessagePath": "/dev/termination-log",
                "terminationMessagePolicy": "File",
            }
        ],
        "volumes": {},
        "resolver": {**NODE_RESOLVER},
        "hosts": {
            "header": "# Kubernetes-managed hosts file.\n",
            "node": True,
            "names": ["p"],
            "aliases": "",
        },
        "agent": {
            "token": "secret-token",
            "kubelet": "/h/.hpk/run/kubelet.json",
            "ca": "/h/.hpk/pki/ca.crt",
            "localDir": "/tmp",
        },
    }


def test_the_whole_plan_of_a_large_pod() -> None:
    whole = pod(
        container(
            command=["run", "$(IP)", "--at=http://$(IP):$(N)/"],
            args=["$(NOPE)"],
            workingDir="rel",
            tty=True,
            stdin=True,
            env=[
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "N", "value": "80"},
                {"name": "HOME", "value": "/data"},
            ],
            ports=[{"name": "web", "containerPort": 8080}],
            livenessProbe={"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 5},
            readinessProbe={"exec": {"command": ["test", "$(N)", "$(IP)", "$(X)"]}},
            startupProbe={"tcpSocket": {"port": "81"}},
            lifecycle={"preStop": {"httpGet": {"port": "web"}}, "stopSignal": "SIGUSR1"},
            resources={"limits": {"memory": "64Mi"}},
            securityContext={
                "runAsGroup": 5,
                "capabilities": {"add": ["CAP_NET_RAW", "SYS_PTRACE"], "drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            volumeMounts=[
                {"name": "v", "mountPath": "/data", "subPathExpr": "d/$(N)"},
                {"name": "v", "mountPath": "late", "subPathExpr": "ip-$(IP)", "readOnly": True},
                {"name": "cm", "mountPath": "/cm", "subPath": "key"},
            ],
        ),
        container("other"),
        initContainers=[
            container("first"),
            container(
                "side", restartPolicy="Always", image="app:2",
            ),
        ],
        restartPolicy="Always",
        hostNetwork=True,
        subdomain="sub",
        hostAliases=[{"ip": "1.2.3.4", "hostnames": ["a", "b"]}],
        securityContext={"runAsUser": 77, "fsGroup": 9, "supplementalGroups": [5, 11]},
        activeDeadlineSeconds=60,
        terminationGracePeriodSeconds=0,
        shareProcessNamespace=True,
    )  # fmt: skip
    plan = build_plan(
        whole,
        inputs(
            whole,
            volumes={
                "v": {"kind": "hostPath", "path": "/x", "type": ""},
                "cm": {"kind": "directory", "path": "/p/volumes/cm"},
            },
            mpi=["--mpi=pmix"],
            gpus="nvidia",
        ),
    )
    assert {k: v for k, v in plan.items() if k not in ("containers", "initContainers")} == {
        "version": 2,
        "uid": "u-1",
        "namespace": "ns",
        "name": "p",
        "created": 1000.0,
        "hostname": "",
        "network": {"mode": "host"},
        "hostPorts": [],
        "shareProcessNamespace": True,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 0,
        "activeDeadlineSeconds": 60,
        "startTime": 990.0,
        "volumes": {
            "v": {"kind": "hostPath", "path": "/x", "type": ""},
            "cm": {"kind": "directory", "path": "/p/volumes/cm"},
        },
        "resolver": {**NODE_RESOLVER},
        "hosts": {
            "header": "# Kubernetes-managed hosts file (host network).\n",
            "node": True,
            "names": [],
            "aliases": "\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n",
        },
        "fsGroup": 9,
        "gpus": "nvidia",
        "agent": plan["agent"],
    }
    main, other = plan["containers"]
    assert {k: v for k, v in main.items() if k != "image"} == {
        "name": "main",
        "argv": ["run", "", "", "$(NOPE)"],
        "lateArgv": {"1": ["", "podIP", ""], "2": ["--at=http://", "podIP", ":80/"]},
        "env": {"PATH": "/bin", "LANG": "C", "TERM": "xterm", "HOME": "/data", "N": "80", **API},
        "lateEnv": {"IP": ["", "podIP", ""], "HOSTNAME": ["", "hostname", ""]},
        "workingDir": "/rel",
        "mounts": [
            {"volume": "v", "subPath": "d/80", "target": "/data", "readOnly": False},
            {
                "volume": "v",
                "subPath": "",
                "lateSubPath": ["ip-", "podIP", ""],
                "target": "/late",
                "readOnly": True,
            },
            {"volume": "cm", "subPath": "key", "target": "/cm", "readOnly": True},
        ],
        "security": {
            "uid": 77,
            "gid": 5,
            "groups": [9, 11],
            "readOnlyRootFilesystem": True,
            "privileged": False,
            "capabilities": ["NET_RAW", "SYS_PTRACE"],
            "dropCapabilities": ["ALL"],
        },
        "restartPolicy": "Always",
        "sidecar": False,
        "tty": True,
        "stdin": True,
        "stdinOnce": False,
        "stopSignal": "SIGUSR1",
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "livenessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 5},
        # a probe sees plain values only: a variable with valueFrom is empty to it
        "readinessProbe": {"exec": {"command": ["test", "80", "", "$(X)"]}},
        "startupProbe": {"tcpSocket": {"port": 81}},
        "lifecycle": {"preStop": {"httpGet": {"port": 8080}}, "stopSignal": "SIGUSR1"},
        "memoryLimit": 67108864,
        "mpi": ["--mpi=pmix"],
    }
    assert "mpi" not in other
    assert [(c["name"], c["restartPolicy"], c["sidecar"]) for c in plan["initContainers"]] == [
        ("first", "OnFailure", False),
        ("side", "Always", True),
    ]


@pytest.mark.parametrize(
    ("fields", "argv"),
    [
        ({}, ["/entry", "default"]),
        ({"args": ["x"]}, ["/entry", "x"]),
        ({"command": ["c"]}, ["c"]),
        ({"command": ["c"], "args": ["x"]}, ["c", "x"]),
        ({"command": [], "args": []}, ["/entry", "default"]),
    ],
)
def test_command_and_args(fields: Object, argv: list[str]) -> None:
    assert main_plan(**fields)["argv"] == argv


def test_no_command_at_all() -> None:
    error = refused(image=Image(Config(entrypoint=(), cmd=())))
    assert (error.reason, error.container) == ("CreateContainerError", "main")
    assert error.message.startswith("no command specified")


def test_every_source_of_variables() -> None:
    plan = main_plan(
        objects=OBJECTS,
        pod_fields={"metadata": {"labels": {"l": "label"}, "annotations": {"x/y": "note"}}},
        resources={"limits": {"cpu": "1500m"}, "requests": {"memory": "1Gi"}},
        envFrom=[
            {"configMapRef": {"name": "c"}, "prefix": "P_"},
            {"secretRef": {"name": "s"}},
            {"configMapRef": {"name": "gone", "optional": True}},
            {"secretRef": {"name": "gone", "optional": True}},
        ],
        env=[
            {"name": "t", "value": "over"},
            {"name": "REF", "value": "$(P_k) $(t) $$(t) $(LATER) $(KUBERNETES_SERVICE_HOST)"},
            {"name": "LATER", "value": ""},
            {"name": "NOTHING"},
            *(
                {"name": name, "valueFrom": source}
                for name, source in {
                    "CM": {"configMapKeyRef": {"name": "c", "key": "q"}},
                    "SEC": {"secretKeyRef": {"name": "s", "key": "t"}},
                    "NO1": {"configMapKeyRef": {"name": "c", "key": "zz", "optional": True}},
                    "NO2": {"secretKeyRef": {"name": "gone", "key": "k", "optional": True}},
                    "NODE": {"fieldRef": {"fieldPath": "spec.nodeName"}},
                    "SA": {"fieldRef": {"fieldPath": "spec.serviceAccountName"}},
                    "UID": {"fieldRef": {"fieldPath": "metadata.uid"}},
                    "LABEL": {"fieldRef": {"fieldPath": "metadata.labels['l']"}},
                    "NOTE": {"fieldRef": {"fieldPath": "metadata.annotations['x/y']"}},
                    "ABSENT": {"fieldRef": {"fieldPath": "metadata.labels['zz']"}},
                    "HOSTS": {"fieldRef": {"fieldPath": "status.hostIPs"}},
                    "CPU": {"resourceFieldRef": {"resource": "limits.cpu"}},
                    "MILLI": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}},
                    "MEM": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Gi"}},
                    "REQ": {"resourceFieldRef": {"resource": "requests.memory", "divisor": "1Mi"}},
                    "DISK": {"resourceFieldRef": {"resource": "limits.ephemeral-storage"}},
                }.items()
            ),
        ],
    )
    assert own_env(plan) == {
        "P_k": "v", "P_a.b": "dots", "P_q": "it's \"\n",
        "k": "\udcff", "t": "over",
        "REF": "v over $(t) $(LATER) 10.0.0.1", "LATER": "", "NOTHING": "",
        "CM": "it's \"\n", "SEC": "two",
        "NODE": "part", "SA": "default", "UID": "u-1", "LABEL": "label", "NOTE": "note",
        "ABSENT": "", "CPU": "2", "MILLI": "1500", "MEM": "64", "REQ": "1024",
        "DISK": str(2**40),
    }  # fmt: skip
    assert plan["lateEnv"] == {"HOSTS": ["", "hostIPs", ""]}


def value_from(source: Object) -> Object:
    return {"env": [{"name": "X", "valueFrom": source}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"envFrom": [{"configMapRef": {"name": "gone"}}]}, 'configmap "gone" not found'),
        ({"envFrom": [{"secretRef": {"name": "gone"}}]}, 'secret "gone" not found'),
        (value_from({"configMapKeyRef": {"name": "gone", "key": "k"}}),
         'configmap "gone" not found'),
        (value_from({"configMapKeyRef": {"name": "c", "key": "zz"}}),
         "couldn't find key zz in ConfigMap ns/c"),
        (value_from({"secretKeyRef": {"name": "s", "key": "zz"}}),
         "couldn't find key zz in Secret ns/s"),
        (value_from({"fieldRef": {"fieldPath": "spec.zz"}}), "unsupported fieldPath: spec.zz"),
        (value_from({"resourceFieldRef": {"resource": "limits.zz"}}),
         "unsupported container resource : limits.zz"),
        ({"volumeMounts": [{"name": "zz", "mountPath": "/m"}]},
         'cannot find volume "zz" to mount into container "main"'),
        ({"volumeMounts": [{"name": "v", "mountPath": "/m", "subPath": "/abs"}]},
         "error SubPath `/abs` must not be an absolute path"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/m", "subPathExpr": "a/$(UP)"}],
          "env": [{"name": "UP", "value": "../.."}]},
         "unable to provision SubPath `a/../..`: must not contain '..'"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/m", "subPathExpr": "$(B)$(A)"}]},
         "missing value for A, B"),
        ({"resources": {"limits": {"memory": "1 GB"}}},
         "'1 GB' is not a quantity such as 500m, 2 or 1.5Gi"),
        ({"securityContext": {"runAsNonRoot": True}},
         'container has runAsNonRoot and image will run as root (pod: "p_ns(u-1)", '
         "container: main)"),
        ({"securityContext": {"runAsNonRoot": True, "runAsUser": 0}},
         'container\'s runAsUser breaks non-root policy (pod: "p_ns(u-1)", container: main)'),
    ],
)  # fmt: skip
def test_what_waits_with_the_kubelets_words(fields: Object, message: str) -> None:
    error = refused(objects=OBJECTS, volumes={"v": {"kind": "emptyDir"}}, **fields)
    assert (error.message, error.reason, error.container, error.event) == (
        message, "CreateContainerConfigError", "main", ("Failed", f"Error: {message}"),
    )  # fmt: skip


def test_users_of_the_image() -> None:
    def security(user: str, **of_pod: Any) -> Object:
        plan: Object = main_plan(
            image=Image(Config(user=user)), pod_fields={"securityContext": of_pod}
        )["security"]
        return {key: plan[key] for key in ("uid", "gid", "groups")}

    assert security("app") == {"uid": 1000, "gid": 1001, "groups": [44]}
    assert security("app", fsGroup=44, supplementalGroups=[1001, 8]) == {
        "uid": 1000, "gid": 1001, "groups": [44, 8],
    }  # fmt: skip
    assert security("app", supplementalGroupsPolicy="Strict")["groups"] == []
    assert security("app", runAsUser=5, runAsGroup=6) == {"uid": 5, "gid": 6, "groups": []}
    assert security("1000", runAsNonRoot=True)["uid"] == 1000
    error = refused(image=Image(Config(user="nobody")))
    assert (error.reason, error.message) == (
        "CreateContainerError",
        "unable to find user nobody: no matching entries in passwd file",
    )
    error = refused(image=Image(Config(user="app")), securityContext={"runAsNonRoot": True})
    assert error.message == (
        "container has runAsNonRoot and image has non-numeric user (app), cannot verify user is "
        'non-root (pod: "p_ns(u-1)", container: main)'
    )
    assert main_plan(image=Image(Config(user="app")))["env"]["HOME"] == "/home/app"


@pytest.mark.parametrize(
    ("said", "signal"),
    [("", "SIGTERM"), ("15", "SIGTERM"), ("9", "SIGKILL"), ("quit", "SIGQUIT"),
     ("SIGINT", "SIGINT"), ("SIGRTMIN+3", "SIGRTMIN+3"), ("999", "SIGTERM")],
)  # fmt: skip
def test_the_images_stop_signal(said: str, signal: str) -> None:
    assert main_plan(image=Image(Config(stop_signal=said)))["stopSignal"] == signal


def test_a_port_that_no_one_declares() -> None:
    error = refused(livenessProbe={"httpGet": {"port": "zz"}})
    assert 'names port "zz"' in error.message


def test_service_links() -> None:
    services = [
        {
            "metadata": {"name": "my-db"},
            "spec": {
                "clusterIP": "10.9.9.9",
                "ports": [{"name": "sql-x", "port": 5432}, {"name": "u", "port": 53,
                                                            "protocol": "UDP"}],
            },
        },
        {"metadata": {"name": "headless"}, "spec": {"clusterIP": "None", "ports": [{"port": 1}]}},
        {"metadata": {"name": "external"}, "spec": {"type": "ExternalName"}},
    ]  # fmt: skip
    assert own_env(main_plan(services=services)) == {
        "MY_DB_SERVICE_HOST": "10.9.9.9",
        "MY_DB_SERVICE_PORT": "5432",
        "MY_DB_SERVICE_PORT_SQL_X": "5432",
        "MY_DB_SERVICE_PORT_U": "53",
        "MY_DB_PORT": "tcp://10.9.9.9:5432",
        "MY_DB_PORT_5432_TCP": "tcp://10.9.9.9:5432",
        "MY_DB_PORT_5432_TCP_PROTO": "tcp",
        "MY_DB_PORT_5432_TCP_PORT": "5432",
        "MY_DB_PORT_5432_TCP_ADDR": "10.9.9.9",
        "MY_DB_PORT_53_UDP": "udp://10.9.9.9:53",
        "MY_DB_PORT_53_UDP_PROTO": "udp",
        "MY_DB_PORT_53_UDP_PORT": "53",
        "MY_DB_PORT_53_UDP_ADDR": "10.9.9.9",
    }
    assert own_env(main_plan(services=services, pod_fields={"enableServiceLinks": False})) == {}


@pytest.mark.parametrize(
    ("metadata", "spec", "hostname", "names"),
    [
        ({}, {"hostname": "h", "subdomain": "s"}, "h", ["h.s.ns.svc.cluster.local", "h"]),
        ({}, {"hostname": "h", "subdomain": "s", "setHostnameAsFQDN": True},
         "h.s.ns.svc.cluster.local", ["h.s.ns.svc.cluster.local", "h"]),
        ({"name": "x" * 62 + "-y"}, {}, "x" * 62, ["x" * 62]),
        ({}, {"hostNetwork": True}, "", []),
    ],
)  # fmt: skip
def test_hostnames(metadata: Object, spec: Object, hostname: str, names: list[str]) -> None:
    whole = pod(metadata=metadata, **spec)
    plan = build_plan(whole, inputs(whole))
    assert (plan["hostname"], plan["hosts"]["names"]) == (hostname, names)


def test_a_resolver_of_its_own() -> None:
    whole = pod(
        dnsPolicy="None",
        dnsConfig={
            "nameservers": ["1.1.1.1", "1.1.1.1"],
            "searches": ["a.b", "c"],
            "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}],
        },
    )
    own = {"nameservers": ["1.1.1.1", "1.1.1.1"], "searches": ["a.b", "c"],
           "options": ["ndots:2", "edns0"]}  # fmt: skip
    assert build_plan(whole, inputs(whole))["resolver"] == {
        "nameservers": [], "searches": [], "options": [], "node": "nothing", "config": own
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "node", "nameservers"),
    [
        ({}, "searches", ["10.96.0.10"]),
        ({"dnsPolicy": "ClusterFirst"}, "searches", ["10.96.0.10"]),
        ({"dnsPolicy": "Default"}, "everything", []),
        ({"hostNetwork": True}, "everything", []),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}, "everything", []),
    ],
)
def test_resolvers(spec: Object, node: str, nameservers: list[str]) -> None:
    whole = pod(**spec)
    resolver = build_plan(whole, inputs(whole, network=ROOTLESS))["resolver"]
    assert (resolver["node"], resolver["nameservers"]) == (node, nameservers)
    if nameservers:
        assert resolver["searches"] == ["ns.svc.cluster.local", "svc.cluster.local",
                                        "cluster.local"]  # fmt: skip
        assert resolver["options"] == ["ndots:5"]


def test_a_network_of_its_own() -> None:
    port = {"containerPort": 80, "hostPort": 8080, "hostIP": "10.0.0.1"}
    whole = pod(container(ports=[port, {"containerPort": 81}]))
    plan = build_plan(whole, inputs(whole, network=ROOTLESS))
    assert plan["network"] == ROOTLESS
    assert plan["hosts"]["header"].startswith("# Kubernetes-managed hosts file.\n127.0.0.1")
    assert not plan["hosts"]["node"]
    assert plan["hostPorts"] == [
        {"address": "10.0.0.1", "port": 8080, "target": 80, "protocol": "TCP"}
    ]
    whole["spec"]["hostNetwork"] = True
    plan = build_plan(whole, inputs(whole, network=ROOTLESS))
    assert plan["network"] == {"mode": "host"} and not plan["hostPorts"]
    ranks = build_plan(pod(), inputs(pod(), network=ROOTLESS, mpi=["-n2"]))
    assert ranks["network"] == {"mode": "host"}


def test_which_container_is_ranks() -> None:
    assert main_container(pod(container("wait"), container("main"))) == "main"
    assert main_container(pod(container("a"), container("b"))) == "a"


def test_references() -> None:
    whole = pod(
        container(
            envFrom=[{"configMapRef": {"name": "a", "optional": True}}],
            env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                 {"name": "Y", "value": "plain"}],
        ),
        volumes=[
            {"name": "1", "configMap": {"name": "a"}},
            {"name": "2", "secret": {"secretName": "t", "optional": True}},
            {"name": "3", "projected": {"sources": [
                {"configMap": {"name": "b"}}, {"secret": {"name": "t", "optional": True}},
                {"serviceAccountToken": {"path": "t"}}]}},
            {"name": "4", "persistentVolumeClaim": {"claimName": "pvc"}},
            {"name": "5", "emptyDir": {}},
        ],
        imagePullSecrets=[{"name": "pull"}, {}],
    )  # fmt: skip
    assert references(whole) == [
        Reference("ConfigMap", "a", False),
        Reference("Secret", "s", False),
        Reference("Secret", "t", True),
        Reference("ConfigMap", "b", False),
        Reference("PersistentVolumeClaim", "pvc", False),
    ]
    assert image_pull_secrets(whole) == ["pull"]


def test_what_is_not_supported_is_told() -> None:
    assert unsupported(pod(), own_network=True) == []
    whole = pod(
        container(
            ports=[{"containerPort": 80, "hostPort": 81}],
            volumeMounts=[{"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}],
            securityContext={
                "privileged": True,
                "capabilities": {"add": ["SYS_TIME", "NET_ADMIN"]},
                "seLinuxOptions": {"level": "s0"},
                "runAsUser": 7,
            },
        ),
        metadata={"annotations": {"slurm-job.hpk.io/mpi-flag": "--mpi=pmix"}},
        securityContext={"appArmorProfile": {"type": "Localhost"}},
        affinity={"podAntiAffinity": {"x": []}},
        topologySpreadConstraints=[{}],
        hostPID=True,
        runtimeClassName="gvisor",
        dnsPolicy="ClusterFirstWithHostNet",
    )
    told = unsupported(whole, own_network=False)
    for word in ("podAntiAffinity", "topologySpread", "hostPID", "runtimeClassName", "dnsPolicy",
                 "hostPort 81", "Bidirectional", "privileged", "capability SYS_TIME is",
                 "seLinuxOptions", "appArmorProfile", "runAsUser are ignored"):  # fmt: skip
        assert sum(word in entry.message for entry in told) == 1, word
    own = [entry.message for entry in unsupported(whole, own_network=True)]
    assert not any("hostPort" in message or "dnsPolicy" in message for message in own)


NAMES = st.text(min_size=1, max_size=8)
TEXTS = st.text(max_size=30) | st.sampled_from(["$(A)", "$$", "$(", "'\"\n\t;`$(id)`\\"])
SOURCES = st.one_of(
    st.fixed_dictionaries({"fieldRef": st.fixed_dictionaries({"fieldPath": TEXTS})}),
    st.fixed_dictionaries(
        {"resourceFieldRef": st.fixed_dictionaries({"resource": TEXTS, "divisor": TEXTS})}
    ),
    st.fixed_dictionaries(
        {"configMapKeyRef": st.fixed_dictionaries({"name": NAMES, "key": NAMES})}
    ),
    st.fixed_dictionaries({"secretKeyRef": st.fixed_dictionaries({"name": NAMES, "key": NAMES})}),
)
ENV = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"value": TEXTS, "valueFrom": SOURCES}),
    max_size=5,
)


@settings(deadline=None)
@given(
    env=ENV,
    command=st.lists(TEXTS, max_size=4),
    args=st.lists(TEXTS, max_size=4),
    data=st.dictionaries(NAMES, TEXTS, max_size=3),
    sub_path=TEXTS,
    user=TEXTS,
    labels=st.dictionaries(NAMES, TEXTS, max_size=2),
)
def test_any_text_survives_or_is_refused_with_words(
    env: list[Object],
    command: list[str],
    args: list[str],
    data: dict[str, str],
    sub_path: str,
    user: str,
    labels: dict[str, str],
) -> None:
    whole = pod(
        container(
            command=command,
            args=args,
            env=env,
            envFrom=[{"configMapRef": {"name": "c"}}],
            volumeMounts=[{"name": "v", "mountPath": "/v", "subPath": sub_path}],
        ),
        metadata={"labels": labels},
    )
    given_inputs = inputs(
        whole,
        Image(Config(user=user)),
        objects={("ConfigMap", "c"): {"data": data}},
        volumes={"v": {"kind": "emptyDir"}},
    )
    try:
        plan = build_plan(whole, given_inputs)
    except HPKError as e:
        assert str(e)
        return
    assert json.loads(json.dumps(plan)) == plan
    for key, value in data.items():
        if all(entry["name"] != key for entry in env):
            assert plan["containers"][0]["env"][key] == value
    for entry in env:
        if (
            "$" not in entry.get("value", "$")
            and entry["value"]
            and env.count(entry) == len([e for e in env if e["name"] == entry["name"]])
        ):
            assert plan["containers"][0]["env"][entry["name"]] == entry["value"]


def test_limits_that_the_agent_keeps() -> None:
    limits = {"memory": "64Mi", "ephemeral-storage": "1Gi"}
    whole = pod(
        container(resources={"limits": limits}),
        container("b", resources={}),
        initContainers=[container("i", resources={"limits": {"ephemeral-storage": "3Gi"}})],
    )
    plan = build_plan(whole, inputs(whole))
    assert plan["storageLimit"] == 3 * 2**30
    main, other = plan["containers"]
    assert (main["memoryLimit"], main["storageLimit"]) == (64 * 2**20, 2**30)
    assert "memoryLimit" not in other and "storageLimit" not in other
    asks = pod(container(resources={"requests": {"ephemeral-storage": "1Gi"}}))
    assert "storageLimit" not in build_plan(asks, inputs(asks))


def test_what_a_job_gives_is_the_most_a_container_may_use() -> None:
    config = SlurmConfig(default_memory_mb=512, memory_overhead_mb=100)
    asks = pod(container(resources={"requests": {"cpu": "1500m", "memory": "1Gi"}}))
    assert granted(asks, config) == {"cpu": "2", "memory": "1024Mi"}
    assert granted(pod(), config) == {"cpu": "1", "memory": "512Mi"}
    asks["metadata"]["annotations"] = {"slurm-job.hpk.io/flags": "-c 8 --mem=0"}
    assert granted(asks, config) == {"cpu": "8"}


def with_sysctls(*names: str, **more: Any) -> Object:
    return pod(
        securityContext={"sysctls": [{"name": name, "value": "1"} for name in names]}, **more
    )


def test_sysctls() -> None:
    whole = with_sysctls("kernel.shm_rmid_forced", "net/ipv4/tcp_fin_timeout")
    assert forbidden_sysctl(whole, ()) == ""
    assert build_plan(whole, inputs(whole))["sysctls"] == {
        "kernel/shm_rmid_forced": "1",
        "net/ipv4/tcp_fin_timeout": "1",
    }
    assert forbidden_sysctl(with_sysctls("kernel.msgmax"), ()) == (
        'forbidden sysctl: "kernel.msgmax" not allowlisted'
    )
    assert forbidden_sysctl(with_sysctls("kernel.msgmax"), ("kernel.msg*",)) == ""
    of_host = with_sysctls("net.ipv4.tcp_wmem", hostNetwork=True)
    assert "not allowed with host Net enabled" in forbidden_sysctl(of_host, ())
    odd = with_sysctls("net/ipv4/conf/eth0.1/forwarding")
    assert forbidden_sysctl(odd, ("net.ipv4.conf.*",)) == ""
    assert build_plan(odd, inputs(odd))["sysctls"] == {"net/ipv4/conf/eth0.1/forwarding": "1"}
    check_allowed(["kernel.shm*", "net/ipv4/conf/*"])
    with pytest.raises(HPKError, match=r"allowedUnsafeSysctls: vm\.swappiness belongs to no"):
        check_allowed(["vm.swappiness"])


def test_rights_a_container_gives_up() -> None:
    def security(**context: Any) -> Any:
        return main_plan(securityContext=context)["security"]

    assert "noNewPrivileges" not in security() and "unmasked" not in security()
    assert security(allowPrivilegeEscalation=False)["noNewPrivileges"] is True
    assert security(procMount="Unmasked")["unmasked"] is True
    assert security(privileged=True)["unmasked"] is True


def test_who_is_not_admitted() -> None:
    assert rejection(pod(), ()) is None
    assert rejection(pod(os={"name": "linux"}), ()) is None
    reason, words = rejection(pod(os={"name": "windows"}), ()) or ("", "")
    assert reason == "PodOSNotSupported" and "OS field doesn't match" in words
    assert (rejection(with_sysctls("kernel.msgmax"), ()) or ("",))[0] == "SysctlForbidden"


def test_one_misconfigured_container_does_not_hold_up_the_others() -> None:
    bad = container("bad", securityContext={"runAsNonRoot": True})
    whole = pod(container("good"), bad)
    plan = build_plan(whole, inputs(whole))
    assert [c["name"] for c in plan["containers"]] == ["good"]
    why = 'container has runAsNonRoot and image will run as root (pod: "p_ns(u-1)", container: bad)'
    assert plan["misconfigured"] == {
        "bad": {"reason": "CreateContainerConfigError", "message": why}
    }
    # none is left to run, ranks start together, and init containers come first
    with pytest.raises(ConfigError):
        build_plan(pod(bad), inputs(pod(bad)))
    with pytest.raises(ConfigError):
        build_plan(whole, inputs(whole, mpi=[]))
    first = pod(container("good"), initContainers=[bad])
    with pytest.raises(ConfigError):
        build_plan(first, inputs(first))
    assert "misconfigured" not in build_plan(pod(), inputs(pod()))


def test_a_seccomp_profile_comes_with_the_plan() -> None:
    def security(**more: Any) -> Object:
        plan: Object = main_plan(securityContext=more)["security"]
        return plan

    known = {"type": "Localhost", "localhostProfile": "known.json"}
    assert security(seccompProfile=known)["seccomp"] == {
        "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [],
    }  # fmt: skip
    assert security(seccompProfile={"type": "RuntimeDefault"})["seccomp"] == "RuntimeDefault"
    assert "seccomp" not in security(seccompProfile=known, privileged=True)
    unknown = {"type": "Localhost", "localhostProfile": "other.json"}
    error = refused(securityContext={"seccompProfile": unknown})
    assert error.reason == "CreateContainerError"
    assert error.message.startswith("cannot load seccomp profile")
