"""Rejects services that need a cluster, or software that this environment lacks."""

from collections.abc import Mapping
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.spec import Service, image_of


def check_service(service: Service, has_vllm: bool) -> None:
    """Check that this machine can run a service.

    Args:
        service: the service to run.
        has_vllm: whether vLLM is installed on this machine.

    Raises:
        LocalFailure: a field requests something that this machine cannot provide. The message names
            the first such field.
    """
    _check_not_stopped(service)
    _check_vllm(service, has_vllm)
    _check_model_image(service)
    _check_cascade(service)
    _check_nodes(service)
    _check_pod_templates(service)


def _check_not_stopped(service: Service) -> None:
    if service.spec.stop:
        raise LocalFailure("spec.stop: the service is stopped; set it to false to serve it")


def _check_vllm(service: Service, has_vllm: bool) -> None:
    """Reject a service that needs vLLM if vLLM is not installed."""
    if has_vllm:
        return

    remedy = "install ullage[vllm] in it (make install-vllm makes an environment with vLLM)"
    if service.spec.engine == "vllm":
        raise LocalFailure(
            f"spec.engine: VLLM needs vLLM, which this environment lacks; {remedy}, or set "
            "engine to Auto"
        )
    if service.spec.serves_adapters:
        raise LocalFailure(
            "spec.adapters: the native engine serves no adapters, and this environment has no "
            f"vLLM; {remedy}, or leave adapters out"
        )


def _check_model_image(service: Service) -> None:
    """Reject a model in a container image, because only a cluster's nodes can mount images."""
    source = service.spec.model.source
    if image_of(source):
        raise LocalFailure(
            f"spec.model.source {source}: ullage up mounts no images; unpack it, for example with "
            "skopeo and umoci, and name its folder, file:///path"
        )


def _check_cascade(service: Service) -> None:
    """Reject cascade steps that target a Service, because its name resolves only in cluster DNS."""
    cascade = service.spec.cascade
    names = [step.service for step in cascade.steps if step.service] if cascade else []
    if names:
        raise LocalFailure(
            f"spec.cascade.steps: {names[0]} is found by that name in a cluster only; serve it "
            "with ullage up as well and write address: 127.0.0.1:PORT with its gRPC port"
        )


def _check_nodes(service: Service) -> None:
    """Reject engines that span several nodes, because this machine is a single node."""
    for name, pool in service.spec.pools.items():
        if pool.nodes > 1:
            raise LocalFailure(
                f"spec.pools.{name}.nodes: ullage up runs on this machine alone; set nodes to 1, "
                "with as many gpus as it has"
            )


def _check_pod_templates(service: Service) -> None:
    """Reject pod template fields that need a cluster."""
    spec = service.spec
    _check_pod_template("spec.router", naming.ROUTER, spec.router.pod_template)
    for name, pool in spec.pools.items():
        _check_pod_template(f"spec.pools.{name}", naming.ENGINE, pool.pod_template)


def _check_pod_template(section: str, own: str, template: Mapping[str, Any]) -> None:
    """Reject extra containers, volumes, and environment variables that reference other objects.

    Args:
        section: path of the section that contains the template, for example spec.router.
        own: name of the container that Ullage itself defines.
        template: the section's `podTemplate`.
    """
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

        looks_up = any("valueFrom" in variable for variable in container.get("env", ()))
        if looks_up or container.get("envFrom"):
            raise LocalFailure(
                f"{path}.containers[{own}].env: only a cluster can look values up; set them in the "
                "environment of ullage up, which processes inherit, and leave valueFrom and "
                "envFrom out"
            )
