"""Ids of tenants, their key, and valid names in requests."""

import os
import stat
import threading

import pytest

from vllm_tide.capture.policy import CapturePolicy
from vllm_tide.transport import TransportError
from vllm_tide.transport.tenant import (
    KEY_BYTES,
    NO_TENANT,
    key_id,
    tenant_id,
    tenant_key,
)

KEY = bytes(range(KEY_BYTES))


def test_an_id_depends_on_the_name_and_the_key_alone():
    names = [f"tenant {i}" for i in range(2000)] + ["", "é", "\ud800", "x" * 10**5]
    ids = {tenant_id(name, KEY) for name in names}
    assert len(ids) == len(names)
    assert all(NO_TENANT < i < 2**64 for i in ids)
    assert ids == {tenant_id(name, KEY) for name in names}
    assert not ids & {tenant_id(name, KEY[::-1]) for name in names}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Return the path of the key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "vllm_tide"


def test_the_key_is_made_once_and_is_private(tmp_path, state):
    run_dir = tmp_path / "run"
    with pytest.raises(TransportError, match="no tenant key.*--run-dir"):
        tenant_key(run_dir, create=False)
    assert not run_dir.exists() and not state.exists()
    key = tenant_key(run_dir)
    assert len(key) == KEY_BYTES
    assert tenant_key(run_dir) == tenant_key(run_dir, create=False) == key
    assert not run_dir.exists()  # which a reboot would empty
    (file,) = state.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert tenant_key(tmp_path / "other") == key
    assert key_id(key) == key_id(key) != key_id(key[::-1])
    own = tenant_key(run_dir, str(tmp_path / "own"))
    assert own != key and (tmp_path / "own" / "tenants.key").exists()


def test_a_key_of_earlier_versions_is_moved(tmp_path, state):
    old = tmp_path / "tenants.key"
    old.write_text("07" * KEY_BYTES)
    assert tenant_key(tmp_path, create=False) == b"\x07" * KEY_BYTES
    assert not old.exists()
    old.write_text("08" * KEY_BYTES)  # another: the one in use stays
    assert tenant_key(tmp_path) == b"\x07" * KEY_BYTES
    assert old.exists()


def test_without_a_home_the_key_is_in_the_run_directory(tmp_path, state, caplog):
    state.parent.write_text("no directory")
    key = tenant_key(tmp_path / "run")
    assert tenant_key(tmp_path / "run", create=False) == key
    assert (tmp_path / "run" / "tenants.key").exists()
    assert "may not survive a reboot: set tide.train.state_dir" in caplog.text
    assert tenant_key(tmp_path / "run", str(state)) == key


@pytest.mark.skipif(os.geteuid() != 0, reason="root may become another user")
def test_an_unsearchable_home_counts_as_none(tmp_path, state):
    """A container with another user's HOME (/root)."""
    tmp_path.chmod(0o711)
    state.parent.mkdir(mode=0o700)
    (run_dir := tmp_path / "run").mkdir(mode=0o700)
    os.chown(run_dir, 65534, 65534)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and folder.is_relative_to("/tmp/"):  # noqa: S108
            folder.chmod(folder.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        key = tenant_key(run_dir)
        assert tenant_key(run_dir, create=False) == key
    finally:
        os.seteuid(0)
    assert (run_dir / "tenants.key").exists()


def test_engines_that_start_at_once_get_one_key(tmp_path):
    keys = []
    threads = [
        threading.Thread(target=lambda: keys.append(tenant_key(tmp_path)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


@pytest.mark.parametrize("content", ["", "zz", "00ff", "ü"])
def test_a_damaged_key_is_refused(tmp_path, content):
    tenant_key(tmp_path)
    (tmp_path / "home/vllm_tide/tenants.key").write_text(content, encoding="utf-8")
    with pytest.raises(TransportError, match="damaged: remove it"):
        tenant_key(tmp_path)


def admit(name):
    extra = {} if name is None else {"tide_tenant": name}
    return CapturePolicy(1.0, tenant_key=KEY).admit(extra, supported=True)


def test_a_named_tenant_is_recorded_and_an_invalid_name_is_not_captured():
    for name in ("acme", "0", 7, -1, "\ud800", "x" * 256):
        ticket = admit(name)
        assert (ticket.refusal, ticket.tenant) == (None, tenant_id(str(name), KEY))
    assert (admit(None).refusal, admit(None).tenant) == (None, NO_TENANT)
    odd = ("", True, False, 1.5, [], ["acme"], {}, 2**64, 10**5000, "x" * 257)
    for name in odd:
        ticket = admit(name)
        assert (ticket.refusal, ticket.tenant) == ("malformed_tenant", NO_TENANT)
    # A name cannot be looked up without a shared key.
    first, second = (CapturePolicy(1.0).admit({"tide_tenant": "a"}, True) for _ in "12")
    assert first.tenant != second.tenant


@pytest.mark.parametrize(
    "key", ["tide_captur", "tide_", "Tide_Capture", "tide-capture"]
)
@pytest.mark.parametrize("consent", ["opt_out", "opt_in"])
def test_a_misspelt_argument_disables_capture(key, consent):
    policy = CapturePolicy(1.0, consent=consent, tenant_key=KEY)
    extra = {"tide_capture": True, key: False}
    assert policy.admit(extra, supported=True).refusal == "unknown_key"
    known = dict.fromkeys(("tide_k_max", "tide_slo_tpot_ms"), 1) | {"other": 1}
    assert policy.admit(known | {"tide_capture": True}, True).refusal is None
