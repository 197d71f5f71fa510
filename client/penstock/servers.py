"""Servers: the replicas that one rank may ask, in which order, and which of them answer."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from random import uniform
from urllib.parse import urlsplit

from xxhash import xxh3_64_intdigest

from penstock.access import Access, split_login
from penstock.errors import PenstockError, SpecError, WireError
from penstock.http import HttpClient, proxy_of
from penstock.responses import TransientError

_LOOK_SECONDS = 20.0  # mean time between looks at DNS and at replicas that were down
_MAX_AWAY_SECONDS = 300.0  # that a replica is left alone which is ready, but fails
_GLANCE_SECONDS = 0.2  # that a request waits for a look; with a lost packet or a slow resolver, a look takes seconds
_READY_SECONDS = 2.0  # that a replica may be silent before it counts as down
_SPREAD_TOGETHER = 1024  # ranks: bounds the cost of by_preference
_ADDRESS = re.compile(
    r"https?://(?:[\w-]{1,63}(?:\.[\w-]{1,63})*\.?|\[[\da-f:.%]+\])(?::(\d{1,5}))?(?:/[!-~]*)?", re.ASCII | re.IGNORECASE
)
_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}")


class Servers:
    """Replicas in the order that one rank prefers them, and the health of each.

    The replicas are the given addresses. If there is one address, and DNS has several IPs for its name, each IP is a replica,
    such as "http://data:8000#10.0.0.7": a URL whose connections go to that IP.

    The rank asks the first replica in its order that is not down. A replica is down from a failure, or from its word that it
    will stop, until it is ready again. Replicas that are down come last, the one first that went down first. A replica that is
    ready, but fails again before it has answered, is left alone for longer each time.

    A thread looks now and then whether DNS has other IPs, and whether a replica is ready that the rank prefers to its current
    one. New replicas are down until this thread has reached them, so no loop waits for one that is not there yet.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int = 0,
        world_size: int = 1,
        *,
        access: Access | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._world_size, self._access, self._clock = rank, world_size, access, clock
        self._name = addresses[0] if len(addresses) == 1 and _is_looked_up(addresses[0]) else None
        # In the order of preference. Replaced as a whole: another iteration may read it meanwhile.
        self._replicas = {address: _Replica() for address in by_preference(addresses, rank, world_size)}
        self._answered_last = self.addresses[0]
        self._look_at = 0.0
        self._thread: threading.Thread | None = None
        self._seen: tuple[tuple[str, ...], str | None] | None = None  # by the thread: replicas, and one that is ready

    @property
    def addresses(self) -> tuple[str, ...]:
        """The replicas, the preferred ones first."""
        return tuple(self._replicas)

    @property
    def current(self) -> str:
        """The replica to ask next."""
        return self._in_order()[0]

    def __len__(self) -> int:
        return len(self._replicas)

    def to_try(self, *, also_busy: bool = False) -> list[str]:
        """Return the replicas to try now, each once, in order, without those whose Retry-After has not passed."""
        self._look_around()
        now = self._clock()
        return [address for address in self._in_order() if also_busy or self._of(address).not_before <= now]

    def seconds_until_ready(self) -> float:
        """Return the seconds until a replica may be asked; 0 for now."""
        return max(0.0, min(replica.not_before for replica in self._replicas.values()) - self._clock())

    def leave_alone(self, address: str, seconds: float) -> None:
        """Record that a replica requests no retry for `seconds`."""
        self._of(address).not_before = self._clock() + seconds

    def failed(self, address: str, after_seconds: float = 0.0) -> str:
        """Record that a replica failed and requests no retry for `after_seconds`. Return the next one."""
        self.leave_alone(address, after_seconds)
        self._went_down(self._of(address))
        if self._name and all(replica.down_since for replica in self._replicas.values()):
            self._look_at = self._clock()  # all may have got other IPs
        return self.current

    def leave(self, address: str) -> str:
        """Record an answer of a replica that will stop. Return the next one."""
        replica = self._of(address)
        replica.not_before = 0.0
        if not replica.down_since:
            self._went_down(replica)
            replica.num_relapses = 0
        return self.current

    def answered(self, address: str) -> bool:
        """Record an answer. Return whether the rank prefers this replica to the one that answered before."""
        replica, now = self._of(address), self._clock()
        replica.not_before, replica.down_since, replica.num_relapses = 0.0, 0.0, 0
        for other in self._replicas.values():  # such as replicas that still count the tokens: this one has done that
            if other.not_before > now and not other.down_since:
                self._went_down(other)
        before, self._answered_last = self._answered_last, address
        order = self.addresses
        return {address, before} <= {*order} and order.index(address) < order.index(before)

    def _of(self, address: str) -> _Replica:
        """Return the health of a replica; of one that DNS no longer has, a record that nothing reads."""
        return self._replicas.get(address) or _Replica()

    def _went_down(self, replica: _Replica) -> None:
        now = self._clock()
        replica.num_relapses += not replica.down_since
        replica.down_since = now
        if self._look_at <= now:
            self._look_at = _next_look(now)

    def _in_order(self) -> list[str]:
        replicas = self._replicas
        return sorted(replicas, key=lambda address: replicas[address].down_since)

    def _look_around(self) -> None:
        """Have the thread look if it is time, and note what it has seen."""
        now = self._clock()
        has_reason = self._name or (len(self) > 1 and self._of(self.addresses[0]).down_since)
        if has_reason and now >= self._look_at and not (self._thread and self._thread.is_alive()):
            self._look_at = _next_look(now)
            self._thread = thread = threading.Thread(target=self._look, args=(now,), name="penstock-look", daemon=True)
            with suppress(RuntimeError):  # no thread can be started now
                thread.start()
                thread.join(_GLANCE_SECONDS)
        seen, self._seen = self._seen, None
        if not seen:
            return
        addresses, ready = seen
        if addresses != self.addresses:
            known = self._replicas
            self._replicas = {address: known.get(address) or _Replica(down_since=now) for address in addresses}
        if ready:
            self._of(ready).down_since = 0.0

    def _look(self, now: float) -> None:
        """Find the replicas, and one that is ready and preferred to all that are not down. Runs in the thread."""
        known = self._replicas
        addresses = tuple(known)
        if self._name and (found := replicas_of(self._name)) and {*found} != {*addresses}:
            addresses = by_preference(found, self._rank, self._world_size)
        for address in addresses:
            replica = known.get(address) or _Replica(down_since=now)
            if not replica.down_since:
                break
            if now - replica.down_since >= replica.away_seconds and is_ready(address, self._access):
                self._seen = addresses, address
                return
        self._seen = addresses, None


