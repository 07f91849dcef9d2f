"""The plan of a pod and what its agent observes: the two JSON documents kubelet and agent share.

Both are plain JSON described by TypedDicts: the agent, which must start in milliseconds on an old
Python, pays for no decoding and imports this module for type checking alone. A change of shape
raises PLAN_VERSION; an agent refuses a plan of another version with a sentence.

On disk, in the pod's directory `$HPK_HOME/pods/UID` (0700, every file 0600):
    plan.json       PodPlan, complete: no value is left to be looked up
    script.sbatch   the rendered job script
    intent.json     Intent: written and fsynced before sbatch, completed with the job id after it
    journal.jsonl   the agent's: one JournalLine per line, fsynced, append only; created with O_EXCL
                    by the first agent, so that a second one runs nothing
    logs/CONTAINER/N.log   CRI log format, N is the restart count (rotated: N.log.TIMESTAMP)
    volumes/NAME/   configMap, secret, projected and downwardAPI volumes (kubelet's atomic
                    `..data` layout)
    slurm.out       what Slurm and the job script itself printed
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, cast

PLAN_VERSION = 2

LateField = Literal["podIP", "podIPs", "hostIP", "hostIPs", "hostname"]

Late = list[str]
"""A text that is complete only on the compute node: literal parts at even positions, LateFields at
odd ones: `"".join(fields[p] if i % 2 else p for i, p in enumerate(late))`. podIPs and hostIPs are
separated by commas; hostname is the node's own."""

# --- kubelet → agent -----------------------------------------------------------------------------


class ImagePlan(TypedDict):
    reference: str  # as the pod wrote it
    id: str  # registry/repository@sha256:…, reported as imageID
    digest: str  # sha256:…, the image's directory is keyed by it
    rootfs: str  # absolute path of the unpacked directory, or of a .sif file


class MountPlan(TypedDict):
    volume: str  # key of PodPlan.volumes
    subPath: str  # relative, "" for the whole volume; resolved by the agent inside the volume
    lateSubPath: NotRequired[Late]  # replaces subPath
    target: str  # absolute path in the container
    readOnly: bool


class VolumePlan(TypedDict):
    kind: Literal["emptyDir", "hostPath", "directory", "claim", "image"]
    digest: NotRequired[str]  # image: what its directory is keyed by
    # absolute, but for emptyDir. directory: one the kubelet made; claim: a directory that is there
    path: NotRequired[str]
    type: NotRequired[str]  # hostPath: "", Directory, DirectoryOrCreate, File, FileOrCreate, …
    medium: NotRequired[str]  # emptyDir: "" (node-local disk) or Memory
    sizeLimit: NotRequired[int]  # emptyDir: bytes
    readOnly: NotRequired[bool]  # every mount of it is


class SeccompArgument(TypedDict):
    index: int
    value: int
    valueTwo: int  # what the argument under the mask `value` is compared with (MASKED_EQ)
    op: str


class SeccompRule(TypedDict):
    names: list[str]
    action: str
    errnoRet: NotRequired[int]
    args: NotRequired[list[SeccompArgument]]


class SeccompProfile(TypedDict):
    """OCI's (runtime-spec, config-linux.md#seccomp), what is used of it."""

    defaultAction: str
    defaultErrnoRet: NotRequired[int]
    syscalls: list[SeccompRule]


class SecurityPlan(TypedDict):
    uid: int
    gid: int
    groups: list[int]  # supplementary, without gid
    readOnlyRootFilesystem: bool
    privileged: bool
    capabilities: NotRequired[list[str]]  # added beyond the runtime's default, without CAP_
    dropCapabilities: NotRequired[list[str]]
    noNewPrivileges: NotRequired[bool]  # setuid programs and file capabilities give nothing
    seccomp: NotRequired[Literal["RuntimeDefault"] | SeccompProfile]  # else unconfined
    unmasked: NotRequired[bool]  # all of /proc and /sys is there, as the user may have it


