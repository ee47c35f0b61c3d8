"""A model in an image, which the node mounts as a volume of the engine's pod.

ULLAGE_E2E_MODEL names such an image that nodes have or may pull, as in a source: oci://IMAGE#FILE.
"""

import os
from collections.abc import Callable

import pytest
from ullage_cluster.client import Client
from ullage_cluster.service import Service

SOURCE = os.environ.get("ULLAGE_E2E_MODEL", "")

pytestmark = pytest.mark.skipif(
    not SOURCE, reason="no image with a model: ULLAGE_E2E_MODEL is not set"
)


def test_a_model_of_an_image_is_mounted_and_served(
    make_service: Callable[..., Service], client: Client
) -> None:
    model = {"source": SOURCE, "name": "from-an-image", "maxModelLen": 512}
    service = make_service("image", model=model, replicas=1)
    service.settle()

    [engine] = service.pods()
    assert any("image" in volume for volume in engine["spec"]["volumes"]), engine["spec"]["volumes"]
    [answer] = client.ask(service, ["Name a colour."], max_tokens=8)
    assert answer.is_whole, answer
