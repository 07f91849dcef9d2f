"""docs/slurm.md has the tables of slurm/states.py. `python tests/unit/test_docs_slurm.py` writes
them anew."""

import re
from pathlib import Path

from hpk_kubelet.slurm import states
from hpk_kubelet.slurm.states import Phase, state_of

DOCS = Path(__file__).parents[2] / "docs" / "slurm.md"
_PODS = {
    Phase.PENDING: "Pending, containers waiting",
    Phase.RUNNING: "Running",
    Phase.ENDED: "Failed, containers terminated",
}


def state_table():
    rows = ["| job state | pod | reason and Event | words |", "|---|---|---|---|"]
    for word, state in states.STATES.items():
        pod, reason = _PODS[state.phase], state.reason
        if word in ("SUSPENDED", "STOPPED"):
            pod, reason = "Running, not Ready", "SlurmSuspended"
        if word == "COMPLETED":
            pod, reason = "as its containers ended", "`AgentLost` without the agent's word"
        elif word == "FAILED":
            pod, reason = "as its containers ended, or Failed", "`AgentLost`, or as below"
        elif state.phase is Phase.PENDING:
            reason = "see below"
        elif reason:
            reason = f"`{reason}`"
        rows.append(f"| `{word}` | {pod} | {reason} | Slurm job N {state.message} |")
    for word, (reason, message) in states._FAILURES.items():
        rows.append(f"| `FAILED`, reason `{word}` | Failed | `{reason}` | Slurm job N {message} |")
    return rows


def reason_table():
    rows = ["| Slurm's reason | the containers' waiting reason | words |", "|---|---|---|"]
    rows += [
        f"| `{word}` | `{'SlurmPending' if word == 'None' else 'Slurm' + word}` | {why} |"
        for word, why in states._REASONS.items()
    ]
    rows += [
        f"| `{p.pattern}…` | `Slurm` and Slurm's word | {why} |" for p, why in states._FAMILIES
    ]
    return rows


def tables():
    return {"states": state_table(), "reasons": reason_table()}


def written(text):
    for name, rows in tables().items():
        block = f"<!-- {name} -->\n" + "\n".join(rows) + f"\n<!-- end of {name} -->"
        text, count = re.subn(
            rf"<!-- {name} -->.*<!-- end of {name} -->", lambda _, b=block: b, text, flags=re.S
        )
        assert count == 1, name
    return text


def test_the_tables_are_the_codes():
    text = DOCS.read_text()
    assert written(text) == text


def test_no_state_that_ends_a_job_leaves_a_pod_without_a_reason():
    assert all(state_of(word).reason for word, s in states.STATES.items() if s.phase is Phase.ENDED)


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text()))
