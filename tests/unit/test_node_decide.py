"""Every combination of what is wanted and what is known has one expected action."""

from itertools import product

import pytest

from hpk_kubelet.node.decide import Action, Job, Progress, Stage, View, Want, decide

A, J, P, S, W = Action, Job, Progress, Stage, Want
ANY = None

# want, stage, job, progress, agent, overdue[, unattended] → action; the first that fits counts.
TABLE = [
    # This process is still pulling and writing.
    ((W.RUN, S.PREPARING, ANY, ANY, ANY, ANY), A.WAIT),
    ((ANY, S.PREPARING, ANY, ANY, ANY, ANY), A.ABORT),
    # The way to a job.
    ((W.RUN, S.NEW, ANY, ANY, ANY, ANY), A.PREPARE),
    ((W.RUN, S.PREPARED, ANY, ANY, ANY, ANY), A.SUBMIT),
    # A crash between the intent and the job id.
    ((W.RUN, S.INTENDED, ANY, P.STARTED, ANY, ANY), A.ADOPT),
    ((W.RUN, S.INTENDED, ANY, P.FINISHED, ANY, ANY), A.ADOPT),
    ((W.RUN, S.INTENDED, J.PENDING, P.NONE, ANY, ANY), A.ADOPT),
    ((W.RUN, S.INTENDED, J.RUNNING, P.NONE, ANY, ANY), A.ADOPT),
    ((W.RUN, S.INTENDED, J.ENDED, P.NONE, ANY, ANY), A.SUBMIT),
    ((W.RUN, S.INTENDED, J.UNKNOWN, P.NONE, ANY, ANY), A.WAIT),
    # A job is there.
    ((W.RUN, S.SUBMITTED, ANY, P.FINISHED, ANY, ANY), A.REPORT),
    ((W.RUN, S.SUBMITTED, J.ENDED, ANY, ANY, ANY), A.REPORT),
    # Put back into the queue after its agent had begun.
    ((W.RUN, S.SUBMITTED, J.PENDING, P.STARTED, False, ANY), A.REPORT),
    # Of an allocation in which no agent is heard.
    ((W.RUN, S.SUBMITTED, J.RUNNING, ANY, False, ANY, True), A.ATTEND),
    ((W.RUN, S.SUBMITTED, ANY, ANY, ANY, ANY), A.WAIT),
    # Nothing runs and the API knows the end: its logs stay as long as the object does.
    ((W.DONE, S.NEW, ANY, ANY, ANY, ANY), A.WAIT),
    ((W.DONE, S.PREPARED, ANY, ANY, ANY, ANY), A.WAIT),
    # … but a job that does not end by itself then, or waits in the queue again, is ended.
    ((W.DONE, ANY, J.PENDING, P.FINISHED, False, ANY), A.CANCEL),
    ((W.DONE, ANY, J.RUNNING, P.FINISHED, ANY, True), A.CANCEL),
    ((W.DONE, ANY, ANY, P.FINISHED, ANY, ANY), A.WAIT),
    ((W.DONE, ANY, J.ENDED, ANY, ANY, ANY), A.WAIT),
    # Deleted, and nothing runs.
    ((W.STOP, S.NEW, ANY, ANY, ANY, ANY), A.FINISH),
    ((W.STOP, S.PREPARED, ANY, ANY, ANY, ANY), A.FINISH),
    ((W.STOP, ANY, ANY, P.FINISHED, ANY, ANY), A.FINISH),
    ((W.STOP, ANY, J.ENDED, ANY, ANY, ANY), A.FINISH),
    # The object is gone; the directory goes when no job can use it any more.
    ((W.GONE, S.NEW, ANY, ANY, ANY, ANY), A.REMOVE),
    ((W.GONE, S.PREPARED, ANY, ANY, ANY, ANY), A.REMOVE),
    ((W.GONE, ANY, J.ENDED, ANY, ANY, ANY), A.REMOVE),
    ((W.GONE, ANY, ANY, P.FINISHED, ANY, False), A.WAIT),
    # Something may run that should not (DONE, STOP, GONE).
    ((ANY, ANY, ANY, ANY, ANY, True), A.CANCEL),
    ((ANY, ANY, ANY, ANY, True, ANY), A.STOP),
    ((ANY, ANY, J.PENDING, ANY, ANY, ANY), A.CANCEL),
    ((W.GONE, ANY, J.RUNNING, ANY, ANY, ANY), A.CANCEL),
    ((ANY, ANY, J.RUNNING, ANY, ANY, ANY), A.TERM),
    ((ANY, ANY, J.UNKNOWN, ANY, ANY, ANY), A.WAIT),
]
COMBINATIONS = [View(*v) for v in product(Want, Stage, Job, Progress, *[(False, True)] * 3)]


def fits(pattern: tuple[object, ...], view: View) -> bool:
    return all(p is ANY or p == seen for p, seen in zip(pattern, view, strict=False))


def expected(view: View) -> Action:
    return next(action for pattern, action in TABLE if fits(pattern, view))


@pytest.mark.parametrize("want", Want)
def test_every_combination(want):
    views = [view for view in COMBINATIONS if view.want is want]
    assert len(views) == 5 * 4 * 3 * 2 * 2 * 2
    assert {v: decide(v) for v in views} == {v: expected(v) for v in views}


def test_every_line_of_the_table_counts():
    used = {
        next(i for i, (pattern, _) in enumerate(TABLE) if fits(pattern, view))
        for view in COMBINATIONS
    }
    assert used == set(range(len(TABLE)))


def test_a_second_job_is_never_made_while_the_first_may_exist():
    for view in COMBINATIONS:
        if decide(view) is A.SUBMIT and view.stage is S.INTENDED:
            assert view.job is J.ENDED and view.progress is P.NONE


def test_a_directory_in_use_stays():
    for view in COMBINATIONS:
        if decide(view) is A.REMOVE:
            assert view.job is J.ENDED or view.stage in (S.NEW, S.PREPARED)
