"""What a batch job does by itself and an allocation does not: begin with its agent, end with it.

That is the agent's own doing (agent/allocation.py) as long as there is one. Here is what happens
where the kubelet was killed before it started one, or the agent was killed with all that it ran.
"""

from __future__ import annotations

import time

from hpk_kubelet.node import verdict
from hpk_kubelet.node.decide import Progress
from hpk_kubelet.node.ending import Ending
from hpk_kubelet.node.facts import LOOK
from hpk_kubelet.node.starting import Starting
from hpk_kubelet.slurm.backend import Cancel, Submission
from hpk_kubelet.spec.observed import Ended

_LAUNCHES = 2  # of agents that nothing is heard of
_PATIENCE = 30.0  # seconds for an agent's first word, where Slurm says that something runs


class Attending(Starting, Ending):
    async def _attend(self) -> float:
        """Answers for how long there is nothing to do."""
        job_id, immediate = self.job_id, self.kubelet.submissions.immediate
        occupied = await immediate.occupied(job_id)
        self._look()
        now = time.monotonic()
        self.attend_from = now + LOOK
        progress = verdict.progress(self.state)
        self._empty_looks = 0 if occupied else self._empty_looks + 1
        if self.agent is not None or progress is Progress.FINISHED:
            return 0.0
        startable = self.pod is not None and self.directory_of.script.exists()
        if progress is Progress.NONE and self._launches < _LAUNCHES and startable:
            self._silent_since = self._silent_since or now
            # A step may be there of which no process was started.
            if not occupied or now - self._silent_since > _PATIENCE:
                self._launches += 1
                self._silent_since = 0.0
                self._launch(job_id)
            return LOOK
        if self._empty_looks < 2:  # a network file system may show the last word late
            return LOOK
        words = f"the pod's agent in Slurm job {job_id} is dead"
        if said := verdict.last_line(self._output()):
            words += f"; its last words: {said}"
        self.ended = Ended("AgentLost", words)
        self.say("Warning", self.ended.reason, words, once="ended")
        await self.kubelet.jobs.cancel(Cancel(job_id))
        return 0.0

    def _launch(self, job_id: str) -> None:
        assert self.pod is not None
        submission = Submission(self._request(self.pod), self.directory_of.script)
        self.kubelet.submissions.immediate.launch(job_id, submission)
