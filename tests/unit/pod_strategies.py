"""Pods that the API's schema allows and nobody in his right mind writes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

AWKWARD = [
    "", " ", "\n", "'", '"', "`id`", "$(id)", "$(A)", "$$", "${HOME}", ";reboot", "&", "|cat",
    "a b", "-rf", "--export=ALL", "../..", "/", "/etc/passwd", "\\", "%j", "é☃", "\u202e", "\x00",
    "\r\n#SBATCH --uid=0", "x" * 300, "0", "-1", "1e99", "9" * 40, "true", "null", "~",
]  # fmt: skip
TEXT = st.sampled_from(AWKWARD) | st.text(max_size=20)
DNS_NAME = st.sampled_from(["p", "a-b.c", "0", "x" * 253, "job-1"])  # the API takes no others
NAME = st.sampled_from(["main", "a", "b", "v", "w"]) | TEXT
INT = st.sampled_from([0, 1, -1, 2**31 - 1, 2**63 - 1, -(2**63), 65536]) | st.integers(-5, 99999)
BOOL = st.booleans()
QUANTITY = TEXT | st.sampled_from(["1", "500m", "64Mi", "1Gi", "1Ei", "-1", "1e3", "0"]) | INT
RESOURCES = ["cpu", "memory", "ephemeral-storage", "nvidia.com/gpu", "amd.com/gpu", "x.y/z"]


def fields(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these, each perhaps null."""
    return st.fixed_dictionaries({}, optional={k: v | st.none() for k, v in optional.items()})


