"""What tests make the server do wrong: refuse, drop, delay, and deny rights."""

import re
from dataclasses import dataclass

from ullage_kubeapi.routes import Target
from ullage_kubeapi.status import ApiError

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass
class Fault:
    """Answers `times` requests that match with `status`; status 0 drops the connection."""

    method: str
    path: re.Pattern[str]
    status: int
    times: int
    retry_after: int = 0
    delay_s: float = 0.0
    """Answers only after so long; alone, for status 200, the answer is the true one."""

    def strikes(self, method: str, path: str) -> bool:
        if self.times and method == self.method and self.path.search(path):
            self.times -= 1
            return True
        return False


class Faults:
    """Those that wait for their request, and the rights that are denied."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._denied: set[tuple[str, str]] = set()

    def add(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def deny(self, verb: str, plural: str) -> None:
        self._denied.add((verb, plural))

    def grant(self, verb: str, plural: str) -> None:
        self._denied.discard((verb, plural))

    def allows(self, verb: str, plural: str) -> bool:
        return (verb, plural) not in self._denied

    def striking(self, method: str, path: str) -> Fault | None:
        return next((fault for fault in self._faults if fault.strikes(method, path)), None)

    def check(self, method: str, is_watch: bool, where: Target) -> None:
        """Raises Forbidden, as an authorizer says it, where the right is denied."""
        verb = _VERBS.get(method) or ("get" if where.name else "watch" if is_watch else "list")
        resource = where.resource
        if self.allows(verb, resource.plural):
            return
        place = f'in the namespace "{where.namespace}"' if where.namespace else "at cluster scope"
        name = f' "{where.name}"' if where.name else ""
        text = (
            f'{resource.qualified}{name} is forbidden: User "tester" cannot {verb} resource '
            f'"{resource.plural}" in API group "{resource.group}" {place}'
        )
        raise ApiError(403, "Forbidden", text)
