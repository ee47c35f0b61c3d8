"""A service is stopped and started by one field, with the real operator."""

from ullage_kubeapi.trial import converged, until

POOLS = {"single": {"replicas": 2}, "large": {"gpus": 1, "autoscaling": {"maxReplicas": 3}}}


def sizes(world):
    names = ("s-single", "s-large")
    found = (world.get(f"{world.path('statefulsets')}/{name}") for name in names)
    return [each.get("spec", {}).get("replicas") for each in found]


def routers_are_told(world):
    config = world.get(f"{world.path('configmaps', '')}/s-router")
    return "stopped: true" in config.get("data", {}).get("rollout.yaml", "")


def test_a_service_stops_and_comes_back(world, operator):
    world.create(pools=POOLS)
    before = converged(world)
    until(lambda: sizes(world) == [2, 1], "its engines are asked for")

    assert world.patch(f"{world.services}/s", {"spec": {"stop": True}}).status_code == 200
    until(lambda: sizes(world) == [0, 0], "no engine is")
    until(lambda: routers_are_told(world), "routers are told")
    until(lambda: world.condition("Ready").get("reason") == "Stopped", "the status says it")
    assert before.keys() - world.owned().keys() <= {("poddisruptionbudgets", "s-single")}

    assert world.patch(f"{world.services}/s", {"spec": {"stop": False}}).status_code == 200
    until(lambda: sizes(world) == [2, 1], "its engines are back")
    until(lambda: not routers_are_told(world), "and routers serve")
