"""Which requests may enter now. Owns: open requests per key, the queue's ceiling, rate limits, fair share, and
draining.

Requests are refused here before any work is done and before the first byte is sent. Must not know: HTTP details,
engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.core.errors import TooLargeError
from tokenmill.server.errors import HttpError, shutting_down

MOST_HELD = 1 << 20
"""Most log-probabilities in all answers in progress. Each takes about half a kilobyte while it is written."""


@dataclass(slots=True)
class Tenant:
    """One key's use of the server. `requests` and `tokens`: how many its rate limits still allow."""

    open: int = 0
    requests: float = 0.0
    tokens: float = 0.0
    refilled: float = 0.0


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Ceilings. A rate of 0 means no limit. `tenants`: how many keys share the capacity."""

    capacity: int = 1024
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tenants: int = 1


@dataclass(slots=True)
class Gate:
    """Counts outputs: a request with n = 4 counts as four."""

    limits: GateLimits
    on_reject: Callable[[str], None] = lambda reason: None
    clock: Callable[[], float] = time.monotonic
    open: int = 0
    draining: bool = False
    held: int = 0
    """Log-probabilities that the answers in progress hold."""
    tenants: dict[str, Tenant] = field(default_factory=dict)

    def is_shut(self) -> bool:
        """Would every new request be refused?"""
        return self.draining or self.open >= self.limits.capacity

    def peek(self) -> None:
        """Refuse early, before the body is read, if no request could enter."""
        self._check_open()
        if self.is_shut():
            self._full()

    def enter(self, name: str, count: int = 1) -> None:
        """Let a request with `count` outputs in, or raise the error for its client."""
        self._check_open()
        tenant = self._tenant(name)
        self._check_rates(tenant)
        self._take(tenant, count)
        tenant.requests -= 1

    def _check_open(self) -> None:
        if self.draining:
            self.on_reject("draining")
            raise shutting_down()

    def grow(self, name: str, count: int, held: int, param: str | None) -> None:
        """Give a request that has `held` places `count` more. They do not count towards requests per minute. `param`:
        the field to blame if the server can never take that many."""
        limits = self.limits
        most = limits.capacity - self._own() * (limits.tenants - 1)
        if held + count > most:
            message = f"The request asks for {held + count} outputs at once; this server takes at most {most}."
            raise TooLargeError(message, param=param)
        self._take(self._tenant(name), count)

    def _own(self) -> int:
        """Places reserved for each key; together they are half of the capacity."""
        return 0 if self.limits.tenants == 1 else max(1, self.limits.capacity // (2 * self.limits.tenants))

    def _take(self, tenant: Tenant, count: int) -> None:
        share = self.limits.capacity
        if self.limits.tenants > 1:  # half is guaranteed to the keys, half is first come, first served
            own = self._own()
            borrowed = sum(max(0, t.open - own) for t in self.tenants.values())
            left = share - own * self.limits.tenants - borrowed
            if tenant.open + count > own and count > left + max(0, own - tenant.open):
                self._refuse(429, "share", "This key has its share of the server's requests open already.", 1)
        elif self.open + count > share:
            self._full()
        tenant.open += count
        self.open += count

    def leave(self, name: str, count: int = 1, tokens: int = 0) -> None:
        """Give the places back, and count the `tokens` that the request used against the key's rate."""
        tenant = self._tenant(name)
        tenant.open -= count
        tenant.tokens -= tokens
        self.open -= count

    def hold(self, count: int) -> None:
        """Count `count` more log-probabilities that an answer holds until `let_go`."""
        self.held += count
        if self.held > MOST_HELD:
            self._refuse(503, "logprobs", "Answers in progress hold all log-probabilities that fit; try again.", 5)

    def let_go(self, count: int) -> None:
        """The answer that held these log-probabilities has ended."""
        self.held -= count

    def _tenant(self, name: str) -> Tenant:
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(
                requests=float(self.limits.requests_per_minute),
                tokens=float(self.limits.tokens_per_minute),
                refilled=self.clock(),
            )
        return tenant

    def _check_rates(self, tenant: Tenant) -> None:
        limits, now = self.limits, self.clock()
        minutes, tenant.refilled = (now - tenant.refilled) / 60.0, now
        tenant.requests = min(limits.requests_per_minute, tenant.requests + minutes * limits.requests_per_minute)
        tenant.tokens = min(limits.tokens_per_minute, tenant.tokens + minutes * limits.tokens_per_minute)
        if limits.requests_per_minute and tenant.requests < 1:
            wait = (1 - tenant.requests) / limits.requests_per_minute * 60
            self._refuse(429, "requests_per_minute", "Too many requests per minute for this key.", wait)
        if limits.tokens_per_minute and tenant.tokens <= 0:
            wait = (1 - tenant.tokens) / limits.tokens_per_minute * 60
            self._refuse(429, "tokens_per_minute", "Too many tokens per minute for this key.", wait)

    def _full(self) -> None:
        most = self.limits.capacity
        self._refuse(503, "queue_full", f"{self.open} outputs are open; the server takes no more than {most}.", 1)

    def _refuse(self, status: int, reason: str, message: str, retry_after: float) -> None:
        self.on_reject(reason)
        raise HttpError(status, message, retry_after=retry_after)
