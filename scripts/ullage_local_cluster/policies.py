"""Converts NetworkPolicies to iptables rules that pass only allowed packets from and to pods."""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ullage_local_cluster.services import Object

LIVE_PHASES = ("Pending", "Running")
EVERYWHERE = "0.0.0.0/0"


@dataclass(frozen=True, slots=True)
class Direction:
    """The names used in policies and iptables for one direction of packets: ingress or egress."""

    kind: str
    """The policy type. Its lower-case form is the field that has the rules."""
    peers: str
    """The field of a rule that lists the other side's peers."""
    own: str
    """The iptables option for the pod's address."""
    other: str
    """The iptables option for the other side's address."""


INGRESS = Direction("Ingress", "from", "-d", "-s")
EGRESS = Direction("Egress", "to", "-s", "-d")


@dataclass(frozen=True, slots=True)
class PolicyPeer:
    """The other side of allowed packets."""

    network: str
    pod: Object | None = None


@dataclass(frozen=True, slots=True)
class PodNetwork:
    """The pods that have separate addresses, and the labels of all namespaces."""

    pods: Sequence[Object]
    namespace_labels: Mapping[str, Mapping[str, str]]


def pod_network(pods: Iterable[Object], namespaces: Iterable[Object]) -> PodNetwork:
    """Return the pods and namespaces that policies can select, without pods in the host network."""
    live = [
        pod
        for pod in pods
        if pod["status"].get("podIP")
        and pod["status"].get("phase") in LIVE_PHASES
        and not pod["spec"].get("hostNetwork")
    ]
    return PodNetwork(live, {each["metadata"]["name"]: labels(each) for each in namespaces})


def labels(item: Object) -> Mapping[str, str]:
    by_key: Mapping[str, str] = item["metadata"].get("labels", {})
    return by_key


def matches(selector: Object, values: Mapping[str, str]) -> bool:
    """Return whether labels match a label selector. An empty selector matches all labels."""
    return all(
        values.get(key) == value for key, value in selector.get("matchLabels", {}).items()
    ) and all(
        matches_expression(expression, values)
        for expression in selector.get("matchExpressions", ())
    )


def matches_expression(expression: Object, values: Mapping[str, str]) -> bool:
    value = values.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"unknown operator {expression['operator']!r} of a label selector")


def policy_rules(
    policies: Iterable[Object], network: PodNetwork, direction: Direction
) -> list[str]:
    """Return the iptables rules for one direction, without their chain.

    If no policy selects a pod, the pod's packets match no rule.
    """
    allowed: dict[str, set[str]] = {}
    for policy in policies:
        spec = policy["spec"]
        if direction.kind not in spec["policyTypes"]:
            continue
        namespace = policy["metadata"]["namespace"]
        for pod in network.pods:
            is_of_namespace = pod["metadata"]["namespace"] == namespace
            if is_of_namespace and matches(spec.get("podSelector", {}), labels(pod)):
                rules = allowed.setdefault(pod["status"]["podIP"], set())
                for rule in spec.get(direction.kind.lower(), ()):
                    rules |= set(allowances(rule, pod, namespace, network, direction))

    lines: list[str] = []
    for address in sorted(allowed):
        lines += sorted(allowed[address])
        lines.append(f"{direction.own} {address}/32 -j DROP")
    return lines


def allowances(
    rule: Object, pod: Object, namespace: str, network: PodNetwork, direction: Direction
) -> Iterator[str]:
    """Yield the iptables rules that allow a pod the packets that one policy rule allows."""
    own = f"{direction.own} {pod['status']['podIP']}/32"
    for peer in peers(rule.get(direction.peers, ()), namespace, network):
        # A port's name is that of the pod that gets the packets.
        destination = pod if direction is INGRESS else peer.pod
        for ports in port_matches(rule.get("ports", ()), destination):
            yield " ".join(filter(None, (own, direction.other, peer.network, ports, "-j RETURN")))


def peers(entries: Sequence[Object], namespace: str, network: PodNetwork) -> Iterator[PolicyPeer]:
    """Yield the peers that a policy rule allows. A rule without peers allows all."""
    if not entries:
        yield PolicyPeer(EVERYWHERE)
    for entry in entries:
        if block := entry.get("ipBlock"):
            for part in networks_without(block["cidr"], block.get("except", ())):
                yield PolicyPeer(part)
            continue

        for pod in network.pods:
            its_namespace = pod["metadata"]["namespace"]
            if "namespaceSelector" in entry:
                namespace_labels = network.namespace_labels.get(its_namespace, {})
                is_of_namespace = matches(entry["namespaceSelector"], namespace_labels)
            else:
                is_of_namespace = its_namespace == namespace
            if is_of_namespace and matches(entry.get("podSelector", {}), labels(pod)):
                yield PolicyPeer(f"{pod['status']['podIP']}/32", pod)


def networks_without(network: str, excluded: Iterable[str]) -> list[str]:
    """Return the IPv4 networks that cover a network except for the excluded parts."""
    if ":" in network:
        return []
    networks = [ipaddress.IPv4Network(network)]
    for each in excluded:
        part = ipaddress.IPv4Network(each)
        rest: list[ipaddress.IPv4Network] = []
        for piece in networks:
            if not piece.overlaps(part):
                rest.append(piece)
            elif part.subnet_of(piece):
                rest += piece.address_exclude(part)
        networks = rest
    return [str(piece) for piece in sorted(networks)]


def port_matches(ports: Sequence[Object], destination: Object | None) -> Iterator[str]:
    """Yield the iptables options for each port of a rule (an empty text for all ports)."""
    if not ports:
        yield ""
    for entry in ports:
        protocol = entry.get("protocol", "TCP")
        options = f"-p {protocol.lower()}"
        port = entry.get("port")
        if port is None:
            yield options
        elif isinstance(port, str):
            for number in numbers_of(port, protocol, destination):
                yield f"{options} --dport {number}"
        else:
            last = f":{entry['endPort']}" if "endPort" in entry else ""
            yield f"{options} --dport {port}{last}"


def numbers_of(name: str, protocol: str, pod: Object | None) -> list[int]:
    """Return the numbers of the ports with a given name in a pod's containers."""
    spec: Object = pod["spec"] if pod else {}
    containers = [*spec.get("containers", ()), *spec.get("initContainers", ())]
    return [
        port["containerPort"]
        for container in containers
        for port in container.get("ports", ())
        if port.get("name") == name and port.get("protocol", "TCP") == protocol
    ]