class ContainerPlan(TypedDict):
    name: str
    image: ImagePlan
    argv: list[str]  # never empty: entrypoint and command are merged, $(VAR) is expanded
    lateArgv: NotRequired[dict[str, Late]]  # by index into argv; replaces what is there
    # complete: image, envFrom, env, service and API variables; bytes that are not UTF-8 are lone
    # surrogates (os.fsencode gives them back)
    env: dict[str, str]
    lateEnv: NotRequired[dict[str, Late]]  # set as well as env
    workingDir: str  # absolute
    mounts: list[MountPlan]
    security: SecurityPlan
    restartPolicy: Literal["Always", "OnFailure", "Never"]  # of this container, resolved
    # Kubernetes' own shape (KEP-5307); the first rule that matches an exit code wins over
    # restartPolicy:
    restartPolicyRules: NotRequired[list[dict[str, Any]]]
    sidecar: bool  # an init container that keeps running beside the main ones (KEP-753)
    tty: bool
    stdin: bool
    stdinOnce: bool
    stopSignal: str  # SIGTERM unless the image or the pod's lifecycle says otherwise
    terminationMessagePath: str
    terminationMessagePolicy: Literal["File", "FallbackToLogsOnError"]
    # Kubernetes' own shapes, with named ports made numbers and thresholds defaulted by the API:
    startupProbe: NotRequired[dict[str, Any]]
    livenessProbe: NotRequired[dict[str, Any]]
    readinessProbe: NotRequired[dict[str, Any]]
    lifecycle: NotRequired[dict[str, Any]]  # postStart, preStop
    memoryLimit: NotRequired[int]  # bytes
    storageLimit: NotRequired[int]  # bytes of the writable layer and the logs
    targetContainer: NotRequired[str]  # ephemeral: whose processes it shall see
    mpi: NotRequired[list[str]]  # words between `srun` and the program: this container is ranks


class AgentPlan(TypedDict):
    token: str  # this pod's own; proves the agent to the kubelet
    kubelet: str  # path of the file that says where the kubelet is (KubeletAddress)
    ca: str  # path of the CA certificate the kubelet's is checked against
    localDir: str  # node-local directory, "" means $SLURM_TMPDIR or /tmp


class EtcdFacts(TypedDict):
    """Where flanneld keeps the nodes' subnets: as a user of etcd's who may touch nothing else."""

    endpoints: list[str]  # https://ADDRESS:PORT
    prefix: str
    ca: str  # paths
    cert: str
    key: str
    # Nanoseconds. A watch of flanneld's that etcd's end broke is lost once what it began with was
    # compacted (it asks for that for ever), so with another etcd, flanneld is started anew.
    started: int


class DnsFacts(TypedDict):
    address: str  # of the cluster's DNS, as pods know it; it never changes
    target: str  # ADDRESS of the pod network where CoreDNS is now; "": kube-proxy knows


class ApiFacts(TypedDict):
    """The Service `kubernetes`: pods reach the API server at an address that stays."""

    address: str
    port: int
    target: str  # the control plane's node
    targetPort: int


class DaemonFacts(TypedDict):
    """A program run once on each node that has pods, as root of the node network's namespaces (and
    the user outside). Another value here starts it anew."""

    argv: list[str]  # {hostIP} and {node} are replaced by the node's address and name
    env: NotRequired[dict[str, str]]


class NetworkFacts(TypedDict):
    """What the node networks must know and what changes while pods run: `run/network.json`, and
    the `network` message to agents."""

    revision: int  # nanoseconds; facts with a greater one replace those before
    file: str  # where the newest facts are, in case no kubelet tells
    podCIDR: str
    serviceCIDR: str
    vni: NotRequired[int]  # of VXLAN; facts of older control planes have none
    vxlanPort: int  # UDP, the same on all nodes
    interface: str  # of the nodes; "": the one towards etcd
    mtu: int  # of a node network's way out, in bytes; pods have what VXLAN leaves of it
    flanneld: str  # path
    etcd: EtcdFacts
    api: NotRequired[ApiFacts]
    dns: NotRequired[DnsFacts]
    daemons: NotRequired[dict[str, DaemonFacts]]  # by name: kube-proxy


class NetworkPlan(TypedDict):
    mode: Literal["host", "rootless", "site"]
    cluster: NotRequired[str]  # rootless: keeps the user's clusters apart on a node
    facts: NotRequired[NetworkFacts]  # rootless: as they were when the plan was made
    program: NotRequired[str]  # site: path of the administrator's program


class HostsPlan(TypedDict):
    """What the agent makes /etc/hosts of, in this order: header, the node's own /etc/hosts if
    `node` says so, a line with the podIP and `names` if there are any, aliases."""

    header: str
    node: bool
    names: list[str]  # the pod's, fully qualified first
    aliases: str  # spec.hostAliases as lines, "" without


class ResolverConfig(TypedDict):
    nameservers: list[str]
    searches: list[str]
    options: list[str]  # NAME or NAME:VALUE


class ResolverPlan(ResolverConfig):
    """What the agent makes /etc/resolv.conf of: these, what `node` says of the node's own, and the
    pod's `config` (spec.dnsConfig), whose options win."""

    node: Literal["nothing", "searches", "everything"]
    config: ResolverConfig


class HostPortPlan(TypedDict):
    """A port of the node that leads to one of the pod's."""

    address: str  # of the node; "": all
    port: int
    target: int
    protocol: Literal["TCP", "UDP"]


