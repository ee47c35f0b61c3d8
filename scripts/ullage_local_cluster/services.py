"""Makes the iptables rules that send a Service's packets to pods, and the Services' DNS names."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Object = Mapping[str, Any]
"""A Kubernetes object, as parsed from the API server's JSON."""
Backend = tuple[str, int]
"""Address and port of a pod."""
DOMAIN = "svc.cluster.local"
SERVICE_LABEL = "kubernetes.io/service-name"


def services_with_slices(
    services: Iterable[Object], slices: Iterable[Object]
) -> Iterator[tuple[Object, list[Object]]]:
    """Yield each Service with its EndpointSlices for IPv4."""
    by_service: dict[tuple[str, str], list[Object]] = {}
    for each in slices:
        if each["addressType"] == "IPv4":
            metadata = each["metadata"]
            key = (metadata["namespace"], metadata.get("labels", {}).get(SERVICE_LABEL, ""))
            by_service.setdefault(key, []).append(each)

    for service in services:
        metadata = service["metadata"]
        yield service, by_service.get((metadata["namespace"], metadata["name"]), [])


def has_cluster_ip(service: Object) -> bool:
    return str(service["spec"].get("clusterIP", "None")) != "None"


def backends(slices: Iterable[Object], port_name: str) -> list[Backend]:
    """Return the pods to which a Service port's packets are sent.

    Without a ready pod, these are the terminating pods that still serve, as in kube-proxy.
    """
    ready: set[Backend] = set()
    terminating: set[Backend] = set()
    for each in slices:
        ports = [port["port"] for port in each["ports"] or () if port.get("name", "") == port_name]
        for endpoint in each["endpoints"] or ():
            pairs = {(address, port) for address in endpoint["addresses"] for port in ports}
            conditions = endpoint.get("conditions", {})
            if is_ready(endpoint):
                ready |= pairs
            elif conditions.get("serving") and conditions.get("terminating"):
                terminating |= pairs
    return sorted(ready or terminating)


def is_ready(endpoint: Object) -> bool:
    """Return an endpoint's readiness. An unknown condition counts as ready."""
    return endpoint.get("conditions", {}).get("ready") is not False


def service_rules(
    services: Iterable[Object], slices: Iterable[Object]
) -> tuple[list[str], list[str], list[str]]:
    """Return the iptables rules for all Services, without their chains.

    Returns:
        Rules that replace a Service's address with a pod's, rules that reject packets to Services
        without pods, and rules that masquerade packets from a pod to itself.
    """
    translating: list[str] = []
    rejecting: list[str] = []
    addresses: set[str] = set()
    for service, own_slices in services_with_slices(services, slices):
        if not has_cluster_ip(service):
            continue
        for port in service["spec"].get("ports", ()):
            protocol = port["protocol"].lower()
            to_port = f"-d {service['spec']['clusterIP']}/32 -p {protocol} --dport {port['port']}"
            pods = backends(own_slices, port.get("name", ""))
            if not pods:
                # The kernel limits ICMP's rate by client, and would leave some clients waiting.
                reset = " --reject-with tcp-reset" if protocol == "tcp" else ""
                rejecting.append(f"{to_port} -j REJECT{reset}")
            translating += translations(to_port, pods)
            addresses |= {address for address, _ in pods}

    loops = [f"-s {address}/32 -d {address}/32 -j MASQUERADE" for address in sorted(addresses)]
    return translating, rejecting, loops


def translations(to_port: str, pods: list[Backend]) -> Iterator[str]:
    """Yield a rule per pod, all with equal probability: 1/n, then 1/(n-1) of the rest, ..."""
    for index, (address, port) in enumerate(pods):
        rest = len(pods) - index
        chance = f" -m statistic --mode random --probability {1 / rest:.6f}" if rest > 1 else ""
        yield f"{to_port}{chance} -j DNAT --to-destination {address}:{port}"


def dns_records(services: Iterable[Object], slices: Iterable[Object]) -> dict[str, list[str]]:
    """Return the addresses of each DNS name in the cluster.

    A headless Service has the addresses of its ready pods, and a name for each pod's hostname.
    """
    records: dict[str, list[str]] = {}
    for service, own_slices in services_with_slices(services, slices):
        metadata = service["metadata"]
        name = f"{metadata['name']}.{metadata['namespace']}.{DOMAIN}"
        if has_cluster_ip(service):
            records[name] = [service["spec"]["clusterIP"]]
            continue

        endpoints = [endpoint for each in own_slices for endpoint in each["endpoints"] or ()]
        ready = [endpoint for endpoint in endpoints if is_ready(endpoint)]
        records[name] = sorted({address for each in ready for address in each["addresses"]})
        for endpoint in ready:
            if hostname := endpoint.get("hostname"):
                records[f"{hostname}.{name}"] = list(endpoint["addresses"])
    return records
