"""Watches: order, bookmarks, selections, time limits, 410."""

import json

CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
MERGE = {"Content-Type": "application/merge-patch+json"}


def make(client, name, **labels):
    body = {"metadata": {"name": name, "labels": labels}}
    return client.post(CONFIGMAPS, json=body).json()["metadata"]["resourceVersion"]


def watch(client, count, **params):
    """The first `count` events, or all until the stream ends."""
    events = []
    query = {"watch": "true", "timeoutSeconds": 5, **params}
    with client.stream("GET", CONFIGMAPS, params=query) as response:
        for line in response.iter_lines():
            events.append(json.loads(line))
            if len(events) == count:
                break
    return events


def seen(events):
    return [(event["type"], event["object"]["metadata"]["name"]) for event in events]


def test_a_watch_replays_what_came_after_its_version(client):
    first = make(client, "a")
    make(client, "b")
    client.patch(f"{CONFIGMAPS}/a", json={"data": {"x": "y"}}, headers=MERGE)
    client.delete(f"{CONFIGMAPS}/b")
    events = watch(client, 3, resourceVersion=first)
    assert seen(events) == [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)


def test_a_watch_without_version_begins_with_the_present(client):
    make(client, "a")
    assert seen(watch(client, 1)) == [("ADDED", "a")]


def test_streaming_lists_end_with_a_marked_bookmark(client):
    make(client, "a")
    events = watch(client, 2, sendInitialEvents="true", allowWatchBookmarks="true")
    assert [event["type"] for event in events] == ["ADDED", "BOOKMARK"]
    marks = events[1]["object"]["metadata"]["annotations"]
    assert marks == {"k8s.io/initial-events-end": "true"}


def test_bookmarks_come_when_asked_for(client):
    first = make(client, "a")
    (event,) = watch(client, 1, resourceVersion=first, allowWatchBookmarks="true")
    assert event["type"] == "BOOKMARK"
    assert int(event["object"]["metadata"]["resourceVersion"]) >= int(first)


def test_a_watch_ends_at_its_time_limit(client):
    first = make(client, "a")
    assert watch(client, 99, resourceVersion=first, timeoutSeconds=1) == []


def test_leaving_the_selection_is_a_deletion(client):
    first = make(client, "a", tier="x")
    client.patch(f"{CONFIGMAPS}/a", json={"metadata": {"labels": {"tier": "y"}}}, headers=MERGE)
    client.patch(f"{CONFIGMAPS}/a", json={"metadata": {"labels": {"tier": "x"}}}, headers=MERGE)
    events = watch(client, 2, resourceVersion=first, labelSelector="tier=x")
    assert seen(events) == [("DELETED", "a"), ("ADDED", "a")]


def test_a_version_that_is_forgotten_is_gone(api, client):
    first = make(client, "a")
    make(client, "b")
    api.compact()
    (event,) = watch(client, 1, resourceVersion=first)
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
