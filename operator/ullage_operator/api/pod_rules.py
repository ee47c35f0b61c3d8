"""Checks services' pod templates against an allow-list of pod fields.

Fields that future Kubernetes versions add are rejected until they are listed here. Pods must comply
with the restricted profile of the Pod Security Standards and get no ServiceAccount token. Users may
set the fields that the profile does not restrict, for example images, nodes, Secrets and claims.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ullage_operator.api.errors import Problem

_POD_FIELDS = frozenset(
    {
        "affinity",
        "automountServiceAccountToken",
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "enableServiceLinks",
        "hostAliases",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostUsers",
        "hostname",
        "imagePullSecrets",
        "initContainers",
        "nodeName",
        "nodeSelector",
        "os",
        "overhead",
        "preemptionPolicy",
        "priority",
        "priorityClassName",
        "readinessGates",
        "resourceClaims",
        "resources",
        "restartPolicy",
        "runtimeClassName",
        "schedulerName",
        "schedulingGates",
        "securityContext",
        "serviceAccountName",
        "setHostnameAsFQDN",
        "shareProcessNamespace",
        "subdomain",
        "terminationGracePeriodSeconds",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    }
)
_CONTAINER_FIELDS = frozenset(
    {
        "args",
        "command",
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "lifecycle",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resizePolicy",
        "resources",
        "restartPolicy",
        "restartPolicyRules",
        "securityContext",
        "startupProbe",
        "stdin",
        "stdinOnce",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "tty",
        "volumeDevices",
        "volumeMounts",
        "workingDir",
    }
)
_PORT_FIELDS = frozenset({"containerPort", "name", "protocol"})
_VOLUME_KINDS = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_PROJECTED = frozenset({"clusterTrustBundle", "configMap", "downwardAPI", "secret"})
_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
"""Sysctls that Kubernetes calls safe, because they do not affect other pods on the node."""
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HOOKS = ("postStart", "preStop")
_LEAVE_OUT = "leave it out"
_USE_CLAIM = "mount a PersistentVolumeClaim instead"


def _is(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(each) and value == each for each in allowed)


def _is_user(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_default_profile(value: Any) -> bool:
    return bool(value == {"type": "RuntimeDefault"})


def _is_level(value: Any) -> bool:
    return isinstance(value, Mapping) and not value.keys() - {"level"}


def _drops_only(value: Any) -> bool:
    return isinstance(value, Mapping) and not value.keys() - {"drop"}


def _is_safe(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, Mapping) and each.get("name") in _SYSCTLS for each in value
    )


def _is_any(_: Any) -> bool:
    return True


_SAME_FOR_BOTH: Mapping[str, Callable[[Any], bool]] = {
    "appArmorProfile": _is_default_profile,
    "runAsGroup": _is_user,
    "runAsNonRoot": _is(True),
    "runAsUser": _is_user,
    "seLinuxOptions": _is_level,
    "seccompProfile": _is_default_profile,
}
_POD_SECURITY: Mapping[str, Callable[[Any], bool]] = {
    **_SAME_FOR_BOTH,
    "fsGroup": _is_any,
    "fsGroupChangePolicy": _is_any,
    "seLinuxChangePolicy": _is_any,
    "supplementalGroups": _is_any,
    "supplementalGroupsPolicy": _is_any,
    "sysctls": _is_safe,
}
"""Validators for the values in a pod's securityContext, by field."""
_CONTAINER_SECURITY: Mapping[str, Callable[[Any], bool]] = {
    **_SAME_FOR_BOTH,
    "allowPrivilegeEscalation": _is(False),
    "capabilities": _drops_only,
    "privileged": _is(False),
    "procMount": _is("Default"),
    "readOnlyRootFilesystem": _is_any,
}
"""Validators for the values in a container's securityContext, by field."""
_POD_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "hostIPC": _is(False),
    "hostNetwork": _is(False),
    "hostPID": _is(False),
    "restartPolicy": _is("Always"),
}
_LISTS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "",
    "volumeMounts": "mountPath",
    "envFrom": "",
    "topologySpreadConstraints": "",
    "imagePullSecrets": "name",
    "sources": "",
}
"""Lists of objects to check, each with the field whose value must be unique within the list."""


