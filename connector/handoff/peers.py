"""The consumer's peers, one producer per address: connecting, the handshake, and the backoff after a
failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...transports.errors import IncompatiblePeerError, ProtocolError, TransferTimeoutError
from ..planning.compatibility import advisory_differences, require_compatible
from ..planning.layout import KVLayout
from .config import HandoffConfig
from .events import Action, Connect, Disconnect, Identity, LayersLeftOut, PeerDiffers, Send
from .messages import MAX_HEARTBEAT_LEASES, ConsumerMessage, Heartbeat, Hello, Welcome

#: In place of the peer id of a connection that the runtime has not started yet.
_UNKNOWN = -1
#: How many starts of peers' nodes are remembered as warned of. Past it all are forgotten, and warned of
#: again.
_MAX_WARNED = 1024


@dataclass
class PeerSession:
    """A producer whose handshake is done.

    Attributes:
        layout: Where the pages lie in its pool.
        version: The version of the protocol that both of us speak.
        next_heartbeat: When its leases must be renewed; infinity while there are none.
    """

    peer_id: int
    engine_id: str
    epoch: int
    layout: KVLayout
    version: int
    next_heartbeat: float = math.inf

    def heartbeats(self, leases: Sequence[int]) -> list[Action]:
        """Renew these leases."""
        starts = range(0, len(leases), MAX_HEARTBEAT_LEASES)
        return [self.send(Heartbeat(tuple(leases[first : first + MAX_HEARTBEAT_LEASES]))) for first in starts]

    def send(self, message: ConsumerMessage) -> Send:
        """Send a message in the version that the producer speaks."""
        return Send(self.peer_id, message, self.version)


@dataclass
class _Waiting:
    """Waiting since `since`, until `deadline`, because `max_connecting` other connections are in progress."""

    since: float
    deadline: float
    failures: int


@dataclass
class _Connecting:
    """Connecting and shaking hands, until `deadline`.

    Attributes:
        version: The version of our last `Hello`.
    """

    deadline: float
    failures: int
    version: int
    peer_id: int = _UNKNOWN


@dataclass
class _Resting:
    """Backing off after a failure, until `until`. Then an address that `is_wanted` is connected to."""

    until: float
    failures: int
    is_wanted: bool = False


_State = _Waiting | _Connecting | PeerSession | _Resting


class Peers:
    """Producers by address.

    An address is unknown, waiting, connecting, ready (it has a session) or resting. After a failure it rests,
    for a time that doubles with each failure. A claim that needs the address meanwhile waits for the next
    attempt, so it waits at most `max_backoff_s + connect_timeout_s` for its session.

    Connections cost descriptors, and anyone who can send a request can name addresses. So at most
    `max_connecting` are in progress at once. Further addresses wait; the one that has waited longest is next.
    Waiting counts towards `connect_timeout_s`.
    """

    def __init__(self, identity: Identity, config: HandoffConfig) -> None:
        self._identity = identity
        self._config = config
        self._states: dict[str, _State] = {}
        self._address_of: dict[int, str] = {}
        self._warned: set[tuple[str, int, str]] = set()  # engine id, epoch, and of what

    def session(self, address: str) -> PeerSession | None:
        """The session with this address, if the handshake is done."""
        state = self._states.get(address)
        return state if isinstance(state, PeerSession) else None

    def sessions(self) -> list[tuple[str, PeerSession]]:
        """All sessions, by address."""
        return [(key, state) for key, state in self._states.items() if isinstance(state, PeerSession)]

    def address_of(self, peer_id: int) -> str | None:
        """The address of a peer that is connecting or ready."""
        return self._address_of.get(peer_id)

    # -- one address -----------------------------------------------------------------------------------

    def want(self, address: str, now: float) -> list[Action]:
        """Connect to the address, unless that is in progress or done."""
        state = self._states.get(address)
        if state is None:
            return self._connect(address, 0, now)
        if isinstance(state, _Resting):
            state.is_wanted = True
            return self._end_rest(address, state, now)
        return []

    def started(self, address: str, peer_id: int) -> list[Action]:
        """Note the peer id of the connection that was asked for."""
        state = self._states.get(address)
        if not isinstance(state, _Connecting) or state.peer_id != _UNKNOWN:
            return [Disconnect(peer_id)]  # it took so long that the address has failed meanwhile
        state.peer_id = peer_id
        self._address_of[peer_id] = address
        return []

    def say_hello(self, peer_id: int) -> list[Action]:
        """Begin the handshake on a connection that is made, or repeat the `Hello` in an earlier version."""
        state = self._states[self._address_of[peer_id]]
        assert isinstance(state, _Connecting)
        me = self._identity
        hello = Hello(state.version, me.engine_id, me.epoch, me.digest, me.release)
        return [Send(peer_id, hello, state.version)]

    def lower_version(self, address: str, welcome: Welcome) -> list[Action]:
        """Say hello again in an earlier version, if that is what the producer answered; otherwise nothing.

        A producer of an earlier release answers a `Hello` that is too new for it with its own newest version,
        and then still waits for one that it knows. Each repetition is in an earlier version, so there are
        only a few.
        """
        state = self._states[address]
        if not isinstance(state, _Connecting) or welcome.version >= state.version:
            return []
        state.version = welcome.version
        return self.say_hello(state.peer_id)

    def welcome(self, address: str, welcome: Welcome) -> PeerSession:
        """Finish the handshake: compare the digest first, then the fields, and only then decode the layout.

        A layout of another model may have a form that we cannot judge, so the fields must be equal before it
        is looked at.

        Raises:
            IncompatiblePeerError: the peer's cache cannot be read into ours; names the field.
            VersionMismatchError: the two nodes describe caches by different rules.
            ProtocolError: the layout is malformed, the `Welcome` answers no `Hello` of ours, or the handshake
                was done before.
        """
        state = self._states[address]
        if not isinstance(state, _Connecting):
            raise ProtocolError(f"unexpected Welcome from {address}: the handshake is done")
        if welcome.version != state.version:
            raise ProtocolError(
                f"unexpected Welcome from {address}: it has version {welcome.version}, our Hello had {state.version}"
            )
        mine = self._identity
        if welcome.digest != mine.digest:
            require_compatible(mine.fields, welcome.fields)
            raise IncompatiblePeerError(field="digest", local=mine.digest, remote=welcome.digest)
        layout = KVLayout.from_plain(welcome.layout)
        session = PeerSession(state.peer_id, welcome.engine_id, welcome.epoch, layout, state.version)
        self._states[address] = session
        return session

    def compare(self, welcome: Welcome, rank: int) -> list[Action]:
        """Warn of fields that may differ and do: once per start of the peer's node, not once per rank.

        Every rank of ours connects to every rank of the peer, so only rank 0 warns.
        """
        differences = advisory_differences(self._identity.fields, welcome.fields)
        if rank or not differences or not self._is_first(welcome.engine_id, welcome.epoch, "fields"):
            return []
        return [PeerDiffers(welcome.engine_id, differences)]

    def leave_out(self, engine_id: str, epoch: int, layers: Sequence[str]) -> list[Action]:
        """Say which of our layers this start of a node cannot fill, if there are any: once per start of the
        node.
        """
        if not layers or not self._is_first(engine_id, epoch, "layers"):
            return []
        return [LayersLeftOut(engine_id, tuple(layers))]

    def _is_first(self, engine_id: str, epoch: int, what: str) -> bool:
        """Whether it is the first warning of this kind about this start of a node."""
        name = engine_id, epoch, what
        if name in self._warned:
            return False
        if len(self._warned) >= _MAX_WARNED:
            self._warned.clear()
        self._warned.add(name)
        return True

    def fail(self, address: str, now: float) -> list[Action]:
        """Drop a peer that is connecting or ready, and back off from its address."""
        state = self._states.get(address)
        if state is None or isinstance(state, _Resting):
            return []
        # A session proves that the peer works, so its loss starts the backoff from the beginning.
        failures = 1 + (0 if isinstance(state, PeerSession) else state.failures)
        rest = min(self._config.backoff_s * 2.0 ** min(failures - 1, 32), self._config.max_backoff_s)
        self._states[address] = _Resting(now + rest, failures)
        if isinstance(state, _Waiting):
            return []
        # Disconnect first: the next connection may need the descriptors of this one.
        actions: list[Action] = []
        if state.peer_id != _UNKNOWN:
            del self._address_of[state.peer_id]
            actions.append(Disconnect(state.peer_id))
        return actions + self._start_waiting(now)

    def num_failures(self, address: str) -> int:
        """How many attempts to connect to a resting address have failed in a row; 0 for any other."""
        state = self._states.get(address)
        return state.failures if isinstance(state, _Resting) else 0

    def forget(self, address: str) -> None:
        """End the backoff of an address, so that the next attempt is made at once."""
        if isinstance(self._states.get(address), _Resting):
            del self._states[address]

    # -- all of them -----------------------------------------------------------------------------------

    def overdue(self, now: float) -> list[str]:
        """Addresses whose connection took too long."""
        return [
            address
            for address, state in self._states.items()
            if isinstance(state, _Connecting | _Waiting) and state.deadline <= now
        ]

    def lateness(self, address: str) -> TransferTimeoutError:
        """Why an overdue address has no session."""
        if isinstance(self._states.get(address), _Waiting):
            busy = f"max_connecting={self._config.max_connecting} other connections were in progress"
            return TransferTimeoutError(f"timed out waiting to connect to {address}: {busy}")
        return TransferTimeoutError(
            f"timed out waiting for the handshake with {address}; is its node running?"
        )

    def advance(self, now: float) -> list[Action]:
        """Connect to addresses that wait for a place or whose backoff is over; forget those that are not
        wanted.
        """
        actions = self._start_waiting(now)
        resting = [(key, state) for key, state in self._states.items() if isinstance(state, _Resting)]
        return actions + [
            action for address, state in resting for action in self._end_rest(address, state, now)
        ]

    def next_deadline(self) -> float:
        """When `overdue`, `advance` or a heartbeat is due."""
        # A place became free after the last action, for example by a handshake that ended.
        if self._waiting() and self._num_free():
            return -math.inf
        return min((self._deadline(state) for state in self._states.values()), default=math.inf)

    def begin_anew(self, identity: Identity) -> list[Action]:
        """Drop every peer, and shake hands as `identity` from now on."""
        self._identity = identity
        return self.close()

    def close(self) -> list[Action]:
        """Drop every peer."""
        actions: list[Action] = [Disconnect(peer_id) for peer_id in self._address_of]
        self._states.clear()
        self._address_of.clear()
        return actions

    def _connect(self, address: str, failures: int, now: float) -> list[Action]:
        # A dict keeps its order: this puts the address at the end of the queue.
        self._states.pop(address, None)
        self._states[address] = _Waiting(now, now + self._config.connect_timeout_s, failures)
        return self._start_waiting(now)

    def _start_waiting(self, now: float) -> list[Action]:
        """Connect to the addresses that have waited longest, as many as `max_connecting` allows."""
        actions: list[Action] = []
        # Those that are overdue are left for `overdue`: a connection would start with no time left.
        ready = [(key, state) for key, state in self._waiting() if now < state.deadline]
        for address, state in ready[: self._num_free()]:
            # Each connection begins with our newest version: the node at this address may have been upgraded.
            self._states[address] = _Connecting(state.deadline, state.failures, self._identity.spoken[-1])
            actions.append(Connect(address, self._config.connect_timeout_s - (now - state.since)))
        return actions

    def _waiting(self) -> list[tuple[str, _Waiting]]:
        return [(key, state) for key, state in self._states.items() if isinstance(state, _Waiting)]

    def _num_free(self) -> int:
        num_connecting = sum(isinstance(state, _Connecting) for state in self._states.values())
        return max(0, self._config.max_connecting - num_connecting)

    def _end_rest(self, address: str, state: _Resting, now: float) -> list[Action]:
        if now < self._deadline(state):
            return []
        if state.is_wanted:
            return self._connect(address, state.failures, now)
        del self._states[address]
        return []

    def _deadline(self, state: _State) -> float:
        match state:
            case _Connecting() | _Waiting():
                return state.deadline
            case PeerSession():
                return state.next_heartbeat
            case _Resting(is_wanted=True):
                return state.until
            case _Resting():
                # Keep the entry past its backoff, so that consecutive failures keep doubling it.
                return state.until + self._config.max_backoff_s
