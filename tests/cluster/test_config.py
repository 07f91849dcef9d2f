"""Environment and volumes: what the API says is what the container sees, byte for byte."""

from __future__ import annotations

import json

from conftest import Namespace, eventually, pod

AWKWARD = "line one\nline 'two' \"three\" $HOME `id` $(id) \\ %s é ☃ \t;&|<>*"


def test_environment_is_byte_exact(ns: Namespace, busybox: str) -> None:
    ns.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"},
         "data": {"key": AWKWARD, "B": "from map"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
         "stringData": {"pem": "-----BEGIN-----\nab==\n-----END-----\n"}},
        pod(
            "env", "env", "-0", image=busybox, serviceAccountName="default",
            container={
                "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c"}}],
                "env": [
                    {"name": "PLAIN", "value": AWKWARD.replace("$(id)", "")},
                    {"name": "EMPTY", "value": ""},
                    {"name": "HOME", "value": "/somewhere"},
                    {"name": "dotted.name", "value": "dots"},
                    {"name": "EXPANDED", "value": "<$(EMPTY)$(HOME)> $$(HOME) $(UNKNOWN)"},
                    {"name": "MAP", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "key"}}},
                    {"name": "PEM", "valueFrom": {"secretKeyRef": {"name": "s", "key": "pem"}}},
                    {"name": "NONE", "valueFrom": {
                        "secretKeyRef": {"name": "nope", "key": "x", "optional": True}}},
                    {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "CPU", "valueFrom": {
                        "resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
                ],
                "resources": {"limits": {"cpu": "500m", "memory": "64Mi"}},
            },
        ),
    )  # fmt: skip
    whole = ns.wait_phase("env", "Succeeded", "Failed")
    env = dict(item.split("=", 1) for item in ns.logs("env").split("\0") if "=" in item)
    want = {
        "PLAIN": AWKWARD.replace("$(id)", ""), "EMPTY": "", "HOME": "/somewhere",
        "dotted.name": "dots", "EXPANDED": "</somewhere> $(HOME) $(UNKNOWN)",
        "MAP": AWKWARD, "P_B": "from map", "P_key": AWKWARD,
        "PEM": "-----BEGIN-----\nab==\n-----END-----\n", "NAME": "env",
        "IP": whole["status"]["podIP"], "CPU": "500", "HOSTNAME": "env",
    }  # fmt: skip
    assert {name: env.get(name) for name in want} == want
    assert "NONE" not in env


def test_arguments_are_byte_exact(ns: Namespace, busybox: str) -> None:
    arguments = ["", " ", "--flag=x y", AWKWARD, "-"]
    command = ["sh", "-c", 'for a in "$@"; do printf "%s\\0" "$a"; done', "x"]
    ns.create(pod("args", *command, *[a.replace("$(id)", "$$(id)") for a in arguments],
                  image=busybox))  # fmt: skip
    ns.wait_phase("args", "Succeeded", "Failed")
    assert ns.logs("args").split("\0")[:-1] == arguments


