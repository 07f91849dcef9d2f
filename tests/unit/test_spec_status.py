from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_samples import Object, agent_says, container, exited, pod, running, seen

from hpk_kubelet.spec.plan import ContainerState, PodState
from hpk_kubelet.spec.status import Ended, Observed, Waiting, build_status, same_status

NOW = "1970-01-01T00:05:00Z"  # 300
EARLIER = "1970-01-01T00:01:40Z"  # 100
LOST = Ended("NodeFail", "node n1 failed", finished_at=250.0)
SIDE = container("side", restartPolicy="Always")


def observe(state: PodState | None = None, **more: Any) -> Observed:
    return Observed(now=300.0, state=state, image_ids={"main": "app@sha256:1"}, **more)


def status(whole: Object, state: PodState | None = None, **more: Any) -> Object:
    before = copy.deepcopy(whole)
    result = build_status(whole, observe(state, **more))
    assert whole == before, "the pod is not touched"
    assert same_status(result, build_status(whole | {"status": result}, observe(state, **more)))
    return result


def condition(of: Object, type_: str) -> Object:
    found: Object = next(c for c in of["conditions"] if c["type"] == type_)
    return {k: v for k, v in found.items() if k in ("status", "reason", "message")}


def shown(of: Object) -> dict[str, str]:
    """Container → what a person reads of it."""
    words = {}
    for one in [*of.get("initContainerStatuses", []), *of["containerStatuses"]]:
        ((kind, detail),) = one["state"].items()
        code = f" {detail['exitCode']}" if "exitCode" in detail else ""
        words[one["name"]] = f"{kind} {detail.get('reason', '')}{code}".strip()
    return words


def test_a_pod_nobody_has_started() -> None:
    assert status(pod(), start_time=100.0, host_ip="10.0.0.9") == {
        "phase": "Pending",
        "conditions": [
            {"type": "PodReadyToStartContainers", "status": "False",
             "lastTransitionTime": NOW, "observedGeneration": 1},
            {"type": "Initialized", "status": "True",
             "lastTransitionTime": NOW, "observedGeneration": 1},
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady",
             "message": "containers with unready status: [main]",
             "lastTransitionTime": NOW, "observedGeneration": 1},
            {"type": "ContainersReady", "status": "False", "reason": "ContainersNotReady",
             "message": "containers with unready status: [main]",
             "lastTransitionTime": NOW, "observedGeneration": 1},
            {"type": "PodScheduled", "status": "True",
             "lastTransitionTime": NOW, "observedGeneration": 1},
        ],
        "startTime": EARLIER,
        "containerStatuses": [
            {"name": "main", "image": "app:1", "imageID": "", "restartCount": 0,
             "ready": False, "started": False, "lastState": {},
             "state": {"waiting": {"reason": "ContainerCreating"}}},
        ],
        "hostIP": "10.0.0.9",
        "hostIPs": [{"ip": "10.0.0.9"}],
        "qosClass": "BestEffort",
        "observedGeneration": 1,
    }  # fmt: skip


def test_a_running_pod() -> None:
    whole = pod(
        container(
            resources={"requests": {"cpu": "1"}, "limits": {"cpu": "2"}},
            volumeMounts=[{"name": "v", "mountPath": "/v", "readOnly": True}],
        ),
        restartPolicy="Always",
    )
    last = exited(3, at=145.0)
    result = status(whole, agent_says(main=running(restartCount=2, lastTerminated=last)))
    assert result["phase"] == "Running"
    assert result["containerStatuses"] == [
        {
            "name": "main",
            "image": "app:1",
            "imageID": "app@sha256:1",
            "containerID": "apptainer://42/main/2",
            "restartCount": 2,
            "ready": True,
            "started": True,
            "state": {"running": {"startedAt": "1970-01-01T00:02:30Z"}},
            "lastState": {
                "terminated": {
                    "exitCode": 3,
                    "reason": "Error",
                    "startedAt": "1970-01-01T00:02:30Z",
                    "finishedAt": "1970-01-01T00:02:25Z",
                    "containerID": "apptainer://42/main/1",
                }
            },
            "volumeMounts": [
                {
                    "name": "v",
                    "mountPath": "/v",
                    "readOnly": True,
                    "recursiveReadOnly": "Disabled",
                }
            ],
            "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}},
            "allocatedResources": {"cpu": "1"},
        }
    ]
    assert {c["type"]: c["status"] for c in result["conditions"]} == dict.fromkeys(
        ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"),
        "True",
    )
    assert (result["hostIP"], result["podIP"]) == ("10.1.0.1", "10.1.0.1")
    assert result["podIPs"] == [{"ip": "10.1.0.1"}]


