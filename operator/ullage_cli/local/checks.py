"""Refuses services that need a cluster or another environment than this machine."""

from collections.abc import Mapping
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.spec import Service, image_of


def check_service(service: Service, has_vllm: bool) -> None:
    """Raise LocalFailure for a spec that this machine cannot serve.

    Args:
        has_vllm: whether engines here can be vLLM.
    """
    check_started(service)
    check_vllm(service, has_vllm)
    check_model_image(service)
    check_cascade(service)
    check_nodes(service)
    check_pod_templates(service)


def check_started(service: Service) -> None:
    if service.spec.stop:
        raise LocalFailure("spec.stop: the service is stopped; set it to false to serve it")


def check_vllm(service: Service, has_vllm: bool) -> None:
    """Refuse features of vLLM where this environment does not have it."""
    if has_vllm:
        return
    remedy = "install ullage[vllm] into it (make install-vllm makes one that has it)"
    if service.spec.engine == "vllm":
        raise LocalFailure(
            f"spec.engine: VLLM needs vLLM, which this environment has not; {remedy}, or set "
            "engine to Auto"
        )
    if service.spec.serves_adapters:
        raise LocalFailure(
            "spec.adapters: the native engine serves no adapters, and this environment has no "
            f"vLLM; {remedy}, or leave adapters out"
        )


def check_model_image(service: Service) -> None:
    """Refuse models in images, which only the nodes of a cluster pull and mount."""
    source = service.spec.model.source
    if image_of(source):
        raise LocalFailure(
            f"spec.model.source {source}: ullage up mounts no images; unpack it, such as with "
            "skopeo and umoci, and name its folder, file:///path"
        )


def check_nodes(service: Service) -> None:
    """One machine is one node."""
    for name, pool in service.spec.pools.items():
        if pool.nodes > 1:
            raise LocalFailure(
                f"spec.pools.{name}.nodes: ullage up runs on this machine alone; set nodes to 1, "
                "with as many gpus as it has"
            )


def check_cascade(service: Service) -> None:
    """Services by their names are found by the cluster's name server, which is not here."""
    cascade = service.spec.cascade
    names = [step.service for step in cascade.steps if step.service] if cascade else []
    if names:
        raise LocalFailure(
            f"spec.cascade.steps: {names[0]} is found by that name in a cluster only; serve it "
            "with ullage up as well and write address: 127.0.0.1:PORT with its gRPC port"
        )


def check_pod_templates(service: Service) -> None:
    """What only a cluster can give; a process of this machine sees its files and environment."""
    spec = service.spec
    check_pod_template("spec.router", naming.ROUTER, spec.router.pod_template)
    for name, pool in spec.pools.items():
        check_pod_template(f"spec.pools.{name}", naming.ENGINE, pool.pod_template)


def check_pod_template(section: str, own: str, template: Mapping[str, Any]) -> None:
    pod = template.get("spec", {})
    path = f"{section}.podTemplate.spec"
    for name in ("initContainers", "volumes"):
        if pod.get(name):
            raise LocalFailure(
                f"{path}.{name}: ullage up runs the {own} alone and mounts nothing; leave them "
                "out here, its processes see the files of this machine"
            )
    for container in pod.get("containers", ()):
        if container["name"] != own:
            raise LocalFailure(
                f"{path}.containers[{container['name']}]: ullage up runs the {own} alone; leave "
                "others out here"
            )
        if container.get("volumeMounts"):
            raise LocalFailure(
                f"{path}.containers[{own}].volumeMounts: ullage up mounts nothing; leave them out "
                "here, its processes see the files of this machine"
            )
        looked_up = any("valueFrom" in variable for variable in container.get("env", ()))
        if looked_up or container.get("envFrom"):
            raise LocalFailure(
                f"{path}.containers[{own}].env: only a cluster can look values up; set them in the "
                "environment of ullage up, which processes inherit, and leave valueFrom and "
                "envFrom out"
            )
