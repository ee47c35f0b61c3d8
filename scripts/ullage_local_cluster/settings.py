"""Names, addresses and ports of one local cluster, which share nothing with another's."""

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9]{0,7}")


class ClusterError(Exception):
    """The cluster cannot go on; the message names what is missing, and the remedy."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The choices that keep clusters on one machine apart.

    Attributes:
        home: Folder of everything that the cluster writes.
        name: Beginning of the names of links, iptables chains and control groups.
        number: 0 to 99; the third byte of addresses, and hundreds of ports.
    """

    home: Path
    name: str = "ullage"
    number: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ClusterError(
                f"--name {self.name!r} does not fit into names of links; use at most eight of "
                "a-z and 0-9, a letter first"
            )
        if not 0 <= self.number <= 99:
            raise ClusterError(f"--number {self.number} is out of range; use 0 to 99")
        if len(str(self.socket)) > 90:
            raise ClusterError(
                f"{self.home}: the path is too long for sockets; give a shorter --folder"
            )

    @property
    def node(self) -> str:
        return f"{self.name}-node"

    @property
    def bridge(self) -> str:
        return f"{self.name}0"

    @property
    def address(self) -> str:
        """The node's address: of the bridge, of the API, of kubelet and of DNS."""
        return f"10.250.{self.number}.1"

    @property
    def pod_range(self) -> str:
        return f"10.250.{self.number}.0/24"

    @property
    def service_range(self) -> str:
        return f"10.251.{self.number}.0/24"

    @property
    def first_service(self) -> str:
        """The address of the Service `kubernetes`."""
        return f"10.251.{self.number}.1"

    def port(self, index: int) -> int:
        """Return one of the cluster's hundred ports, below the kernel's ephemeral ones."""
        return 20000 + 100 * self.number + index

    @property
    def api_port(self) -> int:
        return self.port(0)

    @property
    def etcd_port(self) -> int:
        return self.port(1)

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(self.port(index) for index in range(7))

    @property
    def api_url(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    @property
    def kubeconfig(self) -> Path:
        return self.home / "admin.conf"

    @property
    def socket(self) -> Path:
        """containerd's socket."""
        return self.home / "containerd.sock"
