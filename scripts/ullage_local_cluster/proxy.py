"""The cluster's network: a separate program for Services, NetworkPolicies and DNS.

The program is a small kube-proxy, policy controller and DNS server for one node. Several times per
second, it lists the objects, and rewrites this cluster's iptables chains if their rules have
changed. Policies apply between pods. The node itself, with the API server, the kubelet and DNS, is
always reachable.
"""

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import httpx

from ullage_local_cluster import dns
from ullage_local_cluster.control_plane import api_client
from ullage_local_cluster.policies import EGRESS, INGRESS, pod_network, policy_rules
from ullage_local_cluster.processes import run
from ullage_local_cluster.services import Object, dns_records, service_rules
from ullage_local_cluster.settings import ClusterSettings

PERIOD_S = 0.4
SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
PODS = "/api/v1/pods"
NAMESPACES = "/api/v1/namespaces"
PATHS = (SERVICES, SLICES, POLICIES, PODS, NAMESPACES)


def chain(name: str, part: str) -> str:
    """Return the name of one of a cluster's iptables chains."""
    return f"ULLAGE-{name.upper()}-{part}"


def ruleset(name: str, objects: dict[str, list[Object]]) -> str:
    """Return the chains that depend on the objects, in the format of iptables-restore."""
    translating, rejecting, loops = service_rules(objects[SERVICES], objects[SLICES])
    network = pod_network(objects[PODS], objects[NAMESPACES])
    nat = {"SERVICES": translating, "LOOPS": loops}
    filtering = {
        "REJECT": rejecting,
        "EGRESS": policy_rules(objects[POLICIES], network, EGRESS),
        "INGRESS": policy_rules(objects[POLICIES], network, INGRESS),
    }
    return table(name, "nat", nat) + table(name, "filter", filtering)


def table(name: str, kind: str, chains: dict[str, list[str]], more: Iterable[str] = ()) -> str:
    """Return one table's chains for iptables-restore. Restoring a chain replaces its rules."""
    lines = [f"*{kind}", *(f":{chain(name, part)} - [0:0]" for part in chains)]
    for part, rules in chains.items():
        lines += [f"-A {chain(name, part)} {rule}" for rule in rules]
    return "\n".join([*lines, *more, "COMMIT", ""])


def hooks(settings: ClusterSettings) -> str:
    """Return the iptables rules that send this cluster's packets to the cluster's chains.

    Accepted packets are forwarded, even if the machine drops forwarded packets by default.
    """
    name = settings.name
    forwarding = [
        "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        *(f"-j {chain(name, part)}" for part in ("REJECT", "EGRESS", "INGRESS")),
        "-j ACCEPT",
    ]
    nat = [
        f"-I PREROUTING -j {chain(name, 'SERVICES')}",
        f"-I OUTPUT -j {chain(name, 'SERVICES')}",
        f"-I POSTROUTING -j {chain(name, 'LOOPS')}",
    ]
    filtering = [
        f"-I FORWARD -s {settings.pod_range} -j {chain(name, 'FORWARD')}",
        f"-I FORWARD -d {settings.pod_range} -j {chain(name, 'FORWARD')}",
        f"-I OUTPUT -j {chain(name, 'REJECT')}",
    ]
    empty: dict[str, list[str]] = {"REJECT": [], "EGRESS": [], "INGRESS": []}
    return table(name, "nat", {"SERVICES": [], "LOOPS": []}, nat) + table(
        name, "filter", {**empty, "FORWARD": forwarding}, filtering
    )


def removal(name: str, saved: str) -> str:
    """Return the commands that remove a cluster's iptables chains.

    Args:
        name: The cluster's name.
        saved: The output of iptables-save.
    """
    prefix = chain(name, "")
    lines: list[str] = []
    chains: list[str] = []
    for line in saved.splitlines():
        words = line.split()
        if line.startswith("*"):
            chains = []
            lines.append(line)
        elif line.startswith(f":{prefix}"):
            chains.append(words[0].removeprefix(":"))
        elif words[:1] == ["-A"] and words[-1].startswith(prefix) and words[1] not in chains:
            lines.append(f"-D {line.removeprefix('-A ')}")
        elif line == "COMMIT":
            # A chain goes once no rule of another one leads to it.
            lines += [f"{option} {each}" for option in ("-F", "-X") for each in chains]
            lines.append(line)
    return "\n".join([*lines, ""])


def restore(rules: str) -> None:
    """Replace the chains in the rule set, and leave all other chains unchanged."""
    subprocess.run(["iptables-restore", "--noflush"], input=rules, text=True, check=True)


def remove_chains(settings: ClusterSettings) -> None:
    restore(removal(settings.name, run("iptables-save")))


def main(settings: ClusterSettings) -> None:
    """Keep DNS and iptables up to date with the objects, until the process is killed."""
    client = api_client(settings)
    remove_chains(settings)
    restore(hooks(settings))
    records: dns.Records = {}
    written = ""
    with dns.serve(settings.address, lambda: records):
        while True:
            try:
                objects = {path: list_objects(client, path) for path in PATHS}
                records = dns_records(objects[SERVICES], objects[SLICES])
                rules = ruleset(settings.name, objects)
                if rules != written:
                    restore(rules)
                    written = rules
            except (httpx.HTTPError, subprocess.CalledProcessError) as error:
                # The API server may be starting or ending.
                print(f"{time.strftime('%T')} {error!r}", flush=True)
            time.sleep(PERIOD_S)


def list_objects(client: httpx.Client, path: str) -> list[Object]:
    """List objects from the API server's cache."""
    answer = client.get(path, params={"resourceVersion": "0"})
    answer.raise_for_status()
    items: list[Object] = answer.json()["items"]
    return items


if __name__ == "__main__":
    main(ClusterSettings(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
