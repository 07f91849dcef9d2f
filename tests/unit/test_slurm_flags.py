from pathlib import Path

import pytest
from hypothesis import given as generated
from hypothesis import strategies as st

from hpk_kubelet.config import SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.annotations import mpi_words, slurm_flags
from hpk_kubelet.spec.resources import JobResources, job_resources
from hpk_kubelet.spec.slurm_options import SBATCH, SRUN, read_flags, value_of

CONFIG = SlurmConfig(memory_overhead_mb=100, default_memory_mb=500)
FLAGS = "slurm-job.hpk.io/flags"
MPI = "slurm-job.hpk.io/mpi-flag"


def pod(*containers, **spec):
    return {"metadata": {}, "spec": {"containers": list(containers), **spec}}


def needs(restart=None, limits=None, **requests):
    container = {"name": "c", "resources": {"requests": requests, "limits": limits or {}}}
    return container | ({"restartPolicy": restart} if restart else {})


def annotated(text, name=FLAGS):
    return {"metadata": {"annotations": {name: text}}, "spec": {}}


@pytest.mark.parametrize(
    ("whole", "want"),
    [
        (pod({"name": "c"}), JobResources(1, 600)),
        (pod(needs(cpu="1500m", memory="1Gi")), JobResources(2, 1124)),
        (pod(needs(cpu="1e1", memory="1e6")), JobResources(10, 101)),
        (pod(needs(memory="1Gi", limits={"memory": "2Gi"})), JobResources(1, 2148)),
        (pod(needs(limits={"cpu": "2"})), JobResources(2, 600)),
        (pod(needs(cpu="600m"), needs(cpu="600m")), JobResources(2, 600)),
        (pod(needs(cpu=1), initContainers=[needs(cpu=3)]), JobResources(3, 600)),
        # KEP-753: the sidecar before it counts beside an init container and beside the main ones
        (
            pod(needs(cpu=2), initContainers=[needs("Always", cpu=1), needs(cpu=3)]),
            JobResources(4, 600),
        ),
        (
            pod(needs(cpu=2), initContainers=[needs(cpu=2), needs("Always", cpu=1)]),
            JobResources(3, 600),
        ),
        # KEP-2837: what the pod asks for as a whole replaces the sum
        (pod(needs(cpu=2), resources={"requests": {"cpu": "3"}}), JobResources(3, 600)),
        (pod(needs(memory="1Mi"), overhead={"memory": "2Mi"}), JobResources(1, 103)),
        (
            pod(needs(limits={"nvidia.com/gpu": "2"}), activeDeadlineSeconds=60),
            JobResources(1, 600, gpus=2, gpu_kind="nvidia", time_limit_s=180),
        ),
        (
            pod(
                needs(limits={"amd.com/gpu": "1"}),
                activeDeadlineSeconds=60,
                terminationGracePeriodSeconds=30,
            ),
            JobResources(1, 600, gpus=1, gpu_kind="rocm", time_limit_s=210),
        ),
        (
            pod(
                needs(**{"ephemeral-storage": "1G"}),
                nodeSelector={"feature.hpk.io/ssd": "true", "feature.hpk.io/a": "", "other": "x"},
            ),
            JobResources(1, 600, tmp_mb=954, constraint="a&ssd"),
        ),
    ],
)
def test_resources(whole, want):
    assert job_resources(whole, CONFIG) == want


def test_a_malformed_quantity_is_named():
    with pytest.raises(HPKError, match=r"^container c: resources\.requests\.cpu: 'lots' is not"):
        job_resources(pod(needs(cpu="lots")), CONFIG)


def test_two_kinds_of_gpu_are_refused():
    both = needs(limits={"nvidia.com/gpu": "1", "amd.com/gpu": "1"})
    with pytest.raises(HPKError, match=r"nvidia\.com/gpu and amd\.com/gpu"):
        job_resources(pod(both), CONFIG)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", []),
        ("--time=10 -p x --exclusive", ["--time=10", "--partition=x", "--exclusive"]),
        ("-n4 --constraint='a&b'", ["--ntasks=4", "--constraint=a&b"]),
        ("--ntasks 4\n  -N 2-3\n", ["--ntasks=4", "--nodes=2-3"]),
        ("-Hn4", ["--hold", "--ntasks=4"]),
        ("-sO -k", ["--oversubscribe", "--overcommit", "--no-kill"]),
        ("--nice --nice=-5", ["--nice", "--nice=-5"]),
        ("--cpus-per-t=2", ["--cpus-per-task=2"]),
        ("--spank-plugins-own --another=x", ["--spank-plugins-own", "--another=x"]),
        ("--comment", None),
    ],
)
def test_flags(text, flags):
    for name in (FLAGS, "slurm.hpk.io/flags"):
        if flags is None:
            with pytest.raises(HPKError, match=name):
                slurm_flags(annotated(text, name))
        else:
            assert slurm_flags(annotated(text, name)) == flags