class PodPlan(TypedDict):
    version: int
    uid: str
    namespace: str
    name: str
    created: float  # Unix seconds; an agent that starts over REFRESH_AFTER later asks for a new one
    hostname: str  # "": the node's own (hostNetwork: true)
    network: NetworkPlan
    hostPorts: list[HostPortPlan]
    shareProcessNamespace: bool
    restartPolicy: Literal["Always", "OnFailure", "Never"]
    terminationGracePeriodSeconds: int
    activeDeadlineSeconds: NotRequired[int]  # counted from the pod's status.startTime
    startTime: float  # status.startTime, Unix seconds
    initContainers: list[ContainerPlan]  # in order, sidecars among them
    containers: list[ContainerPlan]
    # by name: main containers that can't be configured yet, and why. The others need not wait; the
    # agent is told of each (`container`) once it can:
    misconfigured: NotRequired[dict[str, dict[str, str]]]  # {"reason": …, "message": …}
    volumes: dict[str, VolumePlan]
    # directories of volumes with tokens, which are written once the job is there; an agent that
    # finds one without `..data` asks for a new plan
    awaits: NotRequired[list[str]]
    resolver: ResolverPlan
    hosts: HostsPlan
    sysctls: NotRequired[dict[str, str]]  # path below /proc/sys → value
    storageLimit: NotRequired[int]  # bytes: the containers' together, and the emptyDirs on disk
    fsGroup: NotRequired[int]  # emptyDir belongs to this group: mode 02777
    gpus: NotRequired[Literal["nvidia", "rocm"]]
    agent: AgentPlan


def kept(plan: PodPlan) -> PodPlan:
    """What a kubelet remembers of a plan that is on disk, which is a tenth of it: of containers
    their names, their images and whether they are ranks."""
    of_containers = ("name", "image", "mpi")
    short: dict[str, Any] = {**plan, "volumes": {}}
    for key in ("initContainers", "containers"):
        short[key] = [{k: c[k] for k in of_containers if k in c} for c in short[key]]
    return cast("PodPlan", short)


REFRESH_AFTER = 60.0


class KubeletAddress(TypedDict):
    """`run/kubelet.json`: rewritten at every start of the kubelet, read again at every dial."""

    host: str
    port: int


# --- agent → kubelet -----------------------------------------------------------------------------


class Terminated(TypedDict):
    exitCode: int
    signal: NotRequired[int]
    reason: str  # Completed, Error, OOMKilled, ContainerCannotRun, StartError, …
    message: str  # the termination message
    startedAt: float  # Unix seconds, 0 when it never started
    finishedAt: float


class ContainerState(TypedDict):
    """Exactly one of the three states, as in Kubernetes' ContainerState."""

    waiting: NotRequired[dict[str, str]]  # {"reason": …, "message": …}
    running: NotRequired[dict[str, float]]  # {"startedAt": Unix seconds}
    terminated: NotRequired[Terminated]
    lastTerminated: NotRequired[Terminated]
    image: NotRequired[str]  # its reference, once another one has replaced the plan's
    restartCount: int
    started: bool  # startup probe passed (or none), postStart done
    ready: bool  # readiness probe's word (or none: running)


class PodState(TypedDict):
    """Everything the agent knows, whole every time: the newest one replaces all before it."""

    jobId: str
    node: str  # Slurm's name of the node the agent runs on
    hostIP: str
    podIP: str
    startedAt: float
    containers: dict[str, ContainerState]  # init containers included, by name
    finished: bool  # nothing of this pod will change any more; the job is about to end
    reason: NotRequired[str]  # pod level: DeadlineExceeded, Terminated, AgentError, …
    message: NotRequired[str]


class AgentEvent(TypedDict):
    """Becomes a Kubernetes Event. Its name derives from the pod's uid and `seq`, so that one that
    is told twice exists once."""

    seq: int  # position in the journal
    time: float
    type: Literal["Normal", "Warning"]
    reason: str  # Created, Started, Killing, BackOff, Unhealthy, …
    message: str
    container: NotRequired[str]  # with `init`: makes the Event's fieldPath
    init: NotRequired[bool]


class JournalLine(TypedDict):
    """The last `state` that is a whole line is the truth about a pod whose agent is gone."""

    seq: int  # from 0, without gaps
    state: NotRequired[PodState]
    event: NotRequired[AgentEvent]


# --- the kubelet's own note ----------------------------------------------------------------------


class Intent(TypedDict):
    uid: str
    namespace: str
    name: str
    node: str  # the virtual node
    partition: str
    comment: str  # the job's --comment; how the job is found after a crash before jobId was noted
    jobId: NotRequired[str]
    gang: NotRequired[bool]  # the job is its whole gang's
    allocation: NotRequired[bool]  # the job is one (slurm/allocations.py), not a batch job
    cluster: NotRequired[str]
