"""What Slurm's jobs and partitions look like to the rest of HPK, whichever backend asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpk_kubelet.slurm.states import Phase, State, state_of


@dataclass(frozen=True)
class Job:
    """What Slurm says about a job of this user. Times are Unix seconds, 0 where there is none."""

    id: str  # ARRAY_TASK for a task of an array
    word: str  # Slurm's own word for the state
    reason: str = ""  # why it waits or how it failed, in Slurm's word
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""  # as a hostlist: n[1-2]
    partition: str = ""
    submitted: float = 0
    started: float = 0
    ended: float = 0
    comment: str = ""
    tres: str = ""  # what it holds, as Slurm writes it: cpu=2,mem=704M,node=1,gres/gpu=1
    state: State = field(init=False)

    def __post_init__(self) -> None:
        state = state_of(self.word, self.reason, self.exit_code)
        object.__setattr__(self, "state", state)

    @property
    def phase(self) -> Phase:
        return self.state.phase


@dataclass(frozen=True)
class ComputeNode:
    """Without what Slurm keeps for the system; `held` is what jobs have of it, anybody's."""

    name: str
    usable: bool
    cpus: int
    memory_mb: int
    gpus: int = 0
    cpus_held: int = 0
    memory_held_mb: int = 0
    gpus_held: int = 0


@dataclass(frozen=True)
class Partition:
    """Sums over the partition's nodes, without what Slurm keeps for the system; memory in MB."""

    name: str
    up: bool
    default: bool
    nodes: int
    nodes_usable: int  # not down, drained, failing or kept for maintenance
    cpus: int
    cpus_usable: int
    memory_mb: int
    memory_usable_mb: int
    largest_cpus: int  # of one node
    largest_memory_mb: int
    gpus: int = 0
    tmp_mb: int = 0
    features: frozenset[str] = frozenset()
    max_time_s: int | None = None  # None: unlimited
    default_time_s: int | None = None  # None: the same as max_time_s
    members: tuple[ComputeNode, ...] = ()
    gpu_resource: str = "nvidia.com/gpu"  # as which pods ask for its GPUs
    control_job: str = ""  # id of the job whose steps its pods become; "": they get their own jobs


@dataclass(frozen=True)
class Limits:
    """Of the cluster, as its configuration has them."""

    array_size: int = 0  # tasks an array may have; below 2 there are no arrays
    client_filters: str = ""  # plugins that sbatch itself runs, and slurmrestd does not
    inactive: bool = True  # allocations without a living salloc or srun are ended (InactiveLimit)