def test_volumes_of_every_kind(ns: Namespace, busybox: str) -> None:
    home = ns.user.sh("echo $HOME").out.strip()
    ns.user.sh(f"mkdir -p ~/data-{ns.name} && echo mine > ~/data-{ns.name}/file")
    script = """
        cat /cm/key; stat -c %a /cm/..data/key; cat /secret/renamed; stat -L -c %a /secret/renamed
        cat /down/labels; echo; cat /proj/token | cut -c1-3; ls /proj; cat /sub; cat /host/file
        echo x > /ro/x || echo refused; echo back > /host/back
    """
    ns.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"},
         "data": {"key": "value\n", "sub": "subpath\n"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
         "stringData": {"k": "secret\n"}},
        {
            **(whole := pod("vols", "sh", "-c", script, image=busybox)),
            "metadata": {"name": "vols", "labels": {"a": "b"}},
            "spec": {
                **whole["spec"],
                "containers": [{**whole["spec"]["containers"][0], "volumeMounts": [
                    {"name": "cm", "mountPath": "/cm"},
                    {"name": "cm", "mountPath": "/sub", "subPath": "sub"},
                    {"name": "secret", "mountPath": "/secret"},
                    {"name": "down", "mountPath": "/down"},
                    {"name": "proj", "mountPath": "/proj"},
                    {"name": "host", "mountPath": "/host"},
                    {"name": "empty", "mountPath": "/ro", "readOnly": True},
                ]}],
                "volumes": [
                    {"name": "cm", "configMap": {"name": "c", "defaultMode": 0o440}},
                    {"name": "secret", "secret": {"secretName": "s", "items": [
                        {"key": "k", "path": "renamed", "mode": 0o400}]}},
                    {"name": "down", "downwardAPI": {"items": [
                        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
                    {"name": "proj", "projected": {"sources": [
                        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
                        {"configMap": {"name": "kube-root-ca.crt"}}]}},
                    {"name": "host", "hostPath": {
                        "path": f"{home}/data-{ns.name}", "type": "Directory"}},
                    {"name": "empty", "emptyDir": {}},
                ],
            },
        },
    )  # fmt: skip
    ns.wait_phase("vols", "Succeeded", "Failed")
    assert ns.logs("vols").splitlines()[:10] == [
        "value", "440", "secret", "400", 'a="b"', "eyJ", "ca.crt", "token", "subpath", "mine",
    ]  # fmt: skip
    assert "refused" in ns.logs("vols")
    assert ns.user.sh(f"cat ~/data-{ns.name}/back").out == "back\n"


def test_a_pod_reaches_the_api_with_its_own_token(ns: Namespace, busybox: str) -> None:
    script = (
        "cd /var/run/secrets/kubernetes.io/serviceaccount; cat namespace; echo; "
        'wget -q -O - --no-check-certificate --header "Authorization: Bearer $(cat token)" '
        "https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT/version"
    )
    ns.create(pod("inside", "sh", "-c", script, image=busybox))
    ns.wait_phase("inside", "Succeeded", "Failed")
    namespace, _, version = ns.logs("inside").partition("\n")
    assert namespace == ns.name
    assert json.loads(version)["major"] == "1"


def waiting(ns: Namespace, name: str) -> dict:
    for entry in ns.pod(name)["status"].get("containerStatuses", []):
        if "waiting" in entry["state"]:
            found: dict = entry["state"]["waiting"]
            return found
    return {}


def test_a_missing_config_map_is_named_and_waited_for(ns: Namespace, busybox: str) -> None:
    reference = {"configMapKeyRef": {"name": "later", "key": "k"}}
    ns.create(
        pod("waits", "sh", "-c", "echo $V", image=busybox,
            container={"env": [{"name": "V", "valueFrom": reference}]})
    )  # fmt: skip
    eventually(
        "the reason", lambda: waiting(ns, "waits").get("reason") == "CreateContainerConfigError"
    )
    assert 'configmap "later" not found' in waiting(ns, "waits")["message"]
    assert ns.job("waits") == ""
    ns.kubectl("create", "configmap", "later", "--from-literal=other=x")
    eventually("the key is named", lambda: "key k" in waiting(ns, "waits").get("message", ""))
    ns.kubectl("delete", "configmap", "later")
    ns.kubectl("create", "configmap", "later", "--from-literal=k=came")
    ns.wait_phase("waits", "Succeeded", timeout=120)
    assert ns.logs("waits") == "came\n"


def test_the_clusters_own_files_cannot_be_mounted(ns: Namespace, busybox: str) -> None:
    home = ns.user.sh("echo $HOME").out.strip()
    ns.user.sh(f"ln -s ~/.hpk ~/link-{ns.name}")
    for name, path in (("plain", "/.hpk/pki"), ("linked", f"/link-{ns.name}/run")):
        ns.create(
            pod(name, "ls", "/m", image=busybox,
                container={"volumeMounts": [{"name": "h", "mountPath": "/m"}]},
                volumes=[{"name": "h", "hostPath": {"path": home + path}}])
        )  # fmt: skip
        eventually(
            "words", lambda name=name: "hostPath" in ns.kubectl("describe", "pod", name).out
            and ns.phase(name) in ("Pending", "Failed") and ns.job(name) == "",
        )  # fmt: skip


def test_secrets_stay_out_of_slurms_sight(ns: Namespace, busybox: str) -> None:
    ns.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
         "stringData": {"k": "xyzzy-secret"}},
        pod("keeps", "sleep", "1000", image=busybox, container={"env": [
            {"name": "V", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
    )  # fmt: skip
    ns.wait_ready("keeps")
    job = ns.job("keeps")
    seen = ns.user.sh(
        f"scontrol show job {job}; scontrol write batch_script {job} -;"
        f"srun --jobid={job} --overlap ps -eww -o args"
    ).out
    assert "apptainer" in seen.lower()
    assert "xyzzy-secret" not in seen
    loose = (
        "find ~/.hpk -path '*/volumes' -prune -o ! -type l ! -path '*/agent/*' -perm /077 -print"
    )
    assert ns.user.sh(loose).out == "", (
        "others are kept out of everything but by a closed directory"
    )