def test_the_documented_annotation_goes_before_its_alias():
    both = {FLAGS: "--time=1", "slurm.hpk.io/flags": "--time=2"}
    assert slurm_flags({"metadata": {"annotations": both}}) == ["--time=1"]
    assert slurm_flags({"metadata": {}}) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("'", "no closing quotation in"),
        ("echo", "'echo' is not a flag"),
        ("--time=1 echo x", "'echo' is not a flag"),
        (": --ntasks=1", "':' is not a flag"),
        ("--", "'--' is not a flag"),
        ("-", "'-' is not a flag"),
        ("--=x", "'--=x' is not a flag"),
        ("--hold x", "'x' is not a flag"),
        ("--hold=x", "--hold takes no value"),
        ("--nodes", "--nodes needs a value"),
        ("--nodes --hold", "--nodes needs a value"),
        ("-N", "-N needs a value, as in --nodes=VALUE"),
        ("-?", "sbatch has no option -?"),
        ("--ntasks-per=2", "--ntasks-per may mean --ntasks-per-core or --ntasks-per-gpu"),
        ("--wrap=id", "--wrap is not allowed: the job's script is HPK's"),
        ("--wra=id", "--wra is not allowed"),
        ("--arr 1-3", "--arr is not allowed: a pod is one job"),
        ("-a1-3", "-a (--array) is not allowed"),
        ("-HW", "-W (--wait) is not allowed"),
        ("-J x", "-J (--job-name) is not allowed"),
        ("--export ALL", "--export is not allowed"),
        ("-o/etc/x", "-o (--output) is not allowed"),
        ("--comment=hpk:x", "--comment is not allowed"),
        ("--requeue", "--requeue is not allowed"),
        ("-M other", "-M (--clusters) is not allowed"),
        ("--time=1\x01", "control characters are not allowed"),
        ("--constraint 'a\nb'", "control characters are not allowed"),
        ("'--constraint=a\nb'", "control characters are not allowed"),
    ],
)
def test_flags_that_cannot_be(text, words):
    with pytest.raises(HPKError) as refused:
        slurm_flags(annotated(text))
    assert str(refused.value).startswith(f"annotation {FLAGS}: ")
    assert words in str(refused.value)


def test_mpi_flags():
    assert mpi_words(annotated("--mpi=pmix -l", MPI)) == ["--mpi=pmix", "--label"]
    assert mpi_words(annotated("-K --wait=5", MPI)) == ["--kill-on-bad-exit", "--wait=5"]
    assert mpi_words(annotated("--mpi pmix", "slurm.hpk.io/mpi-flag")) == ["--mpi=pmix"]
    assert mpi_words(annotated("", MPI)) == []
    assert mpi_words(annotated("--mpi=pmix")) is None


@pytest.mark.parametrize("text", ["--export=ALL", "--jobid=1", "--pty", "sh", "-o x", "--multi-p"])
def test_mpi_flags_that_cannot_be(text):
    with pytest.raises(HPKError, match=f"annotation {MPI}: "):
        mpi_words(annotated(text, MPI))


@generated(st.lists(st.text(st.sampled_from("-=nNaHx1 :\n"))), st.sampled_from([SBATCH, SRUN]))
def test_what_was_read_is_read_again_as_the_same(words, command):
    try:
        flags = read_flags(words, command, "here")
    except HPKError as e:
        assert str(e).startswith("here: ")
        return
    assert read_flags(flags, command, "here") == flags
    assert all(flag.startswith("--") for flag in flags)


def test_no_option_is_in_two_tables():
    for command in (SBATCH, SRUN):
        known = command.valued | command.optional | command.bare
        sizes = map(len, (command.valued, command.optional, command.bare))
        assert len(known) == sum(sizes)
        assert set(command.short.values()) <= known
        assert set(command.refused) <= known


def test_values():
    flags = ["--time=1", "--hold", "--time=2"]
    assert value_of(flags, "time") == "2"
    assert value_of(flags, "nodes", "hold") == ""
    assert value_of(flags, "tim") is None


def test_the_documentation_names_every_refused_flag_and_why():
    text = (Path(__file__).parents[2] / "docs" / "annotations.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for command in (SBATCH, SRUN):
        for name, why in command.refused.items():
            assert any(f"`--{name}`" in row and row.endswith(f"| {why} |") for row in rows), name