def required(
    needed: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(needed, optional=optional)


def many(one: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[list[Any]]:
    return st.lists(one, max_size=most)


AMOUNTS = st.dictionaries(st.sampled_from(RESOURCES) | TEXT, QUANTITY, max_size=3)
KEY_REF = required({"key": TEXT}, name=NAME, optional=BOOL)
FIELD_REF = required({"fieldPath": TEXT | st.sampled_from(["status.podIP", "metadata.name"])})
RESOURCE_REF = required({"resource": TEXT}, containerName=NAME, divisor=QUANTITY)
SOURCE = fields(
    fieldRef=FIELD_REF, resourceFieldRef=RESOURCE_REF, configMapKeyRef=KEY_REF, secretKeyRef=KEY_REF
)
ENV = required({"name": TEXT}, value=TEXT, valueFrom=SOURCE)
PORT = INT | TEXT
HTTP = required({"port": PORT}, path=TEXT, host=TEXT, scheme=TEXT,
                httpHeaders=many(required({"name": TEXT, "value": TEXT})))  # fmt: skip
HANDLER = fields(
    exec=fields(command=many(TEXT)), httpGet=HTTP, tcpSocket=required({"port": PORT}),
    grpc=required({"port": INT}), sleep=required({"seconds": INT}),
)  # fmt: skip
PROBE = HANDLER.map(lambda h: {**h, "periodSeconds": 1})
CONTEXT = fields(
    runAsUser=INT, runAsGroup=INT, runAsNonRoot=BOOL, privileged=BOOL, procMount=TEXT,
    readOnlyRootFilesystem=BOOL, allowPrivilegeEscalation=BOOL,
    capabilities=fields(add=many(TEXT), drop=many(TEXT)),
    seccompProfile=fields(type=TEXT, localhostProfile=TEXT), appArmorProfile=fields(type=TEXT),
)  # fmt: skip
MOUNT = required({"name": NAME, "mountPath": TEXT}, subPath=TEXT, subPathExpr=TEXT, readOnly=BOOL,
                 mountPropagation=TEXT)  # fmt: skip
CONTAINER = required(
    {"name": NAME, "image": TEXT},
    command=many(TEXT), args=many(TEXT), env=many(ENV), workingDir=TEXT, restartPolicy=TEXT,
    envFrom=many(fields(prefix=TEXT, configMapRef=fields(name=NAME), secretRef=fields(name=NAME))),
    resources=fields(requests=AMOUNTS, limits=AMOUNTS), volumeMounts=many(MOUNT),
    ports=many(required({"containerPort": INT}, hostPort=INT, name=TEXT, protocol=TEXT)),
    securityContext=CONTEXT, livenessProbe=PROBE, readinessProbe=PROBE, startupProbe=PROBE,
    lifecycle=fields(postStart=HANDLER, preStop=HANDLER, stopSignal=TEXT),
    terminationMessagePath=TEXT, terminationMessagePolicy=TEXT, tty=BOOL, stdin=BOOL,
)  # fmt: skip
ITEMS = many(required({"key": TEXT, "path": TEXT}, mode=st.integers(0, 0o777)))
FILE_ITEMS = many(required({"path": TEXT}, fieldRef=FIELD_REF, resourceFieldRef=RESOURCE_REF))
PROJECTION = fields(
    configMap=fields(name=NAME, items=ITEMS, optional=BOOL),
    secret=fields(name=NAME, items=ITEMS, optional=BOOL),
    downwardAPI=fields(items=FILE_ITEMS),
    serviceAccountToken=required({"path": TEXT}, audience=TEXT, expirationSeconds=INT),
)
VOLUME = st.tuples(
    NAME,
    st.one_of(
        required({"emptyDir": fields(medium=TEXT, sizeLimit=QUANTITY)}),
        required({"hostPath": required({"path": TEXT}, type=TEXT)}),
        required({"configMap": fields(name=NAME, items=ITEMS, defaultMode=st.integers(0, 511))}),
        required({"secret": fields(secretName=NAME, items=ITEMS, optional=BOOL)}),
        required({"downwardAPI": fields(items=FILE_ITEMS)}),
        required({"projected": fields(sources=many(PROJECTION))}),
        required({"persistentVolumeClaim": required({"claimName": NAME}, readOnly=BOOL)}),
        required({"image": fields(reference=TEXT, pullPolicy=TEXT)}),
        required({"nfs": fields(path=TEXT, server=TEXT)}),
        st.just({}),
    ),
).map(lambda pair: {"name": pair[0], **pair[1]})
ANNOTATIONS = st.dictionaries(
    st.sampled_from(["slurm-job.hpk.io/flags", "slurm-job.hpk.io/mpi-flag", "other"]) | TEXT,
    TEXT | st.lists(TEXT | st.sampled_from(["-p", "--mem=1G", "-n2"]), max_size=3).map(" ".join),
    max_size=3,
)
SPEC = required(
    {"containers": st.lists(CONTAINER, min_size=1, max_size=2)},
    initContainers=many(CONTAINER, 2), volumes=many(VOLUME), restartPolicy=TEXT, hostNetwork=BOOL,
    activeDeadlineSeconds=st.integers(1, 2**31 - 1), hostname=TEXT, subdomain=TEXT,
    terminationGracePeriodSeconds=st.integers(0, 2**63 - 1), setHostnameAsFQDN=BOOL,
    dnsPolicy=TEXT, dnsConfig=fields(
        nameservers=many(TEXT), searches=many(TEXT),
        options=many(required({"name": TEXT}, value=TEXT)),
    ),
    nodeSelector=st.dictionaries(TEXT | TEXT.map("feature.hpk.io/".__add__), TEXT, max_size=2),
    securityContext=fields(
        runAsUser=INT, runAsGroup=INT, fsGroup=st.integers(0, 2**31 - 1), runAsNonRoot=BOOL,
        supplementalGroups=many(INT), supplementalGroupsPolicy=TEXT,
        sysctls=many(required({"name": TEXT, "value": TEXT})),
    ),
    hostAliases=many(required({"ip": TEXT}, hostnames=many(TEXT))), priorityClassName=TEXT,
    overhead=AMOUNTS, serviceAccountName=TEXT, enableServiceLinks=BOOL, hostPID=BOOL,
    shareProcessNamespace=BOOL, schedulerName=TEXT, runtimeClassName=TEXT,
)  # fmt: skip
POD = st.builds(
    lambda spec, namespace, name, labels, annotations: {
        "metadata": {
            "namespace": namespace, "name": name, "uid": "u-1", "resourceVersion": "1",
            "labels": labels, "annotations": annotations,
        },
        "spec": {"restartPolicy": "Never", "nodeName": "main", **spec},
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    },
    SPEC, DNS_NAME, DNS_NAME, st.dictionaries(TEXT, TEXT, max_size=2), ANNOTATIONS,
)  # fmt: skip