def template_problems(template: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Yield problems with the fields of a pod template that are not allowed or cannot be read.

    Args:
        path: the path of the template in the manifest.
    """
    metadata = template.get("metadata", {})
    yield from _annotations(metadata.get("annotations", {}), f"{path}.metadata.annotations")
    spec = template.get("spec", {})
    at = f"{path}.spec"
    for name, value in spec.items():
        where = f"{at}.{name}"
        if name not in _POD_FIELDS:
            yield Problem(where, f"is not allowed in the pods of a service; {_LEAVE_OUT}")
        elif name in _POD_VALUES and not _POD_VALUES[name](value):
            yield _too_much(where, value)

    yield from _security(spec, _POD_SECURITY, at)
    yield from _objects(spec, "topologySpreadConstraints", at)[1]
    yield from _objects(spec, "imagePullSecrets", at)[1]
    for kind in ("containers", "initContainers"):
        containers, problems = _objects(spec, kind, at)
        yield from problems
        for container in containers:
            yield from _container(container, f"{at}.{kind}[{container['name']}]")

    volumes, problems = _objects(spec, "volumes", at)
    yield from problems
    for volume in volumes:
        yield from _volume(volume, f"{at}.volumes[{volume['name']}]")


def _annotations(annotations: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, value in annotations.items():
        if name.startswith(_APPARMOR) and value != "runtime/default":
            yield _too_much(f"{path}[{name}]", value)


def _container(container: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name in container.keys() - _CONTAINER_FIELDS:
        where = f"{path}.{name}"
        yield Problem(where, f"is not allowed in the containers of a service; {_LEAVE_OUT}")
    yield from _security(container, _CONTAINER_SECURITY, path)
    for kind in ("env", "envFrom", "volumeMounts"):
        yield from _objects(container, kind, path)[1]

    ports, problems = _objects(container, "ports", path)
    yield from problems
    for index, port in enumerate(ports):
        for name in port.keys() - _PORT_FIELDS:
            if port[name]:
                yield _too_much(f"{path}.ports[{index}].{name}", port[name])

    hooks = container.get("lifecycle")
    of_hooks = hooks if isinstance(hooks, Mapping) else {}
    handlers = {name: container.get(name) for name in _PROBES}
    handlers |= {f"lifecycle.{name}": of_hooks.get(name) for name in _HOOKS}
    for name, handler in handlers.items():
        for kind in ("httpGet", "tcpSocket"):
            action = handler.get(kind) if isinstance(handler, Mapping) else None
            if isinstance(action, Mapping) and action.get("host"):
                yield _too_much(f"{path}.{name}.{kind}.host", action["host"])


def _volume(volume: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for kind in volume.keys() - _VOLUME_KINDS - {"name"}:
        remedy = _USE_CLAIM
        if kind == "hostPath":
            remedy += ", or set modelCache.hostPath or memory.tiers.file.hostPath"
        yield Problem(f"{path}.{kind}", f"is not allowed in the pods of a service; {remedy}")

    projected = volume.get("projected")
    sources, problems = _objects(projected or {}, "sources", f"{path}.projected")
    yield from problems
    for index, source in enumerate(sources):
        for kind in source.keys() - _PROJECTED:
            yield _too_much(f"{path}.projected.sources[{index}].{kind}", source[kind])


def _security(
    section: Mapping[str, Any], allowed: Mapping[str, Callable[[Any], bool]], path: str
) -> Iterator[Problem]:
    context = section.get("securityContext", {})
    path = f"{path}.securityContext"
    if not isinstance(context, Mapping):
        yield Problem(path, f"must be an object, not {context!r}")
        return
    for name, value in context.items():
        if name not in allowed or not allowed[name](value):
            yield _too_much(f"{path}.{name}", value)


def _objects(section: Any, name: str, path: str) -> tuple[list[Mapping[str, Any]], list[Problem]]:
    """Return a list's objects, or a problem if the list is malformed or has duplicate keys."""
    key = _LISTS[name]
    items = section.get(name, []) if isinstance(section, Mapping) else None
    if isinstance(items, list) and all(isinstance(item, Mapping) for item in items):
        keys = [item.get(key) for item in items] if key else []
        if _are_distinct(keys):
            return items, []
    form = f", each with a {key} of its own" if key else ""
    return [], [Problem(f"{path}.{name}", f"must be a list of objects{form}")]


def _are_distinct(keys: Sequence[Any]) -> bool:
    are_names = all(isinstance(key, str | int) and not isinstance(key, bool) for key in keys)
    return are_names and len(set(keys)) == len(keys)


def _too_much(path: str, value: Any) -> Problem:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}…"
    return Problem(path, f"{shown} is not allowed in the pods of a service; {_LEAVE_OUT}")
