"""Names, addresses and ports of one local cluster, which are separate from those of others."""

import re
from dataclasses import dataclass
from pathlib import Path

PORTS = ("api", "etcd", "etcd-peers", "controllers", "scheduler", "kubelet", "kubelet-health")
FIRST_PORT = 20000
"""First port. A hundred clusters with a hundred ports each stay below the ephemeral ports."""
LONGEST_SOCKET = 90
"""Maximum length of containerd's socket path, to leave room for the suffixes that it adds."""
_NAME = re.compile(r"[a-z][a-z0-9]{0,7}")


class ClusterError(Exception):
    """The cluster cannot continue. The message names the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings that separate several clusters on one machine.

    Attributes:
        folder: The folder of all clusters' files, and of the programs that they share.
        name: Prefix for the names of network links, iptables chains and control groups.
        number: A number from 0 to 99 that selects the third byte of addresses, and a hundred ports.
    """

    folder: Path
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
        if len(str(self.socket)) > LONGEST_SOCKET:
            raise ClusterError(
                f"{self.socket}: the path is too long for a socket; give a shorter --folder"
            )

    @property
    def home(self) -> Path:
        """The folder of this cluster's files."""
        return self.folder / self.name

    @property
    def node(self) -> str:
        return f"{self.name}-node"

    @property
    def group(self) -> str:
        """Name of the cluster's control groups, which no other program uses."""
        return f"ullage-{self.name}"

    @property
    def bridge(self) -> str:
        return f"{self.name}0"

    @property
    def address(self) -> str:
        """The node's address, which the bridge, the API server, the kubelet and DNS share."""
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

    def port(self, purpose: str) -> int:
        return FIRST_PORT + 100 * self.number + PORTS.index(purpose)

    @property
    def api_url(self) -> str:
        return f"https://{self.address}:{self.port('api')}"

    @property
    def kubeconfig(self) -> Path:
        return self.home / "admin.conf"

    @property
    def socket(self) -> Path:
        """Path of containerd's socket."""
        return self.home / "containerd.sock"
