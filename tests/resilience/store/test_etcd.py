"""The store in etcd, against real servers: what is written first stays, whichever server is lost."""

import gc
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import certifi
import pytest
from etcd_servers import EtcdServers, etcd_servers
from interrupted_training import at, before_each_step, config_of, die, failures, kill_node, undisturbed
from ports import port_of_its_own
from sampling import in_campaigns
from training import plan_of, run_config
from waiting import wait_until

from motet.errors import UserError
from motet.resilience.launch_nodes import join_training, train_on_nodes
from motet.resilience.membership import RUN, Membership, RunRecord, as_json, check_record, key
from motet.resilience.store.etcd import EtcdAddress, EtcdStore
from motet.resilience.store.store import SECRET_VARIABLE, StoreAwayError, StoreLostError
from motet.runtime.checkpoint.folder import find_checkpoints

SECRET = b"a secret of this run"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with etcd_servers(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def has(store: EtcdStore, key: str, value: str | None) -> bool:
    try:
        store.sync()
    except StoreAwayError:  # A loaded machine may be silent for longer than a lease.
        return False
    return store.values.get(key) == value


def test_addresses() -> None:
    assert EtcdAddress.parse("etcd://a:1,b:2/run-1") == EtcdAddress((("a", 1), ("b", 2)), "run-1")
    for text in ("etcd://a:1", "etcd://a/run", "a:1", "etcd://a:1,/run", "etcd://a:1/x/y", "etcd:///run"):
        assert EtcdAddress.parse(text) is None, text


def test_what_was_written_first_stays_and_all_see_it(servers: EtcdServers) -> None:
    address = servers.address("first")
    with EtcdStore(address, SECRET, 1.0, is_new=True) as one, EtcdStore(address, SECRET, 1.0) as two:
        assert one.create("membership/2", "of one") == "of one"
        assert two.create("membership/2", "of two") == "of one"
        wait_until(lambda: has(two, "membership/2", "of one"))
        assert [one.register(), two.register(), one.register(7), two.register()] == [0, 1, 7, 2]
        wait_until(lambda: has(one, "alive/2", ""))


def test_a_silent_node_is_taken_out(servers: EtcdServers) -> None:
    address = servers.address("silent")
    with EtcdStore(address, SECRET, 1.0, is_new=True) as watching:
        with EtcdStore(address, SECRET, 1.0) as node:
            node.keep_alive(node.register())
            node.sync()
            wait_until(lambda: has(watching, "alive/0", ""))
        wait_until(lambda: has(watching, "alive/0", None))


def test_who_does_not_know_the_secret_changes_nothing(servers: EtcdServers, capfd: pytest.CaptureFixture[str]) -> None:
    address = servers.address("stranger")
    with EtcdStore(address, SECRET, 1.0, is_new=True) as store:
        store.create("run", "its run file")
        with pytest.raises(StoreLostError, match="no run of this name has begun"):
            EtcdStore(address, b"another secret", 1.0)
        rogue = EtcdStore.__new__(EtcdStore)
        rogue.__dict__ |= store.__dict__ | {"_secret": b"another secret"}
        rogue.create("membership/1", "its own")
        rogue._put_alive(5, rogue._grant())
        store.create("node/0", "")
        wait_until(lambda: has(store, "node/0", ""))
        assert store.values == {"run": "its run file", "node/0": ""}
        with pytest.raises(StoreLostError, match="does not know the secret"):
            store.create("membership/1", "ours")
    assert "membership/1 is not read, as its HMAC is wrong" in capfd.readouterr().err


def test_who_knows_the_secret_writes_nothing_that_agents_cannot_read(
    servers: EtcdServers, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a rogue has written past this client is not read, and what an agent writes takes its place."""
    address, first = servers.address("rogue"), key("membership", 1)
    with EtcdStore(address, SECRET, 1.0, is_new=True, check=check_record) as store:
        with EtcdStore(address, SECRET, 1.0) as rogue:
            rogue.create(first, "its own")
            rogue.create("node/x", "")
            rogue.create("meeting/1", "nowhere")
            rogue.create("node/0", "")
        wait_until(lambda: has(store, "node/0", ""))
        assert store.values == {"node/0": ""}
        membership = Membership(generation=1, nodes=(0,), num_admitted=1, plan=plan_of(run_config(Path())).to_json())
        assert store.create(first, membership.to_json()) == membership.to_json()
        wait_until(lambda: has(store, first, membership.to_json()))
    assert "etcd: membership/1 is not read: membership/1: is not JSON" in capfd.readouterr().err


def test_one_run_of_a_name_at_a_time(servers: EtcdServers) -> None:
    address = servers.address("twice")
    with EtcdStore(address, SECRET, 1.0, is_new=True) as first:
        first.register()
        with pytest.raises(UserError, match="a run of this name is being trained"):
            EtcdStore(address, SECRET, 1.0, is_new=True)
        with EtcdStore(address, SECRET, 1.0, is_new=True, replaces=True) as second:
            assert second._attempt == first._attempt + 1


def test_nodes_of_an_earlier_attempt_end(servers: EtcdServers) -> None:
    address = servers.address("again")
    with EtcdStore(address, SECRET, 1.0, is_new=True) as first, EtcdStore(address, SECRET, 1.0, is_new=True) as second:

        def has_ended() -> bool:
            with suppress(StoreLostError):
                first.sync()
                return False
            return True

        second.create("run", "another attempt")
        wait_until(has_ended)


def test_no_server_is_told() -> None:
    with pytest.raises(UserError, match=r"no etcd server answers \(.*refused"):
        EtcdStore(EtcdAddress((("127.0.0.1", 1),), "run"), SECRET, 1.0, is_new=True)


def test_a_node_joins_while_the_first_server_is_away(
    servers: EtcdServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as far as the comparison of run files."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    config, other = config_of(tmp_path), config_of(tmp_path, train__seed=7)
    with EtcdStore(servers.address("join"), SECRET, 1.0, is_new=True) as store:
        store.create(RUN, RunRecord(config=as_json(config)).to_json())
        address = EtcdAddress((("127.0.0.1", port_of_its_own()), *servers.addresses), "join")
        with pytest.raises(UserError, match=r"train\.seed: is 7 here"):
            join_training(other, lambda: None, address, 1)


def refusal(address: EtcdAddress) -> str:
    with pytest.raises(UserError) as refused:
        EtcdStore(address, SECRET, 1.0, is_new=True)
    return str(refused.value)


def test_certificates_are_those_of_etcdctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other authorities the machine trusts."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())
    with etcd_servers(tmp_path, number=1, tls=True) as servers:
        address = servers.address("run")
        assert "Connection aborted" in refusal(address), "it speaks no TLS"
        monkeypatch.setenv("ETCDCTL_CACERT", str(servers.certificate))
        assert "no etcd server answers" in refusal(address), "it shows no certificate"
        monkeypatch.setenv("ETCDCTL_CERT", str(servers.certificate))
        monkeypatch.setenv("ETCDCTL_KEY", str(servers.key))
        with EtcdStore(address, SECRET, 1.0, is_new=True) as store:
            assert store.create("node/0", "") == ""
            wait_until(lambda: has(store, "node/0", ""))
        monkeypatch.delenv("ETCDCTL_CACERT")
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(address)


def test_the_user_is_that_of_etcdctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with etcd_servers(tmp_path, number=1) as servers:
        address = servers.address("run")
        servers.require_user("root", "a password")
        assert "user name is empty" in refusal(address)
        monkeypatch.setenv("ETCDCTL_USER", "root:another password")
        assert "user name is empty" in refusal(address)
        monkeypatch.setenv("ETCDCTL_USER", "root:a password")
        with EtcdStore(address, SECRET, 1.0, is_new=True) as store:
            store.keep_alive(store.register())
            wait_until(lambda: has(store, "alive/0", ""))
            store._servers[0].session.headers["Authorization"] = "expired"
            assert written(store, "node/1", "") == ""


@pytest.mark.parametrize("num_events", [6, pytest.param(200, marks=pytest.mark.campaign)])
def test_histories_of_servers_that_are_lost(tmp_path: Path, num_events: int) -> None:
    """One server at a time, or its port, is killed or stopped; clients at all times agree on what was written first."""
    draw = random.Random(3)  # With each kind of event among the first six.
    with (
        etcd_servers(tmp_path, has_gateways=True) as servers,
        EtcdStore(servers.address("run"), SECRET, 1.0, is_new=True) as first,
    ):
        clients = [first, EtcdStore(servers.address("run"), SECRET, 1.0)]
        for client in clients:
            client.keep_alive(client.register())
        for event in range(num_events):
            lost, how = draw.randrange(6), draw.choice([signal.SIGKILL, signal.SIGSTOP])
            servers.signal(lost, how)
            won = [written(client, f"membership/{event}", f"of {i}") for i, client in enumerate(clients)]
            assert won[0] == won[1]
            key, value = f"membership/{event}", won[0]
            for client in clients:
                wait_until(lambda client=client, key=key, value=value: has(client, key, value))
            if how == signal.SIGKILL:
                servers.start(lost)
            else:
                servers.signal(lost, signal.SIGCONT)
            for client in clients:
                wait_until(lambda client=client: has(client, "alive/0", "") and has(client, "alive/1", ""))
        clients[1].close()


def written(client: EtcdStore, key: str, value: str) -> str:
    while True:
        with suppress(StoreAwayError):
            return client.create(key, value)


def test_without_a_quorum_nothing_is_written_and_later_it_is(tmp_path: Path) -> None:
    with etcd_servers(tmp_path) as servers, EtcdStore(servers.address("run"), SECRET, 1.0, is_new=True) as store:
        store.sync()
        for i in (0, 1):
            servers.signal(i, signal.SIGSTOP)
        with pytest.raises(StoreAwayError, match="no etcd server answers"):
            store.create("membership/2", "it")

        def is_away() -> bool:
            with suppress(StoreAwayError):
                store.sync()
                return False
            return True

        wait_until(is_away)
        for i in (0, 1):
            servers.signal(i, signal.SIGCONT)
        assert written(store, "membership/2", "it") == "it"
        wait_until(lambda: not is_away())


def test_a_closed_client_keeps_no_connection_to_a_server_that_was_away(tmp_path: Path) -> None:
    """Not even until Python looks for garbage."""
    with etcd_servers(tmp_path, number=1) as servers:
        before = {*os.listdir("/proc/self/fd")}
        gc.disable()
        try:
            with EtcdStore(servers.address("run"), SECRET, 1.0, is_new=True) as store:
                servers.signal(0, signal.SIGSTOP)
                with pytest.raises(StoreAwayError):
                    store.create("node/0", "")
                servers.signal(0, signal.SIGCONT)
                assert written(store, "node/0", "") == ""
            assert {*os.listdir("/proc/self/fd")} <= before
        finally:
            gc.enable()


@pytest.mark.parametrize("act", [kill_node, *in_campaigns([die])])
def test_a_node_and_a_server_are_lost(tmp_path: Path, servers_of_its_own: EtcdServers, act: object) -> None:
    config = config_of(tmp_path / "run", train__failures={"tolerate": 1, "detect_s": 3})

    def lose() -> None:
        servers_of_its_own.signal(0, signal.SIGSTOP)
        act()  # type: ignore[operator]

    plan = plan_of(config)
    with before_each_step(at(2, 3, lose)):
        address = servers_of_its_own.address("run")
        result = train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1, store=address)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    [line] = failures(config)
    assert [change["kind"] for change in line["changes"]] == ["lost"]
    assert line["done"].startswith("went on with step 3")


def test_the_launcher_is_lost_and_nobody_notices(
    tmp_path: Path, servers_of_its_own: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that joined train to the end, without a restart."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    config = config_of(tmp_path / "run", train__checkpoint_every=6)
    plan, address, fork = plan_of(config), servers_of_its_own.address("run"), multiprocessing.get_context("fork")

    def join() -> None:
        while True:
            try:
                return join_training(config, lambda: None, address, 1)
            except UserError:  # The run has not begun.
                continue

    def listen() -> None:
        train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1, listen=address)

    launcher = fork.Process(target=listen)
    launcher.start()
    with before_each_step(at(2, 3, lambda: os.kill(launcher.pid or 0, signal.SIGKILL))):
        nodes = [fork.Process(target=join) for _ in range(plan.num_ranks)]
        for node in nodes:
            node.start()
    for node in nodes:
        node.join()
    assert [node.exitcode for node in nodes] == [0, 0, 0, 0]
    launcher.join()
    assert launcher.exitcode == -signal.SIGKILL
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert losses == pytest.approx(undisturbed(), rel=1e-12)
    assert [path.name for path in find_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000006"]


@pytest.fixture
def servers_of_its_own(tmp_path: Path) -> Iterator[EtcdServers]:
    with etcd_servers(tmp_path / "servers") as running:
        yield running


def test_a_client_that_is_closed_leaves_nothing_behind(servers: EtcdServers) -> None:
    with closing(EtcdStore(servers.address("closed"), SECRET, 1.0, is_new=True)) as store:
        store.sync()
        assert store._reader is not None
    assert not store._reader.is_alive()
