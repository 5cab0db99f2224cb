"""The states of a node, and what changes them. Pure: no clock, no socket, no log."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: A node is gone after this many checks in a row without an answer.
FAILED_CHECKS_UNTIL_GONE = 2
#: The longest ejection, in seconds, however many ejections went before it.
LONGEST_EJECTION_S = 300.0


class NodeState(enum.Enum):
    """The state of a node. `docs/router.md` has the table of transitions.

    `USABLE` has the states in which a node may receive requests, the best first. A node receives none while
    another node of its role is in a better state.
    """

    UNKNOWN = "unknown"
    READY = "ready"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    GONE = "gone"
    EJECTED = "ejected"
    REFUSED = "refused"
    LEAVING = "leaving"


USABLE = (NodeState.READY, NodeState.UNKNOWN, NodeState.OVERLOADED, NodeState.EJECTED)


@dataclass(frozen=True)
class Occupancy:
    """The load that a node reports, of all its clients together.

    Attributes:
        num_running: Requests that it computes, or loads a cache for.
        num_waiting: Requests that wait for their first step.
        pool_usage: Share of its blocks that are in use, from 0 to 1.
    """

    num_running: int
    num_waiting: int
    pool_usage: float

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True)
class Health:
    """The result of one check.

    Attributes:
        state: The state that follows. None if the check failed without an answer, which may be temporary.
        error: Why the node is not ready. Empty if it is.
        is_local: The check failed because of the router itself.
        ends_requests: The node can no longer answer its requests, or there is no sign that it will.
        load_failure_policy: The node's policy. Empty if it does not report one.
        is_reported: `error` is what the node reports about itself.
        continues_answers: The node goes on with an answer that another node has begun which has this digest
            of its model. Empty: it does not.
        kv_role: What the node does by its own account, in vLLM's words. Empty if it does not say.
        models: The names of the models that it serves, adapters among them. Empty if it does not say.
        description: What its connector says of this start of the node, in `kv_transfer_params`. Empty if it
            does not say.
        occupancy: What it has to do. None if it does not say.
    """

    state: NodeState | None
    error: str = ""
    is_local: bool = False
    ends_requests: bool = False
    load_failure_policy: str = ""
    is_reported: bool = False
    continues_answers: str = ""
    kv_role: str = ""
    models: frozenset[str] = frozenset()
    description: Mapping[str, Any] = field(default_factory=dict)
    occupancy: Occupancy | None = None


@dataclass(frozen=True)
class EjectionRule:
    """When requests that fail eject a node whose checks succeed.

    Attributes:
        num_failures: Failed requests in a row that eject a node. 0: none do.
        first_s: Seconds of the first ejection. Each further one lasts twice as long, until a request
            succeeds.

    Raises:
        ValueError: A value is out of range.
    """

    num_failures: int = 5
    first_s: float = 10.0

    def __post_init__(self) -> None:
        if self.num_failures < 0:
            raise ValueError(f"--eject-after {self.num_failures}: it must be 0 or more failed requests")
        if not 0 < self.first_s <= LONGEST_EJECTION_S:
            raise ValueError(
                f"--eject-s {self.first_s:g}: it must be more than 0 and at most {LONGEST_EJECTION_S:g} seconds"
            )

    def lasts_s(self, num_in_a_row: int) -> float:
        """Return how long the ejection number `num_in_a_row` lasts, counted from 1."""
        # Bound the exponent before the power: a node that is broken for days is ejected very often.
        return min(LONGEST_EJECTION_S, self.first_s * 2.0 ** min(num_in_a_row - 1, 16))


class NodeStatus:
    """The state of one node, and the counts that decide the next one.

    Args:
        ejection: When failed requests eject the node.

    Attributes:
        state: The node's state.
        check_error: Why the last check failed. Empty if it succeeded.
        num_failed_checks: Checks in a row without a usable answer. A failed request counts as one, until the
            next check.
        num_failed_requests: Requests in a row that failed.
        num_ejections: Ejections so far.
        ejected_until: The time at which the last ejection ends, on the clock of the caller.
    """

    def __init__(self, ejection: EjectionRule | None = None) -> None:
        self._ejection = ejection or EjectionRule()
        self.state = NodeState.UNKNOWN
        self.check_error = "not checked yet"
        self.num_failed_checks = 0
        self.num_failed_requests = 0
        self.num_ejections = 0
        self.ejected_until = 0.0
        self._num_ejections_in_a_row = 0
        self._reported = ""
        self._request_error = ""

    @property
    def is_on_trial(self) -> bool:
        """Whether the node is back from an ejection, and no request has succeeded since.

        One more failure ejects it again.
        """
        return self._num_ejections_in_a_row > 0 and self.state is NodeState.READY

    @property
    def why(self) -> str:
        """Why the node is not ready. Empty if it is."""
        match self.state:
            case NodeState.EJECTED:
                failed = self.num_failed_requests
                return f"{failed} requests in a row failed, the last one because: {self._request_error}"
            case NodeState.LEAVING:
                return "no source names the node any more; its requests may finish"
            case _:
                return self.check_error

    def checked(self, health: Health, now: float) -> None:
        """Apply the result of a check. A failure of the router itself changes only `check_error`."""
        if health.is_local:
            self.check_error = health.error
            return
        self.num_failed_checks = 0 if health.state else self.num_failed_checks + 1
        self.check_error = health.error
        if health.is_reported or not health.error:
            self._reported = health.error
        elif self._reported:
            self.check_error += f"; before that {self._reported}"
        found = health.state
        if found is None and self.num_failed_checks >= FAILED_CHECKS_UNTIL_GONE:
            found = NodeState.GONE
        if self.state is NodeState.LEAVING or found is None:
            return
        if found is NodeState.GONE:
            # Whatever answers at this address later is a new process, so failures of the old one say nothing
            # about it.
            self.num_failed_requests = self._num_ejections_in_a_row = 0
        is_still_ejected = self.state is NodeState.EJECTED and now < self.ejected_until
        is_up = found in (NodeState.READY, NodeState.OVERLOADED)
        if not (is_up and is_still_ejected):
            self.state = found

    def suspect(self) -> None:
        """Note a failure that suggests that the node is gone. The next good check clears it."""
        self.num_failed_checks = max(1, self.num_failed_checks)

    def request_answered(self) -> None:
        """Note a request that the node answered to its end."""
        self.num_failed_requests = self._num_ejections_in_a_row = 0

    def request_failed(self, error: str, now: float, *, has_substitute: bool) -> None:
        """Note a request that the node failed, and eject the node if that is one too many.

        Args:
            error: Why it failed.
            has_substitute: Another node of the role is ready. The last ready one is not ejected, because a
                node that fails some requests is better than none.
        """
        self.num_failed_requests += 1
        self._request_error = error
        limit = self._ejection.num_failures
        is_over = 0 < limit <= self.num_failed_requests or self.is_on_trial
        if self.state is NodeState.READY and is_over and has_substitute:
            self._num_ejections_in_a_row += 1
            self.num_ejections += 1
            self.ejected_until = now + self._ejection.lasts_s(self._num_ejections_in_a_row)
            self.state = NodeState.EJECTED

    def drop(self) -> None:
        """Take no new request from now on, because no source names the node any more."""
        self.state = NodeState.LEAVING

    def name_again(self) -> None:
        """Return from `LEAVING`, because a source names the node again. A check has to find out how it is."""
        self.state = NodeState.UNKNOWN


def bound(loads: Mapping[str, int], factor: float) -> int:
    """Return how many requests a node may have, the next one included: `factor` times its share, rounded up.

    Args:
        loads: The requests that each node has.
        factor: At least 1. With 1, every node has its share exactly.
    """
    return math.ceil(factor * (sum(loads.values()) + 1) / len(loads))
