"""The states of a node, and what changes them. Pure: no clock, no socket, no log."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: A node is gone after this many checks in a row without an answer.
FAILED_CHECKS_UNTIL_GONE = 2
#: The longest time for which a node is avoided, in seconds, however many went before it.
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
    REFUSED = "refused"
    LEAVING = "leaving"


USABLE = (NodeState.READY, NodeState.UNKNOWN, NodeState.OVERLOADED)


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
class Abilities:
    """What a node can do with the beginning of an answer.

    Attributes:
        continues_answers: It goes on with answers of nodes with this digest of their model: they would have
            chosen the same tokens for the same request. Empty: with those of none.
        vllm_max_model_len: The longest sequence of a vLLM server, prompt and answer together. 0: it is none.
        vllm_models: The names of its model. Those of adapters are not among them.
        vllm_default_max_tokens: The server's limit on the tokens of an answer whose request has none. 0:
            none.
        vllm_most_tokens: Its limit on the tokens of any answer. 0: none.
    """

    continues_answers: str = ""
    vllm_max_model_len: int = 0
    vllm_models: frozenset[str] = frozenset()
    vllm_default_max_tokens: int = 0
    vllm_most_tokens: int = 0


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
    """When requests that fail let a node be avoided whose checks succeed.

    Attributes:
        num_failures: Failed requests in a row after which a node is avoided. 0: it never is.
        first_s: Seconds of the first time. Each further one lasts twice as long, until a request succeeds.

    Raises:
        ValueError: A value is out of range.
    """

    num_failures: int = 5
    first_s: float = 10.0

    def __post_init__(self) -> None:
        if self.num_failures < 0:
            raise ValueError(f"--eject-after {self.num_failures}: it must be 0 or more failed requests")

    def lasts_s(self, num_in_a_row: int) -> float:
        """Return for how long a node is avoided the time number `num_in_a_row`, counted from 1."""
        # Bound the exponent before the power: a node that is broken for days is avoided very often.
        return min(LONGEST_EJECTION_S, self.first_s * 2.0 ** min(num_in_a_row - 1, 16))


class NodeStatus:
    """The state of one node, and the counts that decide the next one.

    Args:
        ejection: When failed requests let the node be avoided.

    Attributes:
        state: The node's state.
        check_error: Why the last check failed. Empty if it succeeded.
        num_failed_checks: Checks in a row without a usable answer. A failed request counts as one, until the
            next check.
        num_failed_requests: Requests in a row that failed.
        num_ejections: How many times it was avoided so far.
        avoided_until: The time until which failed requests keep new ones away, on the clock of the caller.
    """

    def __init__(self, ejection: EjectionRule | None = None) -> None:
        self._ejection = ejection or EjectionRule()
        self.state = NodeState.UNKNOWN
        self.check_error = "not checked yet"
        self.num_failed_checks = 0
        self.num_failed_requests = 0
        self.num_ejections = 0
        self.avoided_until = 0.0
        self._num_ejections_in_a_row = 0
        self._reported = ""
        self._request_error = ""

    def trouble(self, now: float, num_requests: int) -> int:
        """Return how bad the node is to choose, by its state and failures; 0 if it is well.

        Args:
            num_requests: That it has now. A node that failed again and again is tried with one request at a
                time.
        """
        is_over = now >= self.avoided_until
        if self._num_ejections_in_a_row and not (is_over and num_requests == 0):
            return 2 * len(USABLE)
        rank = USABLE.index(self.state) if self.state in USABLE else len(USABLE)
        return 2 * rank + (self.num_failed_checks > 0)

    @property
    def why(self) -> str:
        """Why the node is not ready, or is avoided. Empty if all is well."""
        match self.state:
            case NodeState.LEAVING:
                return "no source names the node any more; its requests may finish"
            case NodeState.READY if self._num_ejections_in_a_row:
                failed = self.num_failed_requests
                return f"{failed} requests in a row failed, the last one because: {self._request_error}"
            case _:
                return self.check_error

    def checked(self, health: Health) -> None:
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
        if found not in (NodeState.READY, NodeState.OVERLOADED):
            self.avoided_until = 0.0  # when it is back, it is tried at once
        self.state = found

    def suspect(self) -> None:
        """Note a failure that suggests that the node is gone. The next good check clears it."""
        self.num_failed_checks = max(1, self.num_failed_checks)

    def request_answered(self) -> None:
        """Note a request that the node answered to its end."""
        self.num_failed_requests = self._num_ejections_in_a_row = 0

    def request_failed(self, error: str, now: float) -> bool:
        """Note a request that the node failed, with the reason.

        Returns whether the node is avoided because of that.
        """
        self.num_failed_requests += 1
        self._request_error = error
        limit = self._ejection.num_failures
        is_over = 0 < limit <= self.num_failed_requests or self._num_ejections_in_a_row > 0
        # Requests that were there before the node was avoided may fail together, and count once.
        if self.state is not NodeState.READY or not is_over or now < self.avoided_until:
            return False
        self._num_ejections_in_a_row += 1
        self.num_ejections += 1
        self.avoided_until = now + self._ejection.lasts_s(self._num_ejections_in_a_row)
        return True

    def drop(self) -> None:
        """Take no new request from now on, because no source names the node any more."""
        self.state = NodeState.LEAVING

    def name_again(self) -> None:
        """Return from `LEAVING`, because a source names the node again. A check has to find out how it is."""
        self.state = NodeState.UNKNOWN