@dataclass(slots=True)
class _Replica:
    """Health of a replica. Times are those of the clock.

    down_since    0: it is not down
    num_relapses  how often it failed since its last answer, although it was not down
    not_before    end of its Retry-After
    """

    down_since: float = 0.0
    num_relapses: int = 0
    not_before: float = 0.0

    @property
    def away_seconds(self) -> float:
        """Seconds to leave it alone, also if it is ready: 0, 20, 60, 140, 300."""
        return min(_LOOK_SECONDS * (2.0 ** max(0, self.num_relapses - 1) - 1), _MAX_AWAY_SECONDS)


def by_preference(addresses: Iterable[str], rank: int, world_size: int) -> tuple[str, ...]:
    """Return replicas in the order that a rank prefers them. All ranks know each other's order.

    Each rank takes the replica with the highest hash of (replica, rank): rendezvous hashing (Thaler and Ravishankar 1998,
    "Using name-based mappings to increase hit rates"). So a replica that comes or goes moves few ranks but its own. Chance
    would give one of 4 replicas 20 of 64 ranks. Hence the ranks choose in turn, and a replica that has its even share takes no
    more, as with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018).

    The ranks with the same first choice choose their second in the same way, and so on. So the ranks of a replica that is lost
    spread evenly over the others, also if several are lost.
    """
    start = rank // _SPREAD_TOGETHER * _SPREAD_TOGETHER
    ranks: Sequence[int] = range(start, min(start + _SPREAD_TOGETHER, max(world_size, rank + 1)))
    left = sorted(addresses)
    order = []
    while left:
        share, num_larger = divmod(len(ranks), len(left))  # num_larger replicas take one rank more
        room = dict.fromkeys(left, share)
        choices = {}
        for each in ranks:
            full = -1 if num_larger else 0
            choice = max((address for address in left if room[address] > full), key=partial(_score, each))
            num_larger -= room[choice] == 0
            room[choice] -= 1
            choices[each] = choice
        order.append(choices[rank])
        left.remove(choices[rank])
        ranks = [each for each in ranks if choices[each] == choices[rank]]
    return tuple(order)


