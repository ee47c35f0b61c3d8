"""Environment variables of engine containers.

Variables of the pod template take precedence over the operator's.
"""

import json
from collections.abc import Iterator
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.sections import USER, PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import S3Spec, Service
from ullage_operator.manifests.config_files import digest
from ullage_operator.manifests.engine_choice import may_be_vllm

Manifest = dict[str, Any]

ENGINE_ENV: tuple[Manifest, ...] = (
    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "HF_HOME", "value": f"{naming.CACHE_DIR}/huggingface"},
    # The default cache is in the home directory, which is read-only.
    {"name": "TRITON_CACHE_DIR", "value": f"{naming.CACHE_DIR}/triton"},
)
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""AWS SDK variables that together form one credential. Its Secret uses the same keys."""


def user_env(service: Service, pool: PoolSpec, settings: Settings) -> list[Manifest]:
    """Return the USER variable if the pods' UID may have no account in the image.

    torch and Triton use the user name in paths. The result is empty if the UID has an account or if
    the pod template already sets USER.
    """
    is_known = service.spec.security_context.run_as_user == USER or not settings.on_kubernetes
    if is_known or "USER" in given_env(pool):
        return []
    return [{"name": "USER", "value": "ullage"}]


def given_env(pool: PoolSpec) -> set[str]:
    """Return the names of the engine environment variables that a pod template already sets."""
    return {variable["name"] for variable in given_variables(pool)}


def given_variables(pool: PoolSpec) -> list[Manifest]:
    containers = pool.pod_template.get("spec", {}).get("containers", ())
    return [
        variable
        for container in containers
        if container["name"] == naming.ENGINE
        for variable in container.get("env", ())
    ]


def group_env(pool: PoolSpec) -> list[Manifest]:
    """Return the environment variables that only the pods of a multi-pod engine need."""
    if pool.nodes == 1:
        return []
    revision = f"metadata.annotations['{naming.GROUP_REVISION}']"
    return [
        # vLLM announces this address to the other nodes.
        {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "ULLAGE_GROUP_REVISION", "valueFrom": {"fieldRef": {"fieldPath": revision}}},
    ]


def s3_env(service: Service, pool: PoolSpec) -> list[Manifest]:
    """Return the environment variables of the AWS SDKs that engines use to read buckets.

    Variables of the pod template take precedence. If the pod template sets any credential variable
    (`AWS_KEYS`), the operator sets none of them, so that keys of two credentials are never mixed.
    """
    spec = service.spec
    if spec.s3 is None and not spec.model.source.startswith("s3://"):
        return []
    s3 = spec.s3 or S3Spec()

    given = given_env(pool)
    has_keys = not given.isdisjoint(AWS_KEYS)
    values = {
        "ULLAGE_S3_CACHE": f"{naming.CACHE_DIR}/s3",
        "AWS_ENDPOINT_URL_S3": s3.endpoint,
        "AWS_REGION": s3.region,
        "AWS_NO_SIGN_REQUEST": "true" if s3.anonymous and not has_keys else None,
    }
    env: list[Manifest] = [
        {"name": name, "value": value} for name, value in values.items() if value
    ]
    if s3.secret_name and not has_keys:
        env += _keys_of(s3.secret_name)
    return [variable for variable in env if variable["name"] not in given]


def s3_store(service: Service, pool: PoolSpec) -> str:
    """Return a digest of the endpoint or region of the model's bucket.

    Together with the `s3://` source, it identifies a model in a shared cache. The digest is empty
    for AWS without a region and for models that are not in a bucket. It is a hash instead of plain
    text, because the endpoint may come from a Secret.
    """
    if not service.spec.model.source.startswith("s3://"):
        return ""
    env = {each["name"]: each for each in (*s3_env(service, pool), *given_variables(pool))}
    # Engines use the first of these variables that is not empty.
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        variable = env.get(name, {})
        address = variable.get("value") or json.dumps(variable.get("valueFrom"), sort_keys=True)
        if address != "null":
            return digest(address.rstrip("/"))
    return ""


def _keys_of(secret: str) -> Iterator[Manifest]:
    for key in AWS_KEYS:
        # Only temporary credentials have a session token.
        optional = {"optional": True} if key == "AWS_SESSION_TOKEN" else {}
        reference = {"secretKeyRef": {"name": secret, "key": key, **optional}}
        yield {"name": key, "valueFrom": reference}


def vllm_env(service: Service, pool: PoolSpec, settings: Settings) -> list[Manifest]:
    """Return the environment variables for vLLM, which a pod template may override.

    The result is empty for `ullage up`, where vLLM uses the user's own caches.
    """
    if not settings.on_kubernetes or not may_be_vllm(service.spec):
        return []
    env = {
        # The image's home is read-only, and libraries below vLLM compile kernels into it.
        "HOME": f"{naming.CACHE_DIR}/home",
        # A restarted worker reuses the compiled graphs.
        "VLLM_CACHE_ROOT": f"{naming.CACHE_DIR}/vllm",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # A model from another source must not wait for the hub, unless adapters may come from the hub.
    if not pool.memory.max_loras and not service.spec.model.source.startswith("hf://"):
        env["HF_HUB_OFFLINE"] = "1"

    given = given_env(pool)
    return [{"name": name, "value": value} for name, value in env.items() if name not in given]