def test_waiting_has_the_most_particular_reason() -> None:
    whole = pod(container("main"), container("b"), initContainers=[container("i")])
    result = status(
        whole,
        waiting=Waiting("SlurmResources", "waiting for nodes"),
        container_waiting={"b": Waiting("ImagePullBackOff", 'Back-off pulling image "x"')},
    )
    assert {s["name"]: s["state"]["waiting"] for s in result["containerStatuses"]} == {
        "b": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'},
        # the kubelet never says anything else of a pod with init containers
        "main": {"reason": "PodInitializing", "message": "waiting for nodes"},
    }
    assert shown(result)["i"] == "waiting PodInitializing"
    plain = status(pod(), waiting=Waiting("SlurmResources"))
    assert shown(plain)["main"] == "waiting SlurmResources"
    assert shown(status(whole))["main"] == "waiting PodInitializing"
    assert condition(result, "Initialized") == {
        "status": "False", "reason": "ContainersNotInitialized",
        "message": "containers with incomplete status: [i]",
    }  # fmt: skip


def test_a_crash_loop_waits_and_runs() -> None:
    back_off = seen(
        waiting={"reason": "CrashLoopBackOff", "message": "back-off 10s"},
        lastTerminated=exited(1),
        restartCount=1,
    )
    whole = pod(restartPolicy="Always")
    result = status(whole, agent_says(main=back_off))
    main = result["containerStatuses"][0]
    assert result["phase"] == "Running"
    assert main["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    assert main["lastState"]["terminated"]["containerID"] == "apptainer://42/main/1"
    assert (main["restartCount"], main["imageID"]) == (1, "app@sha256:1")
    # deleted meanwhile: its last word stands
    result = status(whole, agent_says(True, main=back_off))
    assert (result["phase"], shown(result)) == ("Failed", {"main": "terminated Error 1"})


# restartPolicy, [(exit code, finished by the agent)] → phase
@pytest.mark.parametrize(
    ("policy", "codes", "finished", "phase"),
    [
        ("Never", [0], True, "Succeeded"),
        ("Never", [0], False, "Succeeded"),
        ("Never", [7], False, "Failed"),
        ("Never", [0, 7], True, "Failed"),
        ("OnFailure", [0], True, "Succeeded"),
        ("OnFailure", [7], False, "Running"),
        ("OnFailure", [7], True, "Failed"),
        ("Always", [0], False, "Running"),
        ("Always", [0], True, "Succeeded"),
        ("Always", [143], True, "Failed"),
    ],
)
def test_phases_of_ended_containers(
    policy: str, codes: list[int], finished: bool, phase: str
) -> None:
    names = ["main", "b"][: len(codes)]
    whole = pod(*map(container, names), restartPolicy=policy)
    states = {name: seen(terminated=exited(code)) for name, code in zip(names, codes, strict=True)}
    result = status(whole, agent_says(finished, **states))
    assert result["phase"] == phase
    if phase == "Succeeded":
        assert condition(result, "Ready") == {"status": "False", "reason": "PodCompleted"}
        assert condition(result, "Initialized") == {"status": "True", "reason": "PodCompleted"}
    if phase == "Failed":
        assert condition(result, "ContainersReady") == {"status": "False", "reason": "PodFailed"}


def test_restart_rules_count() -> None:
    rules = [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]
    whole = pod(container(restartPolicy="Never", restartPolicyRules=rules))
    for code, phase in ((42, "Running"), (1, "Failed")):
        state = agent_says(main=seen(terminated=exited(code)))
        assert status(whole, state)["phase"] == phase


def test_a_failed_init_container() -> None:
    whole = pod(initContainers=[container("i"), container("j")])
    state = agent_says(True, i=seen(terminated=exited(3)))
    result = status(whole, state)
    assert result["phase"] == "Failed"
    assert shown(result) == {
        "i": "terminated Error 3",
        "j": "waiting PodInitializing",
        "main": "waiting PodInitializing",
    }
    whole["spec"]["restartPolicy"] = "OnFailure"
    result = status(whole, agent_says(i=seen(terminated=exited(3))))
    assert result["phase"] == "Pending"


def test_init_containers_then_a_sidecar() -> None:
    whole = pod(initContainers=[container("i"), SIDE])
    done = seen(terminated=exited(0))
    result = status(whole, agent_says(i=done, side=running(started=False, ready=False)))
    assert result["phase"] == "Pending"
    assert [(s["name"], s["ready"]) for s in result["initContainerStatuses"]] == [
        ("i", True),
        ("side", False),
    ]
    assert condition(result, "Initialized")["message"] == (
        "containers with incomplete status: [side]"
    )
    result = status(whole, agent_says(i=done, side=running(), main=running(ready=False)))
    assert (result["phase"], condition(result, "Initialized")) == ("Running", {"status": "True"})
    assert condition(result, "Ready")["message"] == "containers with unready status: [main]"
    # the sidecar's own exit code does not count, and it does not hold the pod open
    result = status(whole, agent_says(True, i=done, side=seen(terminated=exited(137)), main=done))
    assert result["phase"] == "Succeeded"


def test_a_sidecar_between_two_runs_ends_before_the_pod_is_over() -> None:
    whole = pod(initContainers=[SIDE])
    whole["status"]["phase"] = "Running"
    side = seen(waiting={"reason": "CrashLoopBackOff"}, lastTerminated=exited(3))
    done = seen(terminated=exited(0))
    assert status(whole, agent_says(side=side, main=done))["phase"] == "Running"
    result = status(whole, agent_says(True, side=side, main=done))
    assert result["phase"] == "Succeeded"
    assert shown(result) == {"side": "terminated Error 3", "main": "terminated Completed 0"}


def test_readiness_gates() -> None:
    whole = pod(readinessGates=[{"conditionType": "a/b"}, {"conditionType": "c/d"}])
    foreign = {"type": "c/d", "status": "False", "lastTransitionTime": EARLIER}
    whole["status"]["conditions"] = [foreign]
    result = status(whole, agent_says(main=running()))
    assert condition(result, "ContainersReady") == {"status": "True"}
    assert condition(result, "Ready") == {
        "status": "False",
        "reason": "ReadinessGatesNotReady",
        "message": 'corresponding condition of pod readiness gate "a/b" does not exist., '
        'the status of pod readiness gate "c/d" is not "True", but False',
    }
    assert result["conditions"][0] == foreign


def test_times_are_kept_while_a_condition_stays() -> None:
    whole = pod()
    whole["status"] = build_status(whole, Observed(now=100.0))
    result = status(whole, agent_says(main=running()))
    assert result["startTime"] == EARLIER
    assert {c["type"]: c["lastTransitionTime"] for c in result["conditions"]} == {
        "PodReadyToStartContainers": NOW,
        "Initialized": EARLIER,
        "Ready": NOW,
        "ContainersReady": NOW,
        "PodScheduled": EARLIER,
    }


@pytest.mark.parametrize("policy", ["Never", "OnFailure", "Always"])
def test_a_job_that_died(policy: str) -> None:
    whole = pod(restartPolicy=policy)
    result = status(whole, agent_says(main=running()), ended=LOST)
    assert (result["phase"], result["reason"], result["message"]) == (
        "Failed", "NodeFail", "node n1 failed",
    )  # fmt: skip
    main = result["containerStatuses"][0]
    assert (main["ready"], main["started"]) == (False, False)
    assert main["state"]["terminated"] == {
        "exitCode": 137,
        "reason": "NodeFail",
        "message": "node n1 failed",
        "startedAt": "1970-01-01T00:02:30Z",
        "finishedAt": "1970-01-01T00:04:10Z",
        "containerID": "apptainer://42/main/0",
    }
    assert condition(result, "Ready") == {"status": "False", "reason": "PodFailed"}
    assert condition(result, "PodReadyToStartContainers") == {"status": "False"}


def test_a_job_that_died_after_its_containers_had_ended() -> None:
    done = agent_says(main=seen(terminated=exited(0)))
    assert status(pod(), done, ended=LOST)["phase"] == "Succeeded"
    assert "reason" not in status(pod(), done, ended=LOST)
    assert status(pod(restartPolicy="Always"), done, ended=LOST)["phase"] == "Failed"
    failed = agent_says(main=seen(terminated=exited(7)))
    assert shown(status(pod(), failed, ended=LOST)) == {"main": "terminated Error 7"}


def test_a_job_cancelled_in_the_queue() -> None:
    cancelled = Ended("Cancelled", "job 42 was cancelled by alice")
    result = status(pod(), ended=cancelled, waiting=Waiting("SlurmHeld"))
    assert (result["phase"], result["reason"]) == ("Failed", "Cancelled")
    assert result["containerStatuses"][0]["state"] == {
        "terminated": {
            "exitCode": 137, "reason": "Cancelled", "message": "job 42 was cancelled by alice",
        }
    }  # fmt: skip
    result = status(pod(initContainers=[container("i"), container("j")]), ended=cancelled)
    assert shown(result) == {
        "i": "terminated Cancelled 137",
        "j": "waiting PodInitializing",
        "main": "waiting PodInitializing",
    }


def test_a_pod_that_is_given_up() -> None:
    before = pod()
    before["status"] = build_status(before, observe())
    result = status(before, failed=("InvalidFlags", "sbatch: invalid partition"))
    assert (result["phase"], result["reason"], result["message"]) == (
        "Failed", "InvalidFlags", "sbatch: invalid partition",
    )  # fmt: skip
    assert result["containerStatuses"] == []


def test_the_agents_reason_fails_the_pod() -> None:
    state = agent_says(True, main=seen(terminated=exited(0)))
    state["reason"], state["message"] = "DeadlineExceeded", "Pod was active too long"
    result = status(pod(), state)
    assert (result["phase"], result["reason"], result["message"]) == (
        "Failed", "DeadlineExceeded", "Pod was active too long",
    )  # fmt: skip


def test_deleted_before_anything_ran() -> None:
    result = status(pod(), agent_says(True))
    assert (result["phase"], shown(result)) == (
        "Failed",
        {"main": "terminated ContainerStatusUnknown 137"},
    )


def test_a_finished_pod_never_changes() -> None:
    whole = pod()
    whole["status"] = status(whole, agent_says(True, main=seen(terminated=exited(0))))
    for state, ended in product((None, agent_says(main=running())), (None, LOST)):
        assert build_status(whole, observe(state, ended=ended)) == whole["status"]


def test_a_pod_that_someone_else_failed_still_shows_the_end_of_its_containers() -> None:
    whole = pod(restartPolicy="Always")
    whole["status"] = status(whole, agent_says(main=running()))
    whole["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "by hand"}
    result = status(whole, agent_says(True, main=seen(terminated=exited(143))))
    assert (result["phase"], result["reason"], result["message"]) == (
        "Failed",
        "Evicted",
        "by hand",
    )
    assert shown(result) == {"main": "terminated Error 143"}


def test_an_agent_out_of_reach_unmakes_nothing() -> None:
    whole = pod()
    whole["status"] = status(whole, agent_says(main=running()))
    result = status(whole)
    assert (result["phase"], shown(result)) == ("Running", {"main": "running"})
    assert result["podIP"] == "10.1.0.1"
    assert shown(status(whole, ended=LOST)) == {"main": "terminated NodeFail 137"}


def test_messages_share_a_limit() -> None:
    names = [f"c{i}" for i in range(4)]
    whole = pod(*map(container, names))
    long = seen(terminated=exited(1, message="é" * 4096))
    result = status(whole, agent_says(True, **dict.fromkeys(names, long)))
    messages = [s["state"]["terminated"]["message"] for s in result["containerStatuses"]]
    assert [len(m.encode()) for m in messages] == [3072] * 4


def test_same_status_overlooks_what_the_api_adds() -> None:
    new = status(pod(), agent_says(main=running()))
    old = copy.deepcopy(new) | {"nominatedNodeName": "x", "resize": ""}
    old["conditions"] = [{**c, "lastProbeTime": None} for c in reversed(old["conditions"])]
    assert same_status(old, new)
    old["containerStatuses"][0]["ready"] = False
    assert not same_status(old, new)
    assert not same_status(None, new)
    assert same_status({"phase": "Failed"}, {"phase": "Failed", "containerStatuses": []})


STATES: st.SearchStrategy[ContainerState] = st.builds(
    lambda kind, code, count, last, started, ready: seen(
        **(
            {"running": {"startedAt": 150.0}}
            if kind == "running"
            else {"terminated": exited(code)}
            if kind == "terminated"
            else {"waiting": {"reason": "CrashLoopBackOff", "message": ""}}
            if kind == "waiting"
            else {}
        ),
        **({"lastTerminated": exited(code)} if last else {}),
        restartCount=count,
        started=started,
        ready=ready,
    ),
    st.sampled_from(["running", "terminated", "waiting", "none"]),
    st.sampled_from([0, 1, 137]),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@settings(deadline=None)
@given(
    policy=st.sampled_from(["Always", "OnFailure", "Never"]),
    states=st.dictionaries(st.sampled_from(["main", "b", "i", "side"]), STATES),
    finished=st.booleans(),
    ended=st.booleans(),
)
def test_any_observation_gives_a_status_that_holds(
    policy: str, states: dict[str, ContainerState], finished: bool, ended: bool
) -> None:
    whole = pod(
        container("main"),
        container("b"),
        initContainers=[container("i"), SIDE],
        restartPolicy=policy,
    )
    result = status(whole, agent_says(finished, **states), ended=LOST if ended else None)
    every = [*result["initContainerStatuses"], *result["containerStatuses"]]
    assert all(len(one["state"]) == 1 for one in every)
    assert all("running" in one["state"] or not (one["started"]) for one in every)
    if finished or ended:
        assert result["phase"] in ("Succeeded", "Failed")
        assert not any("running" in one["state"] for one in every)
    if result["phase"] == "Succeeded":
        codes = [one["state"]["terminated"]["exitCode"] for one in result["containerStatuses"]]
        assert codes == [0, 0]


def test_ephemeral_containers_have_a_status_of_their_own() -> None:
    debugger = {"name": "debugger", "image": "busybox", "targetContainerName": "main"}
    whole = pod(container("main"))
    whole["spec"]["ephemeralContainers"] = [debugger]
    assert status(whole)["ephemeralContainerStatuses"][0]["state"] == {
        "waiting": {"reason": "ContainerCreating"}
    }
    result = status(whole, agent_says(main=running(), debugger=running()))
    one = result["ephemeralContainerStatuses"][0]
    assert "running" in one["state"] and one["ready"] is False and "started" not in one
    assert [s["name"] for s in result["containerStatuses"]] == ["main"]
    assert result["phase"] == "Running"


def test_a_resize_is_said_to_be_infeasible() -> None:
    def sized(cpu: str) -> Object:
        return pod(container(resources={"requests": {"cpu": cpu}}))

    before = sized("1")
    before["status"] = status(before, agent_says(main=running()))
    assert "PodResizePending" not in [c["type"] for c in before["status"]["conditions"]]
    for cpu, pending in (("1000m", False), ("2", True), ("1", False)):
        after = sized(cpu)
        after["status"] = before["status"]
        before["status"] = result = status(after, agent_says(main=running()))
        assert result["containerStatuses"][0]["allocatedResources"] == {"cpu": "1"}
        types = {c["type"]: c for c in result["conditions"]}
        assert ("PodResizePending" in types) is pending, cpu
        if pending:
            assert types["PodResizePending"]["reason"] == "Infeasible"