def _score(rank: int, address: str) -> int:
    return xxh3_64_intdigest(f"{address} {rank}".encode())


def replicas_of(address: str) -> tuple[str, ...]:
    """Return the replicas that DNS has at an address: one for each IP of its name; () if the lookup fails."""
    url = urlsplit(address)
    try:
        found = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    # A host with an IPv4 and an IPv6 address is one replica. IPs of a family without a route come last (RFC 6724).
    ips = {place[0] for family, *_, place in found if family == found[0][0]}
    return tuple(f"{address}#{ip}" for ip in ips) if len(ips) > 1 else (address,)


def is_ready(address: str, access: Access | None) -> bool:
    """Whether a replica serves data, and will not stop soon."""
    with closing(HttpClient(_READY_SECONDS, access=access)) as http, suppress(TransientError, PenstockError, WireError):
        http.get(address, "/readyz")
        return True
    return False


def parse_servers(servers: str | Iterable[str], access: Access) -> tuple[str, ...]:
    """Return the addresses of servers, normalized, each once. `access` gets the names and tokens in them.

    "data-{0..3}:8000" stands for data-0:8000 to data-3:8000. http:// may be omitted.

    Raises SpecError: an address is invalid.
    """
    addresses = dict[str, None]()
    for text in (servers,) if isinstance(servers, str) else servers:
        address, login = split_login(text.strip().rstrip("/"))
        address = address if "://" in address else f"http://{address}"
        expanded = _expand(address)
        if not expanded or not all(map(is_address, expanded)):
            raise _not_addresses(address)
        addresses |= dict.fromkeys(expanded)
        if login:
            access.logins |= dict.fromkeys(expanded, login)
    if not addresses:
        raise _not_addresses(servers)
    return tuple(addresses)


def is_address(text: str) -> bool:
    """Whether a text is a server address: a socket can be opened to it, and a path appended to it."""
    match = _ADDRESS.fullmatch(text)
    if not match or {"?", "#", "@"} & {*text}:
        return False
    try:
        urlsplit(text)
    except ValueError:  # [abc] is no IPv6 address
        return False
    return match[1] is None or 0 < int(match[1]) < 1 << 16


def _expand(address: str) -> list[str]:
    """Return the addresses that a range in braces stands for. As in bash, {08..11} keeps the zero."""
    match = _RANGE.search(address)
    if not match:
        return [address]
    before, after, (first, last) = address[: match.start()], address[match.end() :], match.groups()
    return [f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1)]


def _not_addresses(given: object) -> SpecError:
    return SpecError(
        f'servers must be addresses such as "http://localhost:8000" or "http://data-{{0..3}}:8000", not {given!r}', ("servers",)
    )


def _is_looked_up(address: str) -> bool:
    """Whether this process looks up the name of an address; a proxy would do so itself."""
    with suppress(ValueError):
        ip_address(urlsplit(address).hostname or "")
        return False
    return proxy_of(address) is None


def _next_look(now: float) -> float:
    # Ranks that lost a replica together must not come back to it together.
    return now + _LOOK_SECONDS * uniform(0.5, 1.5)
