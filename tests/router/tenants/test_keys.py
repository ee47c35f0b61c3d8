"""Keys' files: what is read, what is kept when they break, and who a key belongs to."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.process.api_keys import digest, entry, new_key, read_entry
from ullage_common.process.file_watch import fingerprint
from ullage_router.tenants.keys import KeyRing, TenantKeys, load_keys


def test_a_new_key_is_long_and_new() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sk-ullage-") and len(key) >= 50 for key in keys)
    for key in keys:
        assert read_entry(entry(key)) == read_entry(key) == digest(key)
        assert key not in entry(key)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("sha256:1234", "64 lower-case"),
        ("sha256:" + "G" * 64, "64 lower-case"),
        ("short", "5 characters"),
        ("a key with spaces in it", "spaces"),
        ("k" * 600, "600 characters"),
    ],
)
def test_a_broken_line_is_named_and_not_shown(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "alice").write_text(f"# of June\n\n{line}\n")
    [told] = load_keys(tmp_path, {}).problems
    assert problem in told
    assert "alice: line 3" in told
    assert line not in told


def test_files_are_tenants(tmp_path: Path) -> None:
    first = new_key()
    second = new_key()
    third = new_key()
    (tmp_path / "alice").write_text(f"{entry(first)}\n  {second}  \n")
    (tmp_path / "bob.test").write_text(f"# {third}\n{third}")
    (tmp_path / "empty").write_text("")
    (tmp_path / ".hidden").write_text("no key")
    loaded = load_keys(tmp_path, {})
    assert not loaded.problems
    assert {name: len(keys) for name, keys in loaded.digests.items()} == {
        "alice": 2,
        "bob.test": 1,
        "empty": 0,
    }
    ring = KeyRing(loaded.digests)
    owners = [ring.owner(key) for key in (first, second, third, new_key(), "", entry(first))]
    assert owners == ["alice", "alice", "bob.test", None, None, None]


def test_a_broken_file_keeps_its_tenants_keys_and_no_others(tmp_path: Path) -> None:
    alice = new_key()
    bob = new_key()
    carol = new_key()
    for name, key in (("alice", alice), ("bob", bob), ("carol", carol)):
        (tmp_path / name).write_text(key)
    before = load_keys(tmp_path, {})
    newer = new_key()
    (tmp_path / "alice").write_bytes(b"\xff\xfe")
    (tmp_path / "bob").write_text(newer)
    (tmp_path / "carol").unlink()
    after = load_keys(tmp_path, before.digests)
    assert len(after.problems) == 1
    assert "alice" in after.problems[0]
    ring = KeyRing(after.digests)
    owners = [ring.owner(key) for key in (alice, bob, newer, carol)]
    assert owners == ["alice", None, "bob", None]


def test_a_folder_that_is_gone_keeps_everything(tmp_path: Path) -> None:
    key = new_key()
    (tmp_path / "alice").write_text(key)
    before = load_keys(tmp_path, {})
    after = load_keys(tmp_path / "gone", before.digests)
    assert after.digests == before.digests
    assert "No such file" in after.problems[0]


@pytest.mark.parametrize("name", ["Alice", "a b", "-x", "x" * 64])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(new_key())
    loaded = load_keys(tmp_path, {})
    assert not loaded.digests
    assert "not a tenant's name" in loaded.problems[0]


def test_a_key_belongs_to_one_tenant(tmp_path: Path) -> None:
    key = new_key()
    (tmp_path / "alice").write_text(key)
    (tmp_path / "bob").write_text(entry(key))
    loaded = load_keys(tmp_path, {})
    assert loaded.problems == ("bob has a key that alice has; it counts as alice's",)
    assert KeyRing(loaded.digests).owner(key) == "alice"


def test_keys_are_not_kept(tmp_path: Path) -> None:
    key = new_key()
    (tmp_path / "alice").write_text(key)
    loaded: TenantKeys = load_keys(tmp_path, {})
    ring = KeyRing(loaded.digests)
    assert key not in repr(loaded) + repr(vars(ring))


@given(st.sets(st.text("abcdef-_0123", min_size=16, max_size=40), max_size=20), st.text())
def test_only_keys_that_are_known(known: set[str], other: str) -> None:
    ring = KeyRing({f"t{i}": (digest(key),) for i, key in enumerate(sorted(known))})
    for i, key in enumerate(sorted(known)):
        assert ring.owner(key) == f"t{i}"
    assert other in known or ring.owner(other) is None


def test_a_swapped_secret_changes_the_fingerprint(tmp_path: Path) -> None:
    """As the kubelet does it: links to `..data`, which is itself a link that is replaced."""
    for version in ("..1", "..2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "alice").write_text(new_key())
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "alice").symlink_to("..data/alice")
    before = fingerprint((tmp_path,))
    assert fingerprint((tmp_path,)) == before
    assert len(before) == 1
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    assert fingerprint((tmp_path,)) != before
